"""A store of activations that others computed: their files' rows through the same writer as a capture's."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.store.foreign import ForeignRows, Piece, open_foreign
from saejax.store.layout import METADATA_NAMES, StoreLayout
from saejax.store.shard import finite_rows
from saejax.store.writer import StoreWriter

_PIECE_BYTES = 32 << 20
_MOST_PIECE_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """Settings of an import of files.

    Attributes:
        hook_point: the name that the activations get, as blocks.6.resid_pre.
        tensor: name of the tensor or column in each file; empty for the only one that can be meant.
        d: the width that the files must have; 0 for any.
        non_finite: `abort`, or `drop` the rows that hold NaN or infinity, also after rounding to bfloat16 (counted as
            dropped_non_finite).
        model, revision: which language model they come from, for the record; empty for unknown.
        layout, seed: of the store.
    """

    hook_point: str
    tensor: str = ""
    d: int = 0
    non_finite: str = "abort"
    model: str = ""
    revision: str = ""
    layout: StoreLayout = dataclasses.field(default_factory=StoreLayout)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.non_finite not in ("abort", "drop"):
            raise ConfigError(f"non_finite is {self.non_finite!r}; it must be abort or drop.")
        if self.revision and not self.model:
            raise ConfigError(f"revision={self.revision} without a model: name the model too.")


def import_files(
    out: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    config: ImportConfig,
    progress: Callable[[int, int], Callable[[int], object]] = lambda total, done: lambda rows: None,
) -> tuple[int, int]:
    """Write the rows of `files`, in the order given, into the store `out`.

    Tensors or columns named token_id, document and position become the store's metadata; either all files have one or
    none. Without them token_id is -1, document is the number of the file (from 0) and position is the row in that file,
    so that every row can still be traced. The identity holds each file's name, size and sha256. Killed at any moment
    and run again, the import continues and leaves the same bytes.

    Returns:
        (rows of the store, rows dropped because they were not finite).

    Raises:
        ConfigError: no file, an ending that is not read, a bad hook point name.
        DataError: a missing or damaged file, files that do not fit each other, NaN or infinity, disk full.
        BusyError: another process is writing `out`.
    """
    if not files:
        raise ConfigError("There is no file to import: name at least one.")
    sources = [open_foreign(path, config.tensor) for path in files]
    _check_fit(files, sources, config.d)
    total = sum(source.n_rows for source in sources)
    with StoreWriter.open(
        out,
        identity=_import_identity(files, sources, config),
        hook_points={config.hook_point: sources[0].width},
        n_tokens=total,
        layout=config.layout,
        seed=config.seed,
    ) as writer:
        if not writer.complete:
            advance = progress(total, writer.committed_rows)
            begin = writer.resume or {"file": 0, "row": 0}
            for number in range(begin["file"], len(sources)):
                row = begin["row"] if number == begin["file"] else 0
                size = max(1, min(_MOST_PIECE_ROWS, _PIECE_BYTES // (4 * sources[number].width)))
                for piece in sources[number].pieces(row, size):
                    before = writer.rows
                    _append(writer, config, files[number], {"file": number, "row": row}, piece)
                    row += len(piece[0])
                    advance(writer.rows - before)
            writer.finish()
        return writer.committed_rows, writer.counters.get("dropped_non_finite", 0)


def _append(
    writer: StoreWriter, config: ImportConfig, path: str | os.PathLike[str], cursor: dict[str, Any], piece: Piece
) -> None:
    """Hand the rows of a piece that are to be stored to the writer."""
    activations, metadata = piece
    finite = finite_rows(activations)
    dropped = int((~finite).sum())
    if dropped and config.non_finite == "abort":
        first = cursor["row"] + int(np.flatnonzero(~finite)[0])
        raise DataError(
            f"{os.fspath(path)}: NaN or infinity (as bfloat16) in {dropped} of the {len(finite):,} rows from "
            f"{cursor['row']:,} on, the first is row {first:,}. Mend the file, or leave such rows out with "
            "--non_finite=drop."
        )
    unknown = {
        "token_id": np.full(len(finite), -1),
        "document": np.full(len(finite), cursor["file"]),
        "position": cursor["row"] + np.arange(len(finite)),
    }
    writer.append(
        {config.hook_point: activations[finite]},
        {name: metadata.get(name, unknown[name])[finite] for name in METADATA_NAMES},
        cursor=cursor,
        counters={"dropped_non_finite": dropped},
    )


def _check_fit(files: Sequence[str | os.PathLike[str]], sources: Sequence[ForeignRows], d: int) -> None:
    if d and sources[0].width != d:
        raise DataError(f"{os.fspath(files[0])} has width {sources[0].width}, but d={d} was asked for.")
    for path, source in zip(files, sources, strict=True):
        for what in ("width", "metadata"):
            first, other = (getattr(s, what) for s in (sources[0], source))
            if first != other:
                raise DataError(
                    f"{os.fspath(path)} has {what} {other}, {os.fspath(files[0])} has {first}: import them separately."
                )


def _import_identity(
    files: Sequence[str | os.PathLike[str]], sources: Sequence[ForeignRows], config: ImportConfig
) -> dict[str, Any]:
    entries = []
    for path, source in zip(files, sources, strict=True):
        with open(path, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        # The name alone: the files may move to another folder between two runs.
        entries.append({"name": Path(path).name, "rows": source.n_rows, "sha256": digest})
    imported = {
        "files": entries,
        "tensor": config.tensor,
        "metadata": list(sources[0].metadata),
        "non_finite": config.non_finite,
    }
    lm = {"lm": {"model": config.model, "revision": config.revision}} if config.model else {}
    return {**lm, "imported": imported}
