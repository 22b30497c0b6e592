"""Files of activations side by side and one after the other: which tensor is which hook point, and rows of all."""

import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_object
from saejax.core.places import what_is
from saejax.store.foreign import ENDINGS, Column, Kind, Table, Tensors, open_tensors
from saejax.store.layout import METADATA_NAMES

MASK = "attention_mask"
_METADATA = (*METADATA_NAMES, MASK)
# What others call them, where they are integers.
_ALIASES = {
    **dict.fromkeys(("token_ids", "input_ids", "tokens"), "token_id"),
    **{f"{name}s": name for name in ("document", "position")},
}
_KIND = "activations are [tokens, d] or [sequences, positions, d], float16, float32, float64 or bfloat16"


@dataclasses.dataclass(frozen=True)
class Naming:
    """Names of tensors to hook points.

    Attributes:
        hook_point: of the only tensor that can be activations in each file; else empty.
        tensors: NAME=HOOK_POINT, or NAME for those that are named by their hook point; NAME may hold * and ?.

    Raises:
        ConfigError: neither of them, or both.
    """

    hook_point: str = ""
    tensors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.hook_point) == bool(self.tensors):
            raise ConfigError(
                "Give an import one of --hook_point=blocks.6.resid_pre, for the only tensor of each file, and "
                "--tensors=NAME=HOOK_POINT,... by their names."
            )

    def columns(self, path: Path, name: str, kinds: Mapping[str, Kind]) -> dict[str, str]:
        """{hook point, or token_id, document, position, attention_mask: tensor} of a file that is called `name`.

        Raises:
            DataError: several tensors can be meant, or one that is meant holds no activations; names the file.
        """
        columns = {key: key for key in kinds if key in _METADATA}
        for alias, target in _ALIASES.items():
            if alias in kinds and kinds[alias].integers:
                columns.setdefault(target, alias)
        others = [key for key in kinds if key not in columns.values()]
        if self.hook_point:
            floats = [key for key in others if kinds[key].floats]
            if len(floats) != 1 and (floats or others or not columns):
                raise DataError(
                    f"{path} has {len(floats)} candidates for activations: {_shown(kinds)}; {_KIND}. Name one with "
                    f"--tensors=NAME={self.hook_point} in place of --hook_point."
                )
            return columns | ({self.hook_point: floats[0]} if floats else {})
        for key in others:
            for called in (key, name) if len(others) == 1 else (key,):
                target = self._target(called)
                if target and columns.setdefault(target, key) != key:
                    raise DataError(f"{path}: {columns[target]!r} and {key!r} are both to be {target}; name one.")
                if target:
                    break
        return columns

    def _target(self, name: str) -> str:
        for entry in self.tensors:
            pattern, _, target = entry.partition("=")
            if fnmatchcase(name, pattern):
                return target or name
        return ""


class Part:
    """Tensors of as many rows each, which become columns of a store.

    Attributes:
        columns: by hook point, token_id, document, position, attention_mask.
        n_rows, widths: rows, and d of each hook point.
        lead: the axes of its activations but d: [tokens] or [sequences, positions].
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        wide = {target: column for target, column in columns.items() if column.width}
        self.first = next(iter(wide.values()))
        self.n_rows, self.lead = self.first.rows, self.first.lead
        self.widths = {target: column.width for target, column in wide.items()}
        for target, column in columns.items():
            same = column.lead == self.lead if column.width else column.rows == self.n_rows
            if not same:
                raise DataError(
                    f"{column.path}: {column.name!r} ({target}) is {list(column.shape)}, and {self.first.name!r} of "
                    f"{self.first.path} is {list(self.first.shape)}: they have other rows."
                )
        self._tables = [column.tensors for column in columns.values() if isinstance(column.tensors, Table)]
        if self._tables and any(column.tensors is not self._tables[0] for column in columns.values()):
            raise DataError(
                f"{self._tables[0].path} has columns, and others lie in files beside it. Put all into one table, or "
                "into .npy, .npz, .safetensors or .pt."
            )

    def pieces(self, start: int, size: int) -> Iterator[dict[str, np.ndarray]]:
        """The columns' rows from `start` on, about `size` at once: [n, d], and integers [n].

        Raises:
            DataError: a table is damaged, or its lists have several lengths.
        """
        if self._tables:
            yield from self._tables[0].pieces(self.columns, start, size)
            return
        for low in range(start, self.n_rows, size):
            high = min(self.n_rows, low + size)
            yield {target: column.read(low, high) for target, column in self.columns.items()}


def open_parts(paths: Sequence[str | Path], naming: Naming) -> list[Part]:
    """The rows of files and folders: the first file of every hook point, beside one another, then the second.

    Raises:
        ConfigError: no file, an ending that is not read, or pyarrow is not installed.
        DataError: a missing or damaged file, or files that do not fit each other; names it.
    """
    columns: dict[str, list[Column]] = {}
    names: dict[str, None] = {}
    for path, called in _listed(paths):
        tensors = open_tensors(path, called)
        names |= dict.fromkeys([*tensors.kinds, called])
        for target, name in naming.columns(path, called, tensors.kinds).items():
            columns.setdefault(target, []).append(_column(path, tensors, target, name))
    for entry in naming.tensors:
        pattern = entry.partition("=")[0]
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DataError(f"No file has a tensor {pattern!r} (--tensors); there are: {_few(names)}.")
    hook_points = [target for target in columns if target not in _METADATA]
    if not hook_points:
        raise DataError(f"{paths[0]}: no file holds activations; there are: {_few(names)}.")
    first = hook_points[0]
    for target, those in columns.items():
        if len(those) != len(columns[first]):
            raise DataError(
                f"{target} is in {len(those)} of the files, {first} in {len(columns[first])}: each must be in as many. "
                "Import them separately."
            )
        if other := next((column for column in those if column.width != those[0].width), None):
            raise DataError(
                f"{other.path} has width {other.width}, {those[0].path} has {those[0].width} for {target}: import them "
                "separately."
            )
    return [Part({target: those[number] for target, those in columns.items()}) for number in range(len(columns[first]))]


def _column(path: Path, tensors: Tensors, target: str, name: str) -> Column:
    kind = tensors.kinds[name]
    if target in _METADATA:
        if not kind.integers:
            raise DataError(f"{path}: {name} ({target}) is {kind.dtype} of {kind.axes} axes; it must be integers.")
        return Column(path, tensors, name, tensors.shape(name), 0)
    if not kind.floats:
        raise DataError(f"{path}: {name!r} ({target}) is {kind.dtype} of {kind.axes} axes; {_KIND}.")
    shape = tensors.shape(name)
    if 0 in shape:
        raise DataError(f"{path} holds {list(shape)} activations ({name!r}): there is nothing to import.")
    return Column(path, tensors, name, shape, shape[-1])


def _listed(paths: Sequence[str | Path]) -> Iterator[tuple[Path, str]]:
    """(file, its name for an array that has none): files as they are given, those of a folder by their numbers."""
    for path in map(Path, paths):
        if not path.is_dir():
            if path.suffix not in ENDINGS and (path.suffix or path.is_file()):
                raise ConfigError(f"{path} ends in {path.suffix!r}; activations are read from {', '.join(ENDINGS)}.")
            if not path.is_file():
                raise DataError(f"{path} is no file: {what_is(path)}. Name files of activations.")
            yield path, path.stem
            continue
        there = [file for file in path.rglob("*") if file.is_file() and not _hidden(file, path)]
        files = sorted((file for file in there if file.suffix in ENDINGS), key=lambda file: _numbers(file, path))
        saved = {folder: _saved(folder) for folder in {file.parent for file in files}}
        files = [file for file in files if file.suffix != ".arrow" or file.name in (saved[file.parent] or [file.name])]
        if not files:
            raise DataError(f"{path} is no file and holds none of activations: {what_is(path)}. Name such files.")
        others = Counter(file.suffix or "without an ending" for file in there if file.suffix not in (*ENDINGS, ".json"))
        if others:
            kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(4))
            warnings.warn(f"{path}: {sum(others.values())} files are not read ({kinds}).", stacklevel=2)
        yield from ((file, str(file.relative_to(path).with_suffix(""))) for file in files)


def _saved(folder: Path) -> list[str]:
    """The files that `datasets` says it saved in a folder: others that lie there are its scratch."""
    if not (folder / "state.json").is_file():
        return []
    entries = read_object(folder / "state.json").get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{folder / 'state.json'} lists no files (_data_files). Save the data set again.")
    names = [str(entry.get("filename")) for entry in entries]
    if missing := next((name for name in names if not (folder / name).is_file()), None):
        raise DataError(f"{folder / missing} is missing, which state.json lists. Copy it, or save the data set again.")
    return names


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _numbers(file: Path, folder: Path) -> list[Any]:
    """A key by which layer_9 stands before layer_10."""
    words = re.split(r"(\d+)", file.relative_to(folder).as_posix())
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def _shown(kinds: Mapping[str, Kind]) -> str:
    return _few({f"{name!r} ({kind.dtype}, {kind.axes} axes)": None for name, kind in kinds.items()}, quoted=True)


def _few(names: Mapping[str, None], quoted: bool = False) -> str:
    return ", ".join(name if quoted else repr(name) for name in list(names)[:20]) or "none"
