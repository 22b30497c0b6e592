"""The folders that the server may look into, and nothing else: every name from a request becomes a path here.

A site is these and the experiments and commands that every part of the server knows.
"""

import dataclasses
import os
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from saejax.app.experiment import FOREIGN
from saejax.core.errors import ConfigError
from saejax.serve.problems import Problem

# Of the server's own: jobs, plans, notes of foreign dictionaries.
OWN = ".serve"
_LONGEST = 1024


@dataclasses.dataclass(frozen=True)
class Folders:
    """The folders of the command line, links resolved.

    Attributes:
        runs, stores: the folders of all runs and of all stores.
        data: more folders, with activations and texts that a training may read.
        dictionaries: {label: folder or file} of other projects' dictionaries, shown as @label.
    """

    runs: Path
    stores: Path
    data: tuple[Path, ...] = ()
    dictionaries: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("runs", "stores"):
            object.__setattr__(self, key, _real(getattr(self, key)))
        object.__setattr__(self, "data", tuple(map(_real, self.data)))
        object.__setattr__(self, "dictionaries", {name: _real(path) for name, path in self.dictionaries.items()})

    @property
    def own(self) -> Path:
        """The folder of what is nobody else's."""
        return self.runs / OWN

    def run(self, name: str) -> Path:
        """The folder below `runs` that a name means, as quickstart or mysweep/topk.

        Raises:
            Problem: 404: there is none, or it lies elsewhere.
        """
        return _inside(self.runs, name, "run")

    def store(self, name: str) -> Path:
        """The folder below `stores` that a name means.

        Raises:
            Problem: 404: there is none, or it lies elsewhere.
        """
        return _inside(self.stores, name, "store")

    def dictionary(self, name: str) -> Path:
        """The folder of a run, or the place of a dictionary @label.

        Raises:
            Problem: 404: there is none.
        """
        if not name.startswith(FOREIGN):
            return self.run(name)
        if name[1:] not in self.dictionaries:
            known = ", ".join(FOREIGN + label for label in self.dictionaries) or "none (--dictionaries)"
            raise Problem(404, f"There is no dictionary {name!r}; the server was given {known}.")
        return self.dictionaries[name[1:]]

    def allowed(self, path: str) -> Path:
        """The path with its links resolved, where it lies below a folder that the server was given.

        Raises:
            ConfigError: it lies elsewhere.
        """
        if _odd(path):
            raise ConfigError(f"{path[:80]!r} is no path.")
        real = _real(Path(path))
        given = (self.runs, self.stores, *self.data, *self.dictionaries.values())
        if not any(real == folder or folder in real.parents for folder in given) or OWN in real.parts:
            raise ConfigError(
                f"{path} lies below none of the folders that the server was given. Start it with --data={real.parent} "
                "to allow it."
            )
        return real


def _inside(above: Path, name: str, what: str) -> Path:
    parts = name.split("/")
    if _odd(name) or any(part in ("", ".", "..") or part.startswith(".") for part in parts):
        raise Problem(404, f"There is no {what} {name[:80]!r}.")
    path = _real(above.joinpath(*parts))
    # A link may lead to another folder of those that are shown, and nowhere else.
    if above not in path.parents or OWN in path.relative_to(above).parts:
        raise Problem(404, f"{name} lies outside of {above.name}, and is not shown.")
    if not path.exists():
        raise Problem(404, f"There is no {what} {name!r}.")
    return path


def _odd(text: str) -> bool:
    return not text or len(text) > _LONGEST or any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text)


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)[:80]!r} is no path ({error}).") from None


@dataclasses.dataclass(frozen=True)
class Site:
    """The limits of one server.

    Attributes:
        folders: the only ones that it looks into.
        experiments: {label: file}: the only ones that it executes; the shipped ones and those of the command line.
        commands: {name: summary} of the commands that the page starts.
        jobs_at_once: processes that it runs at a time; others wait.
    """

    folders: Folders
    experiments: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    commands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    jobs_at_once: int = 1
