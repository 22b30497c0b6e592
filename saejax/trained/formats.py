"""The file formats of trained coders, and the table of those that are known.

A `TrainedCoder` saves itself through this table, so its module imports this one, and here it is called Any.
"""

import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from saejax.core.config import nearest
from saejax.core.errors import ConfigError

Kind = tuple[str, str]


class Format:
    """One way in which dictionaries lie on a disk. A new one is a class under `register_format`.

    Reading and writing keep every latent and every reconstruction: equal to 1e-5 of the largest entry in float32.
    What a format cannot say is refused by name and never dropped.

    Attributes:
        name: as in `saejax convert --to=name`.
        title: the project, as people call it.
        reads: (topology, sparsity) of the coders that `read` can give.
        files: what the files are called, for people.
        sets: a folder holds several coders, one a layer, and `write` adds to it.
        needs: which files a dictionary on the hub is made of, as alternatives: patterns of names in its folder, of
            which each must match a file. Empty where names do not tell; it is not found by a hub id then.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    reads: ClassVar[frozenset[Kind]] = frozenset()
    files: ClassVar[str] = ""
    sets: ClassVar[bool] = False
    needs: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def here(self, path: Path) -> list[Path]:
        """The coders of this format that `path` is: itself, the members of a set (places that `read` takes), or none.

        A look at names and at the first bytes of small files; it does not search folders within.
        """
        raise NotImplementedError

    def among(self, names: Collection[str]) -> dict[str, list[str]]:
        """{place: its files} of the dictionaries in one folder, by nothing but the names of its files.

        The place is "" for the folder as a whole, or one of the files. Names of files in folders within have a slash.
        """
        for patterns in self.needs:
            matched = [
                {name for name in names if fnmatchcase(name, pattern) and name.count("/") == pattern.count("/")}
                for pattern in patterns
            ]
            if all(matched):
                return {"": sorted(set().union(*matched))}
        return {}

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> Any:
        """The `TrainedCoder` at one of the places that `here` gave.

        Args:
            hook_points: (what it reads, ...) or (reads, then writes), where the file does not say.

        Raises:
            DataError: damaged, or something that no coder of saejax is; names the file, the thing and the remedy.
        """
        raise NotImplementedError

    def refuses(self, sae: Any) -> str:
        """The reason why this coder cannot be said in this format; empty where it can."""
        return f"saejax reads {self.title}'s files and does not write them"

    def place_of(self, sae: Any, folder: Path) -> Path:
        """The place at which `read` finds the coder that was written into this folder."""
        return folder

    def usage(self, repo: str, folder: str) -> str:
        """Python that loads `folder` (or "") of a hub repository in the project's own library; mostly not known."""
        return ""

    def write(self, sae: Any, folder: Path) -> list[str]:
        """Write a coder that `refuses` has nothing against; in a set it is added to those that are there.

        Returns:
            What the files do not say without changing a number, one sentence each; mostly nothing.

        Raises:
            DataError: the folder holds something else, or cannot be written.
        """
        raise NotImplementedError


class Formats(Mapping[str, Format]):
    """{name: format}. A file of a folder that `look_in` named is imported when its name, or all, are asked for."""

    def __init__(self) -> None:
        self.registered: dict[str, Format] = {}
        self._files: dict[str, str] = {}

    def look_in(self, package: str) -> None:
        """Formats are in the files of this package, which are mostly called as the format is."""
        path = importlib.import_module(package).__path__
        self._files |= {module.name: f"{package}.{module.name}" for module in pkgutil.iter_modules(path)}

    def __getitem__(self, name: str) -> Format:
        if name not in self.registered and name in self._files:
            importlib.import_module(self._files[name])
        return self.registered[name] if name in self.registered else self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, Format]:
        for module in self._files.values():
            importlib.import_module(module)
        return dict(sorted(self.registered.items()))


FORMATS = Formats()
F = TypeVar("F", bound=Format)


def register_format(kind: type[F]) -> type[F]:
    """Class decorator: `saejax.load`, `sae.save(format=)`, `saejax convert` and `saejax formats` know the format."""
    FORMATS.registered[kind.name] = kind()
    return kind


def format_named(name: str) -> Format:
    """Raises ConfigError for a format that is not known."""
    if name not in FORMATS:
        raise ConfigError(f"There is no format {name!r}.{nearest(name, ['saejax', *FORMATS], listed=True)}")
    return FORMATS[name]
