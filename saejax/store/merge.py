"""Several complete stores of one model as one: document ids stay unique, and the sources are written down."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.store.files import StoreFiles
from saejax.store.layout import METADATA_NAMES, StoreLayout
from saejax.store.manifest import MANIFEST, header_differences
from saejax.store.reader import StoreReader
from saejax.store.writer import StoreWriter

# What may differ between the stores of a merge: where their rows come from.
_ORIGINS = ("text", "parts", "imported", "merged")
_SCANNED_ROWS = 1 << 20


def merge(
    out: str | os.PathLike[str],
    sources: Sequence[str | os.PathLike[str]],
    *,
    seed: int = 0,
    progress: Callable[[int, int], Callable[[int], object]] = lambda total, done: lambda rows: None,
) -> int:
    """Write the rows of all `sources` into the store `out`, in the order in which each was captured.

    Every identity key but the origin of the rows (text, imported files, earlier merges), and every hook point with its
    width, must agree. Document ids of a store are shifted by one more than the largest of the stores before it; -1
    (unknown) stays. identity["merged"] lists of each source its origin, its rows, its shift and the sha256 of its
    manifest. Killed at any moment and run again, the merge continues and leaves the same bytes. The layout is that of
    the first source, with int8 where all sources have it: then every row comes back as from its source.

    Args:
        out: local folder or URL of the new store.
        sources: two or more complete stores.
        seed: of the permutation within the new shards.
        progress: (rows in all, rows done already) -> a function that is called with the number of rows written.

    Returns:
        Rows of the merged store.

    Raises:
        ConfigError: fewer than two sources, the same one twice, or one that is `out`.
        DataError: an incomplete or damaged source, sources that differ, document ids beyond int32, or what
            `StoreWriter` refuses.
        BusyError: another process is writing `out`.
    """
    if len(sources) < 2:
        raise ConfigError(f"A merge needs two stores or more, got {len(sources)}.")
    if _absolute(out) in map(_absolute, sources):
        raise ConfigError(f"{os.fspath(out)} is both merged and written: give the merged store a path of its own.")
    readers = [StoreReader.open(path) for path in sources]
    for path, reader in zip(sources[1:], readers[1:], strict=True):
        _check_alike(sources[0], readers[0], path, reader)
    digests = [hashlib.sha256(StoreFiles(path).read(MANIFEST) or b"").hexdigest() for path in sources]
    _check_different(sources, digests)
    shifts = document_shifts(readers)
    total, dtypes = sum(reader.n_tokens for reader in readers), {reader.layout.dtype for reader in readers}
    with StoreWriter.open(
        out,
        identity=_merge_identity(readers, shifts, digests),
        hook_points=readers[0].hook_points,
        n_tokens=total,
        layout=dataclasses.replace(readers[0].layout, dtype=dtypes.pop() if len(dtypes) == 1 else StoreLayout.dtype),
        seed=seed,
    ) as writer:
        advance = progress(total, writer.committed_rows)
        cursor = writer.resume or {"store": 0, "shard": 0}
        while not writer.full:
            reader, before = readers[cursor["store"]], writer.rows
            # As they came in, so that neighbours in the text are neighbours again.
            places, start = reader.stream_places(cursor["shard"]), int(reader.shard_starts[cursor["shard"]])
            stored = reader.rows(start, start + len(places), metadata=True)
            rows = {name: values[places] for name, values in stored.items()}
            document = rows["document"].astype(np.int64)
            rows["document"] = np.where(document < 0, document, document + shifts[cursor["store"]])
            activations = {name: rows[name] for name in reader.hook_points}
            # A store's own counters belong to its first shard, so that they are counted once.
            counters = reader.counters if cursor["shard"] == 0 else {}
            writer.append(activations, {n: rows[n] for n in METADATA_NAMES}, cursor=cursor, counters=counters)
            advance(writer.rows - before)
            last = cursor["shard"] + 2 == len(reader.shard_starts)
            cursor = {"store": cursor["store"] + 1, "shard": 0} if last else cursor | {"shard": cursor["shard"] + 1}
        writer.finish()
        return writer.committed_rows


def document_shifts(readers: Sequence[StoreReader]) -> list[int]:
    """Numbers to add to the document ids of each store, so that no id stands for two documents.

    Raises:
        DataError: the shifted ids do not fit int32.
    """
    shifts, following = [], 0
    for reader in readers:
        shifts.append(following)
        pieces = range(0, reader.n_tokens, _SCANNED_ROWS)
        stops = (min(reader.n_tokens, start + _SCANNED_ROWS) for start in pieces)
        largest = (int(reader.array_rows("document", *span).max()) for span in zip(pieces, stops, strict=True))
        following += max(-1, *largest) + 1
    if following > np.iinfo(np.int32).max:
        raise DataError(f"The merged store would have document ids up to {following - 1:,}, beyond int32: merge fewer.")
    return shifts


def _merge_identity(readers: Sequence[StoreReader], shifts: Sequence[int], digests: Sequence[str]) -> dict[str, Any]:
    merged = []
    for reader, shift, digest in zip(readers, shifts, digests, strict=True):
        origin = {key: reader.identity[key] for key in _ORIGINS if key in reader.identity}
        merged.append(origin | {"rows": reader.n_tokens, "document_shift": shift, "manifest_sha256": digest})
    return {**_rules(readers[0]), "merged": merged}


def _rules(reader: StoreReader) -> dict[str, Any]:
    """The part of the identity that the stores of a merge have in common: all but the origin of the rows."""
    return {key: value for key, value in reader.identity.items() if key not in _ORIGINS}


def _check_different(sources: Sequence[str | os.PathLike[str]], digests: Sequence[str]) -> None:
    """Two manifests alike mean the same rows, whatever the path."""
    for i, digest in enumerate(digests):
        if (first := digests.index(digest)) != i:
            raise ConfigError(
                f"{os.fspath(sources[first])} and {os.fspath(sources[i])} are the same store: its rows would be in "
                "the merged one twice. Name it once."
            )


def _absolute(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text.rstrip("/") if "://" in text else str(Path(text).resolve())


def _check_alike(
    first: str | os.PathLike[str], expected: StoreReader, path: str | os.PathLike[str], other: StoreReader
) -> None:
    # Widths are compared by (name, width), because a dot in a name is no level of a dict.
    left = {"identity": _rules(expected), "hook_points": sorted(expected.hook_points.items())}
    right = {"identity": _rules(other), "hook_points": sorted(other.hook_points.items())}
    if lines := header_differences(left, right, names=(f"{os.fspath(first)} has", f"{os.fspath(path)} has")):
        raise DataError(
            "Only stores of the same model, text settings and hook points can be merged:\n  " + "\n  ".join(lines)
        )
