"""Experiment files: the shipped ones by name, anyone's by path.

An experiment file defines `get_config()` or `get_config(preset)`, which returns a ConfigDict that begins as
`saejax.experiment.default_config()`. The shipped ones lie in saejax/experiments/ of an installed package and in
configs/ of a checkout.
"""

import functools
import importlib.util
import inspect
import textwrap
from pathlib import Path
from types import ModuleType

from saejax.core.config import OpenConfig, nearest
from saejax.core.errors import ConfigError


def folder() -> Path:
    """The folder of the shipped experiments."""
    package = Path(__file__).parents[1]
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "configs"


def names() -> tuple[str, ...]:
    """The shipped experiments, in alphabetical order."""
    return tuple(sorted(path.stem for path in folder().glob("*.py") if not path.name.startswith("_")))


def shipped(name: str, preset: str = "") -> OpenConfig:
    """The settings of a shipped experiment, with a preset of it.

    Raises:
        ConfigError: no experiment of this name, or no such preset; the nearest is named.
    """
    return settings(module(name), preset)


@functools.cache
def module(name: str) -> ModuleType:
    """The file of a shipped experiment as a module, loaded once. Raises ConfigError: no experiment of this name."""
    if name not in names():
        raise ConfigError(f"There is no shipped experiment {name!r}.{nearest(name, names())}")
    return load(folder() / f"{name}.py")


def presets(name: str) -> tuple[str, ...]:
    """The presets of a shipped experiment, without the empty one."""
    return tuple(preset for preset in getattr(module(name), "PRESETS", ()) if preset)


def load(path: str | Path) -> ModuleType:
    """Any experiment file as a module, without a trace in sys.modules.

    Raises:
        ConfigError: it is not a Python file. What the file itself raises comes through.
    """
    spec = importlib.util.spec_from_file_location("_saejax_experiment", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file; `saejax new mine --from=quickstart` writes one to begin with.")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def settings(experiment_file: ModuleType, preset: str = "") -> OpenConfig:
    """The settings that `get_config` of a loaded file returns.

    Raises:
        ConfigError: the file has no get_config, or no presets where one is asked for.
    """
    get_config = getattr(experiment_file, "get_config", None)
    if get_config is None:
        raise ConfigError(f"{experiment_file.__file__} has no get_config(), which returns an experiment's settings.")
    if not preset:
        return get_config()
    if not inspect.signature(get_config).parameters:
        raise ConfigError(f"{Path(str(experiment_file.__file__)).stem} has no presets; leave :{preset} away.")
    return get_config(preset)


def named(text: str) -> OpenConfig:
    """The settings that --config=<text> begins with. Raises ConfigError: as `find` and `settings`."""
    path, _, preset = find(text).partition(":")
    return settings(load(path), preset)


def find(text: str) -> str:
    """`path[:preset]` for what --config was given: a path, or the name of a shipped experiment.

    A file at that path wins. Else `quickstart`, `quickstart.py` and `configs/quickstart.py` are the shipped one, and
    `mine` is mine.py in the current folder.

    Raises:
        ConfigError: neither a file nor a name; the nearest name is given.
    """
    word, colon, preset = text.partition(":")
    path = Path(word)
    places = [path, Path(f"{word}.py")]
    if word in (name := path.stem, f"{name}.py", f"configs/{name}.py") and name in names():
        places.insert(1, folder() / f"{name}.py")
    for place in places:
        if place.is_file():
            return f"{place}{colon}{preset}"
    near = nearest(path.stem, names())
    raise ConfigError(f"No config file {word!r}, and no shipped experiment of that name.{near}")


def listing() -> str:
    """The shipped experiments: the first line of each file's text, and its presets."""
    lines = []
    for name in names():
        summary = (module(name).__doc__ or "").strip().partition("\n")[0]
        lines.append(f"{name:<24}{summary}")
        if presets(name):
            words = f"presets: {', '.join(presets(name))}"
            lines += textwrap.wrap(
                words, 110, initial_indent=" " * 24, subsequent_indent=" " * 33, break_on_hyphens=False
            )
    return "\n".join(lines)
