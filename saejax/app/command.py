"""A command of `saejax`: its fields are its flags, `run` does the work, and the text of its module is its help.

class Formats(Command, takes="words", answers=True):
    def run(self, line: Line) -> None: ...
"""

import abc
import dataclasses
import sys
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, dataclass_transform, get_args, get_type_hints

from absl import flags

from saejax.core.errors import ConfigError
from saejax.core.settings import Setting, Settings, setting, settings_of

Takes = Literal["config", "words", "either"]


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line, besides the command's own flags.

    Attributes:
        config: the experiment's settings with the overrides; None where the command takes none or none was given.
        words: what is no flag.
        present: the names of the command's own flags that stand on the line.
    """

    config: Any = None
    words: Sequence[str] = ()
    present: frozenset[str] = frozenset()

    @property
    def experiment(self) -> Any:
        """The `Experiment` of --config."""
        from saejax.app.experiment import experiment

        return experiment(self.config)

    def workspace(self) -> Any:
        """The `Workspace` of --config. Raises ConfigError for an experiment that trains a prefix and no coder."""
        from saejax.app.training_folders import open_workspace

        return open_workspace(self.experiment)

    def refuse_words(self, remedy: str) -> None:
        """Raise ConfigError where there are words: the command takes none."""
        if self.words:
            raise ConfigError(f"Unexpected argument {self.words[0]!r}; {remedy}")


@dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Command(Settings, abc.ABC):
    """The settings of one command, which has a file of its own in saejax/commands/. Subclasses are frozen dataclasses.

    Attributes:
        takes: "config" (--config; quickstart without it), "words", or "either": words where no --config is given.
        answers: what it prints is what it is for: where that cannot be written, the command has failed. Others go on
            and end as their work does.
        on_page: `saejax serve` offers it.
    """

    takes: ClassVar[Takes] = "config"
    answers: ClassVar[bool] = False
    on_page: ClassVar[bool] = False

    def __init_subclass__(
        cls, takes: Takes | None = None, answers: bool | None = None, on_page: bool | None = None
    ) -> None:
        super().__init_subclass__()
        cls.takes = cls.takes if takes is None else takes
        cls.answers = cls.answers if answers is None else answers
        cls.on_page = cls.on_page if on_page is None else on_page
        dataclasses.dataclass(frozen=True)(cls)

    @abc.abstractmethod
    def run(self, line: Line) -> int | None:
        """Do the work; returns the exit code (None is 0)."""

    @classmethod
    def called(cls, name: str) -> str:
        return f"--{flag_name(name)}"

    @classmethod
    def text(cls) -> str:
        """The help: the summary in one line, examples, the rest."""
        return sys.modules[cls.__module__].__doc__ or ""

    @classmethod
    def summary(cls) -> str:
        return cls.text().partition("\n")[0]

    @classmethod
    def flags(cls) -> dict[str, Setting]:
        """The setting of each flag, by its name on the line."""
        return {flag_name(name): known for name, known in settings_of(cls).items()}

    @classmethod
    def help(cls, text: str, config: str) -> str:
        """The text, and a paragraph for each flag; `config` says what --config is."""
        hints, lines = get_type_hints(cls), []
        if cls.takes != "words":
            lines.append(f"--config: {config}")
        for field in dataclasses.fields(cls):
            known: Setting = field.metadata["setting"]
            name = f"[no]{flag_name(field.name)}" if hints[field.name] is bool else flag_name(field.name)
            doc = f"{', '.join(known.words)}: {known.doc[0].lower()}{known.doc[1:]}" if known.words else known.doc
            value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
            default = "" if value in (None, "", False) else f" (default: {value})"
            lines.append(f"--{name}: {doc}{default}")
        lines = [textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="      ") for line in lines]
        return "\n".join([text.rstrip(), *(["", "flags:", *lines] if lines else [])])

    def refuse_idle(self, line: Line, word: str) -> None:
        """Raise ConfigError for a flag on the line that does nothing for the command's first word."""
        for name, known in self.flags().items():
            if name in line.present and known.words and word not in known.words:
                command = type(self).__module__.rpartition(".")[2]
                raise ConfigError(f"--{name} does nothing for `saejax {command} {word}`; leave it away.")


def flag_name(field: str) -> str:
    """A field's name without the underscore by which it is no word of Python: from_ -> from."""
    return field.rstrip("_")


def define_flags(command: type[Command]) -> list[flags.FlagHolder[Any]]:
    """One flag of absl for each field. A list is given with commas, by one flag or several."""
    hints, made = get_type_hints(command), []
    for field in dataclasses.fields(command):
        name, doc = flag_name(field.name), field.metadata["setting"].doc
        kind = hints[field.name]
        if isinstance(kind, types.UnionType):
            kind = get_args(kind)[0]
        if kind in _DEFINE:
            made.append(_DEFINE[kind](name, field.default, doc))
        else:
            default = [str(value) for value in cast(Sequence[object], field.default)] or None
            made.append(flags.DEFINE_multi(flags.ListParser(), flags.ListSerializer(","), name, default, doc))
    return made


_DEFINE: Mapping[Any, Any] = {
    bool: flags.DEFINE_boolean,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def from_flags(command: type[Command], made: Sequence[flags.FlagHolder[Any]]) -> Command:
    """The command with the values on the line. Raises ConfigError: a value out of its range."""
    values = {}
    for field, flag in zip(dataclasses.fields(command), made, strict=True):
        value = flag.value
        if isinstance(field.default, tuple):
            value = tuple(item for items in value or () for item in items)
            if field.default and isinstance(field.default[0], int):
                try:
                    value = tuple(map(int, value))
                except ValueError:
                    listed = ",".join(value)
                    raise ConfigError(f"--{flag.name} is {listed!r}; it must be whole numbers with commas.") from None
        values[field.name] = value
    return command(**values)


class OfCheckpoint(Command):
    """Commands that read one checkpoint of a run."""

    step: str = setting("", "Of a run: which checkpoint, or best; empty for the newest.")

    @property
    def checkpoint(self) -> int | str | None:
        return (int(self.step) if self.step.isdigit() else self.step) or None


DICTIONARIES = (
    "A dictionary instead of the config's own run: a run, a folder, a file or a hub id; several with commas, or all "
    "below a folder."
)
