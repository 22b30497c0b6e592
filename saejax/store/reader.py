"""Read a complete store: identity, statistics, rows in stored order, and the chunks of a shuffled block.

Damage of any kind (missing, truncated or flipped chunk, shard or metadata) is a DataError that names
store, array, shard and remedy; never zeros.
"""

import copy
import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np

from saejax.core.errors import DataError
from saejax.core.places import what_is
from saejax.store.commits import commit_key, part_states, shard_remedy
from saejax.store.files import StoreFiles
from saejax.store.layout import BF16, METADATA_NAMES, ArrayKind, StoreLayout, arrays_of, open_array, scale_of
from saejax.store.manifest import Header, Manifest, flatten, header_differences, read_manifest
from saejax.store.order import RowOrder, shard_positions
from saejax.store.quantize import expanded
from saejax.store.remote import cause_of
from saejax.store.statistics import Statistics


class ArrayReader:
    """One array of a complete store, [rows, d] or [rows], opened for reading.

    Args:
        rows: of the zarr array.
        order: what `rows` and `pieces` count in; None for the rows of the zarr array as they are.

    Raises:
        DataError: its zarr.json is missing, damaged or does not fit the manifest.
    """

    def __init__(
        self, files: StoreFiles, kind: ArrayKind, rows: int, layout: StoreLayout, order: RowOrder | None = None
    ) -> None:
        self._files, self._kind, self._rows, self._layout, self._order = files, kind, rows, layout, order
        self._array = open_array(files, kind, rows, layout)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), freshly allocated.

        Raises:
            DataError: a range outside the store, or damage.
        """
        there = self._rows if self._order is None else int(self._order.starts[-1])
        if not 0 <= start <= stop <= there:
            raise DataError(f"Rows {start} to {stop} of {self._files.url}: it has rows 0 to {there}.")
        if self._order is not None:
            return next(self.pieces([(start, stop)]))
        full = self._layout.shard_rows
        edges = [start, *range((start // full + 1) * full, stop, full), stop]
        out = np.empty(self._kind.shape(stop - start), self._kind.dtype)
        row = 0
        for values in self.pieces([(low, high) for low, high in pairwise(edges) if low < high]):
            out[row : row + len(values)] = values
            row += len(values)
        return out

    def pieces(self, pieces: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Several row ranges, none crossing a shard's border (with an `order` they may).

        All are being read while the first is handed out.

        Raises:
            DataError: damage; names the array, the shard and the rows.
        """
        if self._order is None:
            yield from self._stored(pieces)
            return
        split = [self._order.pieces(low, high) for low, high in pieces]
        values = self._stored(list(itertools.chain.from_iterable(split)))
        none = np.empty(self._kind.shape(0), self._kind.dtype)
        for parts in split:
            yield np.concatenate([none, *itertools.islice(values, len(parts))])

    def _stored(self, pieces: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Row ranges of the zarr array, none crossing a shard's border."""
        pending = deque((low, high, self._array[low:high].read()) for low, high in pieces)
        while pending:
            low, high, future = pending.popleft()
            try:
                rows = future.result()
            except Exception as error:
                raise self._damage(low, high, error) from error
            del future  # it holds the rows; free their memory for the next ones
            yield rows
            del rows

    def _damage(self, low: int, high: int, error: Exception) -> DataError:
        kind, shard = self._kind, low // self._layout.shard_rows
        what = "hook point" if kind.width is not None else "array"
        # A server that does not answer has lost nothing: then the shard stays.
        away = self._files.local is None and cause_of(error)
        remedy = "" if away else f". {shard_remedy(self._files, shard)}"
        return DataError(
            f"Store {self._files.url}: {what} {kind.name!r}, shard {shard} "
            f"(file {kind.folder}/{kind.shard_key(shard)}), rows {low} to {high} "
            f"cannot be read: {self._files.trouble(error)}{remedy}"
        )


class QuantizedReader:
    """A hook point that is stored as int8 with scales, read as bfloat16 rows; as `ArrayReader`."""

    def __init__(self, values: ArrayReader, scales: ArrayReader) -> None:
        self._values, self._scales = values, scales

    def rows(self, start: int, stop: int) -> np.ndarray:
        return expanded(self._values.rows(start, stop), self._scales.rows(start, stop))

    def pieces(self, pieces: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Several row ranges, read ahead of being handed out."""
        both = zip(self._values.pieces(pieces), self._scales.pieces(pieces), strict=True)
        return (expanded(q, scale) for q, scale in both)


class StoreReader:
    """A complete store, opened for reading; make it with `open`.

    Attributes:
        url: the path as messages show it.
        n_tokens: rows.
        hook_points: name -> width of the hook points opened, in the order asked for.
        identity: what the activations come from.
        statistics: hook point -> Statistics.
        counters: totals of what the capture counted.
        layout, seed: of the shards.
        dtype: of the activations.
        fingerprint: sha256 of what the store is and holds.
    """

    dtype = np.dtype(BF16)

    def __init__(self, files: StoreFiles, manifest: Manifest, hook_points: dict[str, int]) -> None:
        header = manifest.header
        self.url = files.url
        self.n_tokens: int = manifest.n_tokens
        self.hook_points = hook_points
        self.identity: dict[str, Any] = header.identity
        self.statistics: dict[str, Statistics] = {name: (manifest.statistics or {})[name] for name in hook_points}
        self.counters: dict[str, int] = manifest.counters or {}
        self.layout: StoreLayout = header.layout
        self.seed: int = header.seed
        self.fingerprint: str = manifest.fingerprint
        self._rows = manifest.row_order
        order = None if self._rows.is_plain else self._rows
        stored = {
            kind.name: ArrayReader(files, kind, manifest.array_rows, header.layout, order)
            for kind in arrays_of(hook_points, header.layout.dtype)
        }
        self._arrays: dict[str, ArrayReader | QuantizedReader] = dict(stored)
        if header.layout.dtype == "int8":
            self._arrays |= {name: QuantizedReader(stored[name], stored[scale_of(name)]) for name in hook_points}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        hook_points: Sequence[str] | None = None,
        *,
        expect: dict[str, Any] | None = None,
    ) -> Self:
        """Open a complete store.

        Args:
            path: local folder or URL.
            hook_points: those wanted (None: all).
            expect: identity keys that must have these values (nested dicts are compared by leaf).

        Raises:
            DataError: no store, incomplete, damaged metadata, a hook point that is not there, or an
                identity that differs (each difference is listed).
        """
        files = StoreFiles(path)
        manifest = complete_manifest(files)
        if differing := header_differences(manifest.header.identity, expect or {}, set(flatten(expect or {}))):
            raise DataError(
                f"The store {files.url} holds something else than expected:\n  " + "\n  ".join(differing) + "\n"
                "Point to the store made for these settings, or capture it."
            )
        there = manifest.header.hook_points
        wanted = list(there) if hook_points is None else list(hook_points)
        missing = [name for name in wanted if name not in there]
        if missing or not wanted:
            raise DataError(
                f"The store {files.url} has no hook point {', '.join(missing) or '(none asked for)'}; "
                f"it has: {', '.join(there)}. Choose among them or capture a store with the others."
            )
        return cls(files, manifest, {name: there[name] for name in wanted})

    def only(self, names: Sequence[str]) -> "StoreReader":
        """The same rows of these hook points alone."""
        narrower = copy.copy(self)
        narrower.hook_points = {name: self.hook_points[name] for name in names}
        return narrower

    def rows(self, start: int, stop: int, *, metadata: bool = False) -> dict[str, np.ndarray]:
        """Rows [start, stop) in stored order (permuted within each shard).

        Args:
            start, stop: 0 <= start <= stop <= n_tokens.
            metadata: add token_id, document and position (int32 [n]).

        Returns:
            Hook point -> bfloat16 [stop - start, d].

        Raises:
            DataError: a range outside the store, or damage.
        """
        names = [*self.hook_points, *(METADATA_NAMES if metadata else ())]
        return {name: self.array_rows(name, start, stop) for name in names}

    def array_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of one array, a hook point or one of the metadata; as `rows`."""
        return self._arrays[name].rows(start, stop)

    def read_pieces(self, name: str, pieces: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Several row ranges of one array, none crossing a shard's border; read ahead of being handed out.

        Raises:
            DataError: damage; names the array, the shard and the rows.
        """
        return self._arrays[name].pieces(pieces)

    @property
    def shard_starts(self) -> np.ndarray:
        """The store's first row of each of its K shards, and behind them n_tokens, int64 [K + 1]."""
        return self._rows.starts

    def stream_places(self, shard: int) -> np.ndarray:
        """The stored place of row i of the shard, in the order in which rows came: int64 [rows of the shard].

        The store's row is `shard_starts[shard]` plus that.
        """
        rows = int(self._rows.starts[shard + 1] - self._rows.starts[shard])
        return shard_positions(self.seed, int(self._rows.shards[shard]), self.layout.shard_rows, rows)


def any_manifest(files: StoreFiles) -> Manifest:
    """The manifest of a store, complete or not.

    Raises:
        DataError: no store there, or a damaged manifest.
    """
    manifest = read_manifest(files)
    if manifest is None:
        if files.local is None:
            files.list("commits")  # where there is no bucket, a read finds nothing, and a listing says so
        there = "no manifest.json" if files.local is None else what_is(files.local)
        raise DataError(
            f"There is no store at {files.url}: {there}. Make one by saejax capture or saejax store import."
        )
    return manifest


def complete_manifest(files: StoreFiles) -> Manifest:
    """As `any_manifest`, but an unfinished store is a DataError too; it gives the progress."""
    manifest = any_manifest(files)
    if not manifest.complete:
        rows, wanted = committed_rows(files, manifest.header), manifest.header.requested_tokens
        raise DataError(
            f"The store {files.url} is not complete: {rows:,} of {wanted:,} tokens are committed. Run the command that "
            "made the store again; it continues there."
        )
    return manifest


def committed_rows(files: StoreFiles, header: Header) -> int:
    """Rows of an unfinished store by its commit files; a store of one part needs only their names."""
    if header.parts > 1:
        return sum(state.rows for state in part_states(files, header))
    done = 0
    present = set(files.list("commits"))
    while commit_key(done).removeprefix("commits/") in present:
        done += 1
    return min(done * header.layout.shard_rows, header.requested_tokens)
