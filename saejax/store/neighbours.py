"""Batches of neighbours: windows of n consecutive tokens of one document, in an order by (seed, step).

    run:     tokens of one document at positions p, p + 1, ... without a gap, within one shard
    window:  tokens s + i n to s + i n + n - 1 of a run; s is one of 0 to n - 1, drawn for each epoch

A capture permutes rows within a shard, so a block is made of whole shards: they are read, their windows found by
document and position, and the windows of all of them shuffled. Rows that fill no window of an epoch are left out of it:
the ends of runs, and all of a run that is shorter than n. As s changes, the next epoch may have them.
"""

import bisect
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from saejax.core.errors import ConfigError
from saejax.store.layout import StoreLayout
from saejax.store.order import Key, derive_key, permute, shuffled
from saejax.store.reader import StoreReader

# A block mixes at least so many shards: the windows of one are neighbours in the text themselves.
_SHARDS = 4
# Rows that are read at a time, in inner chunks.
_PIECE_CHUNKS = 16
_SCANNERS = 4


def runs(document: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first row, length) of each run of consecutive positions of one document, of rows in the order of the text.

    A row of an unknown document (-1) is a run by itself.
    """
    if not len(document):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    breaks = (document[1:] != document[:-1]) | (position[1:] != position[:-1] + 1) | (document[1:] < 0)
    first = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    return first, np.diff(np.concatenate([first, [len(document)]]))


def counts(lengths: np.ndarray, n: int) -> np.ndarray:
    """Windows of n rows in runs of these lengths, for each shift 0 to n - 1: int64 [n]."""
    return np.array([(np.maximum(lengths - shift, 0) // n).sum() for shift in range(n)], np.int64)


def windows(first: np.ndarray, lengths: np.ndarray, n: int, shift: int) -> np.ndarray:
    """Rows of every window, int64 [W, n], of runs as `runs` gives them."""
    each = np.maximum(lengths - shift, 0) // n
    before = np.cumsum(each) - each
    which = np.arange(each.sum()) - np.repeat(before, each)
    return (np.repeat(first + shift, each) + n * which)[:, None] + np.arange(n)[None]


class Neighbours:
    """The windows of a store, found shard by shard from document and position.

    Args:
        reader: an open store.
        n: tokens of a window, 2 or more.
        max_rows: only this many rows, the first ones of the text; 0 for all.

    Attributes:
        counts: windows of each shard at each shift, int64 [K, n].
        used: the share of the rows that are in a window, as the mean over shifts.

    Raises:
        ConfigError: rows without a place in a text (in memory, or imported without one), or without a single window.
    """

    def __init__(self, reader: object, n: int, max_rows: int = 0) -> None:
        if not isinstance(reader, StoreReader):
            raise ConfigError(
                f"train.neighbours={n} needs to know which tokens are neighbours, and arrays do not say it. Write them "
                "into a store with document and position (saejax store import), or set train.neighbours=1."
            )
        self._reader, self.n = reader, n
        origins = (reader.identity, *reader.identity.get("merged", ()))
        imported = [origin["imported"] for origin in origins if isinstance(origin.get("imported"), dict)]
        # A file's rows need not be in any order.
        if not all({"document", "position"} <= set(files.get("metadata", ())) for files in imported):
            raise ConfigError(
                f"train.neighbours={n} needs to know which tokens are neighbours, and the files that {reader.url} was "
                "imported from had no document and position. Add them as columns and import again, or set "
                "train.neighbours=1."
            )
        self.starts = reader.shard_starts
        self._rows = min(max_rows or reader.n_tokens, reader.n_tokens)
        n_shards = int(np.searchsorted(self.starts, self._rows))
        with ThreadPoolExecutor(_SCANNERS, thread_name_prefix="neighbours") as pool:
            counts_of = list(pool.map(lambda shard: counts(self._runs(shard)[1], n), range(n_shards)))
        self.counts = np.stack(counts_of)
        self.used = float(self.counts.sum(0).mean()) * n / self._rows
        if not self.counts.any():
            raise ConfigError(
                f"{reader.url} has no {n} neighbouring tokens (train.neighbours): no run of consecutive positions of "
                "one document is as long. Capture without a selection of tokens, lower train.neighbours, or set it "
                "to 1."
            )

    def rows_of(self, shard: int, shift: int) -> np.ndarray:
        """Rows of the shard's windows, int64 [W, n], counted from the shard's first row in stored order."""
        stored: np.ndarray = self._reader.stream_places(shard)[windows(*self._runs(shard), self.n, shift)]
        return stored

    def _runs(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = int(self.starts[shard]), int(self.starts[shard + 1])
        places = self._reader.stream_places(shard)[: self._rows - start]
        document, position = (self._reader.array_rows(name, start, stop)[places] for name in ("document", "position"))
        return runs(document, position)


@dataclass(frozen=True)
class _Epoch:
    """One epoch of a stream of windows: its shift, its shards in order, and its blocks' bounds in its rows."""

    shift: int
    shards: np.ndarray
    bounds: np.ndarray


class WindowBlocks:
    """Every window of some shards, in blocks of `together` shards; a `batches.Blocks`.

    Row i n + j of the stream is token j of window i, so a range of whole windows is a range of rows.

    Args:
        neighbours: the windows of the store.
        shards: those of this stream.
        rows: a block has the shards that make so many rows, and at least four.
        seed: of the order.
        chunk_rows: of the store.
    """

    def __init__(self, neighbours: Neighbours, shards: Sequence[int], rows: int, seed: int, chunk_rows: int) -> None:
        self._neighbours, self._shards, self._seed = neighbours, np.asarray(shards, np.int64), seed
        self._piece_rows = _PIECE_CHUNKS * chunk_rows
        largest = int(np.diff(neighbours.starts)[self._shards].max())
        self._together = min(len(self._shards), _shards_together(rows, largest))
        self._totals = neighbours.n * neighbours.counts[self._shards].sum(0)
        self._lock, self._firsts, self._epochs = threading.Lock(), [0], dict[int, _Epoch]()

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch, as the mean over shifts."""
        return round(float(self._totals.mean()))

    def locate(self, row: int) -> tuple[Key, int]:
        with self._lock:
            while self._firsts[-1] <= row:
                self._firsts.append(self._firsts[-1] + int(self._totals[self._shift(len(self._firsts) - 1)]))
            epoch = bisect.bisect_right(self._firsts, row) - 1
            within = row - self._firsts[epoch]
        block = int(np.searchsorted(self._epoch(epoch).bounds, within, "right")) - 1
        return (epoch, block), within - int(self._epoch(epoch).bounds[block])

    def first(self, key: Key) -> int:
        before = sum(int(self._totals[self._shift(epoch)]) for epoch in range(key[0]))
        return before + int(self._epoch(key[0]).bounds[key[1]])

    def size(self, key: Key) -> int:
        bounds = self._epoch(key[0]).bounds
        return int(bounds[key[1] + 1] - bounds[key[1]])

    def after(self, key: Key, n: int) -> Key:
        later, block = divmod(key[1] + n, -(-len(self._shards) // self._together))
        return key[0] + later, block

    def pieces(self, key: Key) -> list[tuple[int, int]]:
        ranges = []
        for shard in self._of(key):
            start, stop = map(int, self._neighbours.starts[shard : shard + 2])
            ranges += [(low, min(stop, low + self._piece_rows)) for low in range(start, stop, self._piece_rows)]
        return ranges

    def rows(self, key: Key) -> np.ndarray:
        windows_of, before = [], 0
        for shard in self._of(key):
            windows_of.append(before + self._neighbours.rows_of(int(shard), self._epoch(key[0]).shift))
            before += int(self._neighbours.starts[shard + 1] - self._neighbours.starts[shard])
        in_order_WN = np.concatenate(windows_of)
        return in_order_WN[shuffled(len(in_order_WN), derive_key("windows", self._seed, *key))].reshape(-1)

    def _of(self, key: Key) -> np.ndarray:
        return self._epoch(key[0]).shards[key[1] * self._together : (key[1] + 1) * self._together]

    def _shift(self, epoch: int) -> int:
        return derive_key("shift", self._seed, epoch) % self._neighbours.n

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            shift, many = self._shift(epoch), len(self._shards)
            shards = self._shards[permute(np.arange(many), many, derive_key("shards", self._seed, epoch))]
            sizes = self._neighbours.n * self._neighbours.counts[shards, shift]
            blocks = np.add.reduceat(sizes, np.arange(0, many, self._together))
            self._epochs[epoch] = _Epoch(shift, shards, np.concatenate([[0], np.cumsum(blocks)]))
        return self._epochs[epoch]


def block_rows(n: int, block_chunks: int, layout: StoreLayout) -> int:
    """Rows that are read for a block of batches of windows of n rows; n = 1 are single rows."""
    rows = block_chunks * layout.chunk_rows
    return rows if n == 1 else _shards_together(rows, layout.shard_rows) * layout.shard_rows


def _shards_together(rows: int, shard_rows: int) -> int:
    return max(_SHARDS, -(-rows // shard_rows))


def check_windows(n: int, batch_size: int, rows: tuple[int, int], shares: int, n_shards: int) -> None:
    """Refuse batches, and parts of them, that would cut windows of n rows.

    Raises:
        ConfigError: sizes that are no multiples of n, or shares without a shard.
    """
    if n < 1 or shares < 1 or batch_size % (n * shares) or any(row % n for row in rows):
        raise ConfigError(
            f"train.neighbours={n}: rows {rows[0]} to {rows[1]} of a batch of {batch_size} in {shares} shares "
            f"(train.shares) would cut a window of {n} tokens. Choose multiples of {n}."
        )
    if shares > n_shards:
        raise ConfigError(
            f"train.shares={shares} with train.neighbours={n} deals out whole shards, and the store has {n_shards}: "
            "lower train.shares, or capture with a smaller capture.shard_rows."
        )
