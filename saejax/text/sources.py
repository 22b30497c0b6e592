"""Where text comes from: an ordered stream of documents that can be entered at any index.

Every source is split into `train` and `heldout` by a hash of the document's group, so that the
evaluation text of a run was never captured for its training, whatever the order or the amount read.
"""

import dataclasses
import hashlib
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saejax.core.errors import ConfigError, DataError

SPLITS = ("train", "heldout")
KINDS = ("stdlib", "files", "hub")

# Parts of the standard library that some distributions leave out, that are tables rather than text,
# or that belong to tests.
_STDLIB_LEFT_OUT = {
    *("test", "tests", "idle_test"),
    *("lib2to3", "encodings", "_pyrepl", "__phello__"),
    *("site-packages", "dist-packages", "__pycache__"),
}


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """What to read and how to pack it.

    Attributes:
        source: `stdlib` (the sources of Python's standard library, always there), `files` or `hub`.
        paths: for `files`: .txt, .jsonl or .parquet files, folders of them, or glob patterns.
        column: field of a .jsonl, .parquet or hub row that holds the text.
        template: if set, the text of a row is `template.format(**row)` instead of one column.
        dataset, subset, dataset_split, revision: for `hub`: a Hugging Face dataset, streamed; pin `revision`.
        heldout_fraction: share of the documents kept for evaluation.
        context_length: tokens in a packed row, the bos included.
        prepend_bos: put the model's bos token in front of every piece of a document.
    """

    source: str = "stdlib"
    paths: tuple[str, ...] = ()
    column: str = "text"
    template: str = ""
    dataset: str = ""
    subset: str = ""
    dataset_split: str = "train"
    revision: str = ""
    heldout_fraction: float = 0.1
    context_length: int = 256
    prepend_bos: bool = True

    def __post_init__(self) -> None:
        if self.source not in KINDS:
            raise ConfigError(f"text.source is {self.source!r}; it must be one of {', '.join(KINDS)}.")
        if self.source == "files" and not self.paths:
            raise ConfigError("text.source is 'files' but text.paths is empty; name at least one file.")
        if self.source == "hub" and not self.dataset:
            raise ConfigError("text.source is 'hub' but text.dataset is empty; name a dataset.")
        if not 0 < self.heldout_fraction < 1:
            raise ConfigError(f"text.heldout_fraction is {self.heldout_fraction}; it must lie between 0 and 1.")
        if self.context_length < 2:
            raise ConfigError(f"text.context_length is {self.context_length}; it must be at least 2.")


@dataclasses.dataclass(frozen=True)
class Document:
    """One text. `index` is its place in the whole source, `group` decides its split."""

    index: int
    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Source:
    """An ordered collection of documents.

    Attributes:
        identity: JSON description of the text, part of a store's identity.
        rows: given a start index, yields (index, name, group, text) for every index from there on.
        heldout_fraction: share of the groups that belongs to `heldout`.
    """

    identity: dict[str, Any]
    rows: Callable[[int], Iterator[tuple[int, str, str, str]]]
    heldout_fraction: float

    def documents(self, split: str, start: int = 0) -> Iterator[Document]:
        """The documents of a split, in order, from source index `start` on."""
        if split not in SPLITS:
            raise ConfigError(f"There is no split {split!r}; choose one of {', '.join(SPLITS)}.")
        for index, name, group, text in self.rows(start):
            if (_hash_fraction(group) < self.heldout_fraction) == (split == "heldout") and text.strip():
                yield Document(index, name, text)


def open_source(config: TextConfig) -> Source:
    """The source that a configuration names.

    Raises:
        DataError: a file or dataset that cannot be read; the message names it.
    """
    return {"stdlib": _open_stdlib, "files": _open_files, "hub": _open_hub}[config.source](config)


def _hash_fraction(group: str) -> float:
    """A number in [0, 1) that depends on the group's name alone."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big") / 2**64


def _open_stdlib(config: TextConfig) -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in root.rglob("*.py")
        # is_file: a distribution may leave a dangling link.
        if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts) and path.is_file() and path.stat().st_size > 200
    ]
    # Hashed order: a capture that stops early has still seen the whole library evenly.
    names = sorted((p.relative_to(root).as_posix() for p in files), key=_hash_fraction)
    if not names:
        raise DataError(f"No .py file of the standard library below {root}; use text.source='files' instead.")
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes())

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index in range(start, len(names)):
            name = names[index]
            text = (root / name).read_text(encoding="utf-8", errors="replace")
            yield index, name, name.split("/")[0].removesuffix(".py"), text

    return Source({"source": "stdlib", "sha256": digest.hexdigest()}, rows, config.heldout_fraction)


def _open_files(config: TextConfig) -> Source:
    files = list(itertools.chain.from_iterable(_expand(pattern) for pattern in config.paths))
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        everything = itertools.chain.from_iterable(_file_texts(path, config) for path in files)
        for index, (name, text) in enumerate(everything):
            if index >= start:
                yield index, name, name, text

    identity = {
        "source": "files",
        "files": [path.name for path in files],
        "sha256": digest.hexdigest(),
        "column": config.column,
        "template": config.template,
    }
    return Source(identity, rows, config.heldout_fraction)


def _expand(pattern: str) -> list[Path]:
    """Files behind one entry of `text.paths`: a file, a folder (its text files), or a glob pattern."""
    path = Path(pattern).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in _READERS and p.is_file())
    else:
        anchor = Path(path.anchor) if path.is_absolute() else Path()
        found = sorted(p for p in anchor.glob(str(path.relative_to(path.anchor))) if p.is_file())
    if not found:
        raise DataError(f"No text file at {pattern!r} (text.paths). Give a file, a folder or a glob pattern.")
    for p in found:
        if p.suffix not in _READERS:
            raise DataError(f"{p}: cannot read {p.suffix!r} files; text.paths takes {', '.join(_READERS)}.")
    return found


def _file_texts(path: Path, config: TextConfig) -> Iterator[tuple[str, str]]:
    for number, row in enumerate(_READERS[path.suffix](path)):
        name = path.name if path.suffix == ".txt" else f"{path.name}:{number + 1}"
        # A .txt file has one field, whatever column the other files are read from.
        plain = path.suffix == ".txt" and not config.template
        yield name, row["text"] if plain else row_text(row, config, f"{path}, row {number + 1}")


def row_text(row: dict[str, Any], config: TextConfig, where: str) -> str:
    """The text of one row: a column, or the template filled with the row's columns."""
    try:
        text = config.template.format_map(row) if config.template else row[config.column]
    except (KeyError, IndexError, AttributeError) as error:
        raise DataError(
            f"{where}: no column {error} for "
            f"{'text.template' if config.template else 'text.column'}; the row has {', '.join(map(str, row))}."
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: text.template {config.template!r} cannot be filled: {error}.") from None
    if not isinstance(text, str):
        raise DataError(f"{where}: column {config.column!r} holds {type(text).__name__}, not text.")
    return text


def _read_txt(path: Path) -> Iterator[dict[str, Any]]:
    yield {"text": path.read_text(encoding="utf-8", errors="replace")}


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (
                ValueError,
                RecursionError,
            ) as error:  # not JSON, not UTF-8, a number without end, too deep
                raise DataError(f"{path}, line {number} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is a {type(row).__name__}, not an object with columns.")
            yield row


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(f"Reading {path} needs pyarrow: pip install 'saejax[data]'.") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from None


_READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _open_hub(config: TextConfig) -> Source:
    try:
        import datasets
    except ImportError:
        raise DataError("text.source='hub' needs the datasets package: pip install 'saejax[data]'.") from None
    try:
        stream = datasets.load_dataset(
            config.dataset,
            config.subset or None,
            split=config.dataset_split,
            revision=config.revision or None,
            streaming=True,
        )
    except Exception as error:  # the library raises many kinds; all mean that the data cannot be had
        raise DataError(
            f"Dataset {config.dataset!r} cannot be opened ({type(error).__name__}: {error}). Check the name, the "
            "revision and the network; a downloaded copy works with text.source='files'."
        ) from None

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        for index, row in enumerate(stream.skip(start), start):
            name = f"{config.dataset}:{index}"
            yield index, name, name, row_text(row, config, name)

    keys = ("dataset", "subset", "dataset_split", "revision", "column", "template")
    identity = {"source": "hub"} | {key: getattr(config, key) for key in keys}
    return Source(identity, rows, config.heldout_fraction)
