"""Texts with labels of two classes: those that the package sae-probes ships, or a folder of your own.

    <folder>/cleaned_data/<name>.csv.zst     columns prompt, target (and others)
    <folder>/probing_datasets_MASTER.csv.zst which of them have two classes

The package is found and not imported, because its import needs PyTorch and SAELens.
"""

import csv
import dataclasses
import importlib.util
import io
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from saejax.core.config import nearest
from saejax.core.errors import ConfigError, DataError
from saejax.core.extras import installing
from saejax.core.files import read_bounded
from saejax.runs.made import digest

_PACKAGE = "sae_probes"
_LIST, _INSIDE = "probing_datasets_MASTER.csv", "cleaned_data"
_BINARY = "Binary Classification"
_ENDINGS = (".csv", ".csv.zst")
# Bytes of a file, and of what it holds.
_LARGEST_DATASET = 256 << 20
# Rows that sae-probes reads of a data set.
_FIRST_ROWS = 5000


@dataclasses.dataclass(frozen=True)
class LabelledTexts:
    """A data set of two classes: `labels` int64 [N] are 0 or 1, the classes in alphabetical order."""

    name: str
    texts: tuple[str, ...]
    labels: np.ndarray

    @property
    def sha256(self) -> str:
        """Of texts and labels in their order; the name is not of it."""
        return digest(self.texts, self.labels)


def needed(module: str, package: str) -> None:
    """Raise ConfigError with the command that installs it, unless `module` is installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"Probing needs the package {package}: {installing('probes')}")


def data_folder(given: str = "") -> Path:
    """The folder of the data sets: the one that is given, or that of the installed package sae-probes."""
    if given:
        if not Path(given).is_dir():
            raise ConfigError(f"probes.data is {given!r}, which is no folder.")
        return Path(given)
    spec = importlib.util.find_spec(_PACKAGE)
    places = [Path(place) / "data" for place in (spec.submodule_search_locations or ())] if spec else []
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(
        "The data sets of sae-probes are not here: pip install --no-deps sae-probes (45 MB; nothing of it is run), or "
        "name a folder of data sets: --config.probes.data=my/folder"
    )


def files(folder: Path) -> dict[str, Path]:
    """{name: file} of the data sets of two classes in a folder, in alphabetical order.

    Where sae-probes' list of data sets lies in the folder, it says which have two classes; else all are taken.
    """
    inside = folder / _INSIDE if (folder / _INSIDE).is_dir() else folder
    by_name = {_stem(path): path for path in sorted(inside.iterdir()) if path.name.endswith(_ENDINGS)}
    by_name.pop(_LIST.partition(".")[0], None)
    for path in (folder / _LIST, folder / f"{_LIST}.zst"):
        if path.is_file():
            rows = _columns(path, ("Dataset save name", "Data type"))
            two = {Path(name).name.partition(".")[0] for name, kind in rows if kind == _BINARY}
            by_name = {name: place for name, place in by_name.items() if name in two}
    if not by_name:
        raise ConfigError(f"{folder} holds no data set; one is <name>.csv or <name>.csv.zst, in it or in {_INSIDE}/.")
    return by_name


def chosen(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that `words` mean: names, or patterns as in 117_us_state_* and *."""
    taken: dict[str, None] = {}
    for word in words:
        meant = [name for name in names if fnmatchcase(name, word)]
        if not meant:
            raise ConfigError(f"There is no data set {word!r}.{nearest(word, names)} --probes=all takes all.")
        taken |= dict.fromkeys(meant)
    return list(taken)


def read(path: Path) -> LabelledTexts:
    """The first 5,000 rows of a data set."""
    rows = _columns(path, ("prompt", "target"))[:_FIRST_ROWS]
    classes = sorted({target for _, target in rows})
    if len(classes) != 2:
        raise DataError(f"{path} has {len(classes)} classes in its column target; a probe needs two.")
    labels = np.array([classes.index(target) for _, target in rows], np.int64)
    return LabelledTexts(_stem(path), tuple(prompt for prompt, _ in rows), labels)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".zst").removesuffix(".csv")


def _columns(path: Path, names: Sequence[str]) -> list[tuple[str, ...]]:
    """These columns of a table, row by row."""
    try:
        lines = [line for line in csv.reader(io.StringIO(_decompressed_text(path), newline=""), strict=True) if line]
    except csv.Error as error:
        raise DataError(f"{path} is no table of comma-separated values: {error}.") from None
    head = lines[0] if lines else []
    if missing := [name for name in names if name not in head]:
        raise DataError(f"{path} has no column {missing[0]!r}; its first line is {', '.join(head)[:100]!r}.")
    if short := next((n for n, line in enumerate(lines) if len(line) != len(head)), 0):
        raise DataError(f"{path}: row {short} has {len(lines[short])} fields in place of {len(head)}.")
    at = [head.index(name) for name in names]
    return [tuple(line[i] for i in at) for line in lines[1:]]


def _decompressed_text(path: Path) -> str:
    raw = read_bounded(path, _LARGEST_DATASET)
    if path.suffix == ".zst":
        needed("zstandard", "zstandard")
        import zstandard

        try:
            with zstandard.ZstdDecompressor().stream_reader(raw) as stream:
                raw = stream.read(_LARGEST_DATASET + 1)
        except zstandard.ZstdError as error:
            raise DataError(f"{path} is damaged ({error}); restore it.") from None
        if len(raw) > _LARGEST_DATASET:
            raise DataError(f"{path} holds more than {_LARGEST_DATASET:,} bytes; a data set has fewer.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}).") from None
