"""The commands of `saejax`, one file each: its text is the help, its `Command` the flags, `run` the work.

`saejax x`, `python -m saejax x` and, from a checkout, `python -m launch.x` are the same. A file in this folder is a
command unless its name begins with _, and nothing lists them. Nothing heavy is imported before a command runs.
"""

import importlib
import importlib.metadata
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import saejax
from saejax.app import cli
from saejax.app.command import Command
from saejax.app.experiments import names as experiment_names
from saejax.core.config import nearest
from saejax.core.errors import ConfigError

# The way of an experiment; the others follow in alphabetical order.
_FIRST = ("quickstart", "new", "experiments", "plan", "preflight", "pipeline", "capture", "train", "evaluate", "report")


class _Commands(Mapping[str, type[Command]]):
    """Name -> the command of that file, which is imported when it is asked for."""

    def __getitem__(self, name: str) -> type[Command]:
        if name not in self._names():
            raise KeyError(name)
        module = importlib.import_module(f"{__name__}.{name}")
        known = [known for known in vars(module).values() if isinstance(known, type) and issubclass(known, Command)]
        return next(command for command in known if command.__module__ == module.__name__)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> list[str]:
        names = {module.name for module in pkgutil.iter_modules(__path__) if module.name[0] != "_"}
        return [*(name for name in _FIRST if name in names), *sorted(names.difference(_FIRST))]


COMMANDS: Mapping[str, type[Command]] = _Commands()
_HELP = ("help", "--help", "-help", "-h")


def main() -> None:
    """`saejax <command> ...`: run it and exit with its code; 2 for a command that does not exist."""
    words = sys.argv[1:]
    # What the record of a run shall show, however saejax was found.
    sys.argv = ["saejax", *words]
    named = None
    with cli.guarded():
        if words[:1] == ["help"] and len(words) > 1:
            words = [words[1], "--help"]
        if not words or words[0] in _HELP:
            print(overview())
        elif words[0] in ("--version", "version"):
            print(f"saejax {importlib.metadata.version('saejax')}")
        else:
            named = _named_command(words[0], words[1:])
    if named is not None:
        cli.run(*named)


def launch(file: str) -> None:
    """`python -m launch.<name> ...` of a checkout: the command of that script's name, which calls itself so."""
    name = Path(file).stem
    text = re.sub(rf"\bsaejax {name}\b", f"python -m launch.{name}", COMMANDS[name].text())
    for shipped in experiment_names():
        text = re.sub(rf"--config={shipped}\b(?!\.py)", f"--config=configs/{shipped}.py", text)
    cli.run(COMMANDS[name], sys.argv, help_code=1, text=text)


def overview() -> str:
    """Every command in a line, and examples."""
    commands = "\n".join(f"  {name:<13}{_summary(name)}" for name in COMMANDS)
    return f"""\
saejax: sparse dictionaries on language models, trained in JAX.

{commands}

  saejax quickstart                           from text to an evaluated SAE, in a few minutes
  saejax new mine --from=quickstart           writes mine.py, an experiment to edit
  saejax pipeline --config=mine.py --config.coder.k=32
  saejax train --help                         what a command does and takes"""


def _summary(name: str) -> str:
    """The first line of a command's file, which is not imported for it."""
    with (Path(__path__[0]) / f"{name}.py").open(encoding="utf-8") as file:
        return file.readline().strip('"\n')


def _named_command(word: str, rest: Sequence[str]) -> tuple[type[Command], list[str]]:
    """(command, its argv) of `saejax <word> <rest>`; the word may be quickstart:preset.

    Raises:
        ConfigError: no such command, or a preset where no experiment is named.
    """
    name, colon, preset = word.partition(":")
    if name.startswith("-"):
        raise ConfigError(f"Name a command before {name!r}, as in: saejax pipeline --config=quickstart")
    if name not in COMMANDS and name in saejax.__all__:
        raise ConfigError(f"{name} is no command but a part of the library: import saejax; saejax.{name}(...)")
    if name not in COMMANDS:
        raise ConfigError(f"There is no command {name!r}.{nearest(name, COMMANDS)}")
    if name == "quickstart" and not any(re.match("--?config(=|$)", other) for other in rest):
        rest = [f"--config=quickstart{colon}{preset}", *rest]
    elif colon:
        raise ConfigError(f"{word!r} names no experiment; give --config=<experiment>{colon}{preset}.")
    return COMMANDS[name], [f"saejax {name}", *rest]
