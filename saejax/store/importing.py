"""A store of activations that others computed: their files' rows through the same writer as a capture's."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.store.layout import METADATA_NAMES, StoreLayout
from saejax.store.parts import MASK, Naming, Part, open_parts
from saejax.store.shard import finite_rows
from saejax.store.writer import StoreWriter

_PIECE_BYTES = 32 << 20
_MOST_PIECE_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class ImportConfig:
    """Settings of an import of files.

    Attributes:
        hook_point: the name that the only tensor of activations in each file gets, as blocks.6.resid_pre; or
        tensors: names of tensors and their hook points, as `Naming` has them.
        d: the width that all activations must have; 0 for any.
        non_finite: `abort`, or `drop` the rows that hold NaN or infinity, also after rounding to bfloat16 (counted as
            dropped_non_finite).
        drop_first: positions at the front of each text that are left out (counted as dropped_first).
        model, revision: which language model they come from, for the record; empty for unknown.
        layout, seed: of the store.
    """

    hook_point: str = ""
    tensors: tuple[str, ...] = ()
    d: int = 0
    non_finite: str = "abort"
    drop_first: int = 0
    model: str = ""
    revision: str = ""
    layout: StoreLayout = dataclasses.field(default_factory=StoreLayout)
    seed: int = 0

    @property
    def naming(self) -> Naming:
        return Naming(self.hook_point, tuple(self.tensors))

    def __post_init__(self) -> None:
        if self.non_finite not in ("abort", "drop"):
            raise ConfigError(f"non_finite is {self.non_finite!r}; it must be abort or drop.")
        if self.revision and not self.model:
            raise ConfigError(f"revision={self.revision} without a model: name the model too.")
        _ = self.naming


def import_files(
    out: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    config: ImportConfig,
    progress: Callable[[int, int], Callable[[int], object]] = lambda total, done: lambda rows: None,
) -> tuple[int, int]:
    """Write the rows of `files`, in the order given, into the store `out`; of a folder all files, by their numbers.

    Tensors are [tokens, d] or [sequences, positions, d]. Those of one hook point follow one another file by file, and
    those of several hook points lie side by side. Tensors or columns of integers named token_id, document and position
    (also token_ids, tokens, input_ids, documents, positions) become the store's metadata. Without them token_id is -1;
    document is the number of the sequence, where there are no sequences of the file (from 0); position is the place in
    the sequence, or the row in the file: so every row can still be traced. Rows where attention_mask is 0 are left out,
    and counted as dropped_padding. The identity holds each file's name, size and sha256. Killed at any moment and run
    again, the import continues and leaves the same bytes.

    Returns:
        (rows of the store, rows dropped because they were not finite).

    Raises:
        ConfigError: no file, an ending that is not read, a bad hook point name.
        DataError: a missing or damaged file, files that do not fit each other, NaN or infinity, disk full.
        BusyError: another process is writing `out`.
    """
    if not files:
        raise ConfigError("There is no file to import: name at least one.")
    parts = open_parts([os.fspath(file) for file in files], config.naming)
    for name, width in parts[0].widths.items():
        if config.d and width != config.d:
            raise DataError(f"{parts[0].columns[name].path} has width {width}, but d={config.d} was asked for.")
    with StoreWriter.open(
        out,
        identity=_import_identity(parts, config),
        hook_points=parts[0].widths,
        n_tokens=sum(part.n_rows for part in parts),
        layout=config.layout,
        seed=config.seed,
    ) as writer:
        if not writer.complete:
            advance = progress(sum(part.n_rows for part in parts), writer.committed_rows)
            begin = writer.resume or {"file": 0, "row": 0}
            sequences = [part.lead[0] if len(part.lead) > 1 else 1 for part in parts]
            for number in range(begin["file"], len(parts)):
                row = begin["row"] if number == begin["file"] else 0
                before = sum(sequences[:number])
                size = max(1, min(_MOST_PIECE_ROWS, _PIECE_BYTES // (4 * sum(parts[number].widths.values()))))
                for piece in parts[number].pieces(row, size):
                    written = writer.rows
                    _append(writer, config, parts[number], before, {"file": number, "row": row}, piece)
                    row += len(next(iter(piece.values())))
                    advance(writer.rows - written)
            writer.finish()
        return writer.committed_rows, writer.counters.get("dropped_non_finite", 0)


def _append(
    writer: StoreWriter,
    config: ImportConfig,
    part: Part,
    before: int,
    cursor: dict[str, int],
    piece: dict[str, np.ndarray],
) -> None:
    """Hand the rows of a piece that are to be stored to the writer; `before` its part are so many documents."""
    row = cursor["row"]
    padding = piece[MASK] == 0 if MASK in piece else np.zeros(len(next(iter(piece.values()))), bool)
    finite_of = {name: finite_rows(piece[name]) | padding for name in part.widths}
    finite = np.logical_and.reduce(list(finite_of.values()))
    dropped = int((~finite).sum())
    if dropped and config.non_finite == "abort":
        name = next(name for name, rows in finite_of.items() if not rows.all())
        first = row + int(np.flatnonzero(~finite_of[name])[0])
        raise DataError(
            f"{part.columns[name].path}: NaN or infinity (as bfloat16) in {(~finite_of[name]).sum()} of the "
            f"{len(finite):,} rows from {row:,} on, the first is row {first:,} of {name}. Mend the file, or leave such "
            "rows out with --non_finite=drop."
        )
    rows = row + np.arange(len(finite))
    document, position = np.divmod(rows, part.lead[1]) if len(part.lead) > 1 else (np.zeros_like(rows), rows)
    unknown = {"token_id": np.full(len(finite), -1), "document": before + document, "position": position}
    leads = piece.get("position", position) < config.drop_first
    begins = len(part.lead) > 1 and not (padding & (position == 0)).any()
    if config.drop_first and not begins and "position" not in piece:
        raise DataError(
            f"{next(iter(part.columns.values())).path} has rows in one line or padding in front, and --drop_first "
            "needs to know where texts begin. Give sequences, [sequences, positions, d], or integers named position."
        )
    counters = {"dropped_non_finite": dropped}
    counters |= {"dropped_padding": int(padding.sum())} if MASK in piece else {}
    counters |= {"dropped_first": int((leads & finite & ~padding).sum())} if config.drop_first else {}
    keep = finite & ~padding & ~leads
    writer.append(
        {name: piece[name][keep] for name in part.widths},
        {name: piece.get(name, unknown[name])[keep] for name in METADATA_NAMES},
        cursor=cursor,
        counters=counters,
    )


def _import_identity(parts: Sequence[Part], config: ImportConfig) -> dict[str, Any]:
    rows = {column.path: column.rows for part in parts for column in part.columns.values()}
    entries = []
    for path, count in rows.items():
        with path.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        # The name alone: the files may move to another folder between two runs.
        entries.append({"name": path.name, "rows": count, "sha256": digest})
    # Sequences say which document a row is of and where it stands there.
    known = {"document", "position"} if all(len(part.lead) > 1 for part in parts) else set[str]()
    imported = {
        "files": entries,
        "tensors": list(config.tensors),
        "metadata": [name for name in METADATA_NAMES if name in known or name in parts[0].columns],
        "non_finite": config.non_finite,
        **({"drop_first": config.drop_first} if config.drop_first else {}),
    }
    lm = {"lm": {"model": config.model, "revision": config.revision}} if config.model else {}
    return {**lm, "imported": imported}
