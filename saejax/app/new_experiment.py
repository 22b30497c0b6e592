"""A shipped experiment as a flat file to edit: one line for every setting that differs from its default."""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.app.experiments import find, load, names, settings
from saejax.app.experiments import folder as shipped_folder
from saejax.core.config import to_config_dict, to_json
from saejax.core.errors import ConfigError

_LINE_LENGTH = 110
# An int of this size is written as 1_000_000.
_LONG = 10_000


def write_new(name: str, source: str, force: bool = False, folder: Path = Path()) -> Path:
    """Write `<name>.py`: the experiment `source` (name or file, with an optional :preset) under the name `name`.

    The file gives the same experiment but for its name and its store. A store that shipped experiments share is theirs:
    with another model or text this one would fill it, and they would be refused. The file of a user's own keeps the
    store that it names.

    Raises:
        ConfigError: a name that cannot be a file's and a run's, a file that is there (unless `force`), an unknown
            source, or a folder that cannot be written.
    """
    path = folder / f"{name}.py"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,99}", name):
        raise ConfigError(f"The name is {name!r}; it must be up to 100 letters, digits, '_' and '-', such as mine.")
    if name in names():
        raise ConfigError(f"{name!r} is the name of a shipped experiment; choose another one.")
    # Python looks into the current folder first.
    module = importlib.util.find_spec(name) if name.isidentifier() else None
    if module is not None and Path(module.origin or name).resolve() != path.resolve():
        raise ConfigError(f"{path} would hide the Python module {name!r} from every program here; choose another name.")
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; choose another name, or overwrite it with --force.")
    text = text_of(name, source)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def text_of(name: str, source: str) -> str:
    """The content of the new file."""
    file, _, preset = find(source).partition(":")
    config = settings(load(file), preset)
    shared = config.store if Path(file).parent == shipped_folder() else ""
    config.name = name
    if shared:
        config.store = ""
    experiment(config)
    also = f"\n\nIts store is its own. --config.store={shared} reads what {source} captured." if shared else ""
    return as_file(
        config,
        f"{name}, made from {source}.{also}",
        f"saejax {command_of(config)} --config={name}.py [--config.train.lr=3e-4]",
    )


def as_file(config: Any, summary: str, example: str) -> str:
    """An experiment file with these settings, flat: no shipped experiment decides anything of it any more."""
    top: list[str] = []
    sections: dict[str, list[str]] = {}
    for key, value in _changed_settings(config.to_dict(), default_config().to_dict(), to_json(Experiment())):
        lines = sections.setdefault(key.partition(".")[0], []) if "." in key else top
        lines.append(f"    c.{key} = {_literal(value, 4 + len(f'c.{key} = '))}")
    body = "\n\n".join("\n".join(lines) for lines in (top, *sections.values()))
    return (
        f'"""{summary}\n\n'
        f"    {example}\n\n"
        "Each line sets what differs from its default; what is not here has its default.\n"
        '"""\n\n'
        "from ml_collections import config_dict\n\n"
        "from saejax.experiment import default_config\n\n\n"
        "def get_config() -> config_dict.ConfigDict:\n"
        "    c = default_config()\n"
        f"{body}\n"
        "    return c\n"
    )


def file_of(e: Experiment, summary: str, example: str) -> bytes:
    """The experiment as a file of literals, so that no text of a request is ever executed.

    Raises:
        ConfigError: settings that no file can hold.
    """
    try:
        return as_file(to_config_dict(e), summary, example).encode()
    except UnicodeEncodeError:
        raise ConfigError("A setting holds half of a letter (a lone surrogate); use UTF-8.") from None


def next_command(path: Path) -> str:
    """The command that runs the whole experiment of a file."""
    return f"saejax {command_of(settings(load(path)))} --config={path}"


def command_of(config: Any) -> str:
    """The command that runs the whole of an experiment: pipeline, sweep, study, truth or prefix."""
    defaults = default_config()
    if config.prefix.source:
        return "prefix"
    for section, command in (("study", "study"), ("attribution", "study"), ("sweep", "sweep"), ("truth", "truth")):
        if config[section].to_dict() != defaults[section].to_dict():
            return command
    return "pipeline"


def _changed_settings(
    values: Mapping[str, Any], defaults: Mapping[str, Any], order: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, Any]]:
    """(key, value) of each setting that is not its default, in the dataclasses' order: a ConfigDict knows none."""
    for key in order:
        if isinstance(values[key], Mapping):
            yield from _changed_settings(values[key], defaults[key], order[key], f"{above}{key}.")
        elif values[key] != defaults[key]:
            yield f"{above}{key}", values[key]


def _literal(value: Any, column: int) -> str:
    """A setting as Python writes it, from `column` on; long tuples and dictionaries take a line for each item."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) and abs(value) >= _LONG:
        return f"{value:_}"
    if isinstance(value, tuple | list):
        items, ends = [_literal(item, 8) for item in value], "()"
    elif isinstance(value, Mapping):
        items, ends = [f"{_literal(key, 8)}: {_literal(item, 8)}" for key, item in value.items()], "{}"
    else:
        return repr(value)
    comma = "," if ends == "()" and len(items) == 1 else ""
    line = f"{ends[0]}{', '.join(items)}{comma}{ends[1]}"
    if column + len(line) <= _LINE_LENGTH or column == 8:
        return line
    return "\n".join([ends[0], *(f"        {item}," for item in items), f"    {ends[1]}"])
