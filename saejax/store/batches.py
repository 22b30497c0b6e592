"""Shuffled batches of a store as a pure function of (seed, step): nothing to save but one integer.

Epoch e occupies rows [e N, (e+1) N) of an endless stream and batch s its rows [s B, (s+1) B), so that
batches straddle blocks and epochs and no row is ever dropped.

With `neighbours` rows come in windows of consecutive tokens (`neighbours.py`), and those that are in none are left out.

With several shares the store's chunks are dealt out to as many streams (chunk c to stream c mod shares), each with
epochs of its own, and a batch is B / shares rows of each, one behind the other. A process that wants some rows of every
batch then reads only the chunks of their streams.
"""

import functools
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

from saejax.core.errors import ConfigError
from saejax.store.arrays import Block, concatenated
from saejax.store.layout import BF16, StoreLayout
from saejax.store.neighbours import Neighbours, WindowBlocks, check_windows
from saejax.store.order import EpochOrder, Key, derive_key
from saejax.store.statistics import Statistics

# The one that a batch begins in and the one that it ends in, besides those that are read ahead.
_BLOCKS_IN_USE = 2


class BatchSource(Protocol):
    """A source of training batches: hook point -> [B, d], row-aligned.

    Batch i is the same whenever it is asked for, so that a training that stopped after n batches continues with
    `iterate(n)`. `Batches` reads rows that are stored, `IteratedBatches` takes what an iterator gives, and
    `capture.ActivationStream` runs the language model.

    Attributes:
        hook_points: name -> width d.
        batch_size: B of the global batch, of which each of several processes gives its own rows.
        dtype: of the activations.
        statistics: name -> moments, from which scales and biases start; the same in every session.
        epoch_rows: rows of an epoch, for settings that count in epochs.
    """

    hook_points: dict[str, int]
    batch_size: int
    dtype: np.dtype
    statistics: dict[str, Statistics]
    epoch_rows: int

    def iterate(self, start_step: int = 0) -> Generator[Block]:
        """The batches of start_step, start_step + 1, ... without end."""
        ...

    def whole_batch_at(self, step: int) -> Block:
        """All rows of one batch, the same in every process."""
        ...

    def places(self, step: int) -> dict[str, np.ndarray]:
        """Places of a batch's rows in a store, int64 [n] each; {} where there is no such place."""
        ...


class RowSource(Protocol):
    """Rows that can be read by number: a `StoreReader`, or `ArrayRows` in memory.

    `only` keeps some hook points, `read_pieces` gives several row ranges of one, `rows` one range of all.

    Attributes:
        n_tokens: how many.
        hook_points, statistics, dtype: as in `BatchSource`.
        layout: whose `chunk_rows` are read together.
        fingerprint: sha256 that is equal for equal activations.
    """

    fingerprint: str
    n_tokens: int
    hook_points: dict[str, int]
    statistics: dict[str, Statistics]
    layout: StoreLayout
    dtype: np.dtype

    def only(self, names: Sequence[str]) -> "RowSource": ...

    def read_pieces(self, name: str, pieces: Sequence[tuple[int, int]]) -> Iterator[np.ndarray]: ...

    def rows(self, start: int, stop: int) -> Block: ...


class Blocks(Protocol):
    """An endless stream of rows, epoch after epoch, in blocks that are read and shuffled as one.

    Everything is a function of (seed, block): a reader that begins anywhere meets the same rows.
    """

    def locate(self, row: int) -> tuple[Key, int]:
        """The block that holds a row of the stream, and the row's offset in it."""
        ...

    def first(self, key: Key) -> int:
        """The block's first row in the stream."""
        ...

    def size(self, key: Key) -> int: ...

    def after(self, key: Key, n: int) -> Key:
        """The n-th block behind it."""
        ...

    def pieces(self, key: Key) -> Sequence[tuple[int, int]]:
        """The row ranges of the store that are read for it, none crossing a shard's border."""
        ...

    def rows(self, key: Key) -> np.ndarray:
        """int64 [size]: row i of the block is row result[i] of its pieces, one piece behind the other."""
        ...


class Batches:
    """batch_at(step): hook point -> bfloat16 [B, d], the same for the same (seed, shares, step) everywhere.

    Args:
        reader: an open store, or rows in memory; all hook points are read, row-aligned.
        batch_size: B, rows of the global batch.
        seed: of the order.
        block_chunks: inner chunks that are mixed in memory at a time, of all shares together; at most 2 + `ahead`
            blocks of block_chunks * chunk_rows rows are held, and of those only the rows that are wanted. One thread at
            a time may ask for batches.
        max_rows: use only this many rows, the store's first ones; 0 for all.
        rows: (first, stop): only these rows of each global batch, [stop - first, d]. With several shares it reads only
            the chunks of the shares that the rows come from; with one share it reads all and drops other rows.
        shares: into how many streams the store is dealt out.
        ahead: blocks that `iterate` reads ahead, all at the same time. The batches are the same whatever it is.
        neighbours: n; a batch is windows of n consecutive tokens of one document, token j of window i in row i n + j.
            A block is then at least four whole shards, and shards, not chunks, are dealt out to shares.

    Attributes:
        hook_points: name -> width.
        statistics: name -> moments of the whole store.
        epoch_rows: rows of an epoch; with neighbours the mean over epochs, which leave out different rows.
        used: the share of the store's rows that an epoch has.

    Raises:
        ConfigError: a size below 1, a negative max_rows, rows outside the batch, shares that do not divide the batch or
            have no chunk; windows that would be cut, or of which the store has none.
    """

    def __init__(
        self,
        reader: RowSource,
        batch_size: int,
        seed: int,
        block_chunks: int = 64,
        rows: tuple[int, int] | None = None,
        max_rows: int = 0,
        shares: int = 1,
        ahead: int = 1,
        neighbours: int = 1,
    ) -> None:
        first, stop = rows or (0, batch_size)
        if batch_size < 1 or not 0 <= first < stop <= batch_size:
            raise ConfigError(f"batch_size={batch_size}, rows={rows}: rows must be a range within the batch.")
        if ahead < 1:
            raise ConfigError(f"ahead={ahead}: give the number of blocks to read ahead, 1 or more.")
        if max_rows < 0:
            raise ConfigError(f"max_rows={max_rows}: give the number of rows to use, or 0 for all.")
        self.batch_size = batch_size
        self.hook_points, self.statistics, self.dtype = reader.hook_points, reader.statistics, reader.dtype
        chunk_rows = reader.layout.chunk_rows
        keys = [seed if shares == 1 else derive_key("share", seed, share, shares) for share in range(shares)]
        blocks: Sequence[Blocks]
        if neighbours == 1:
            n_rows = min(max_rows, reader.n_tokens) if max_rows else reader.n_tokens
            blocks = _dealt_chunks(n_rows, chunk_rows, block_chunks, shares, keys, batch_size)
            self.epoch_rows, self.used = n_rows, 1.0
        else:
            windows = Neighbours(reader, neighbours, max_rows)
            check_windows(neighbours, batch_size, (first, stop), shares, len(windows.counts))
            block_rows = -(-block_chunks * chunk_rows // shares)
            blocks = streams = [
                WindowBlocks(windows, range(share, len(windows.counts), shares), block_rows, key, chunk_rows)
                for share, key in enumerate(keys)
            ]
            self.epoch_rows, self.used = sum(stream.epoch_rows for stream in streams), windows.used
        self._rows = stop - first
        self._whole = functools.partial(
            Batches, reader, batch_size, seed, block_chunks, None, max_rows, shares, neighbours=neighbours
        )
        loader, helper = (ThreadPoolExecutor(ahead, thread_name_prefix="store-reader") for _ in range(2))
        each = batch_size // shares
        self._shares = [
            _Share(
                reader,
                blocks[share],
                each,
                (max(0, first - share * each), min(each, stop - share * each)),
                loader,
                helper,
                ahead,
            )
            for share in range(first // each, -(-stop // each))
        ]

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """The batch of `step` >= 0 (the wanted rows of it); read-only where it is a view of a block.

        Raises:
            ConfigError: a negative step.
            DataError: damage, with store, hook point, shard and remedy.
        """
        if step < 0:
            raise ConfigError(f"step={step}: give an integer >= 0.")
        for share in self._shares:  # all of them begin to read before the first is waited for
            share.begin(step)
        return concatenated([share.rows_of(step) for share in self._shares])

    def whole_batch_at(self, step: int) -> dict[str, np.ndarray]:
        """All rows of the batch of `step`, whatever rows are wanted: [B, d], the same in every process."""
        return (self if self._rows == self.batch_size else self._whole()).batch_at(step)

    def places(self, step: int) -> dict[str, np.ndarray]:
        """Places of a batch's wanted rows: epoch, block (of their share), chunk, row in the store; int64 [n]."""
        return concatenated([share.places(step) for share in self._shares])

    def iterate(self, start_step: int = 0) -> Generator[dict[str, np.ndarray]]:
        """batch_at(start_step), batch_at(start_step + 1), ... without end; the next blocks load meanwhile."""
        step = start_step
        while True:
            batch = self.batch_at(step)
            for share in self._shares:
                share.read_ahead(step)
            yield batch
            step += 1


class _Share:
    """One of the streams that a batch is made of: `each` rows of it are in every batch, `span` of them wanted."""

    def __init__(
        self,
        reader: RowSource,
        blocks: Blocks,
        each: int,
        span: tuple[int, int],
        loader: ThreadPoolExecutor,
        helper: ThreadPoolExecutor,
        ahead: int,
    ) -> None:
        self._reader, self._order, self._each, self._ahead = reader, blocks, each, ahead
        self._loader, self._helper = loader, helper
        self._low, self._high = span
        self._blocks: OrderedDict[Key, Future[Block]] = OrderedDict()

    def begin(self, step: int) -> None:
        """Start to read what `rows_of(step)` needs first."""
        self._block(self._order.locate(step * self._each + self._low)[0])

    def rows_of(self, step: int) -> dict[str, np.ndarray]:
        """The wanted rows of a batch."""
        row, stop = step * self._each + self._low, step * self._each + self._high
        pieces: list[Block] = []
        while row < stop:
            key, offset = self._order.locate(row)
            count = min(stop - row, self._order.size(key) - offset)
            start = self._wanted(row) - self._wanted(row - offset)
            pieces.append({n: rows[start : start + count] for n, rows in self._block(key).result().items()})
            row += count
        return concatenated(pieces)

    def places(self, step: int) -> dict[str, np.ndarray]:
        """As `Batches.places`: the order read backwards."""
        row, stop = step * self._each + self._low, step * self._each + self._high
        pieces: list[Block] = []
        while row < stop:
            key, offset = self._order.locate(row)
            here = self._order.rows(key)[offset : offset + stop - row]
            stored = np.concatenate([np.arange(low, high) for low, high in self._order.pieces(key)])[here]
            chunk = stored // self._reader.layout.chunk_rows
            epoch, block = (np.full(len(here), number, np.int64) for number in key)
            pieces.append({"epoch": epoch, "block": block, "chunk": chunk, "row": stored})
            row += len(here)
        return concatenated(pieces)

    def read_ahead(self, step: int) -> None:
        """Start to read the blocks behind the one with the batch's last row."""
        last, _ = self._order.locate(step * self._each + self._high - 1)
        for following in range(1, 1 + self._ahead):
            self._block(self._order.after(last, following))

    def _wanted(self, row: int) -> int:
        """The number of wanted rows of the endless stream before this one."""
        batch, within = divmod(row, self._each)
        return batch * (self._high - self._low) + min(max(within - self._low, 0), self._high - self._low)

    def _block(self, key: Key) -> Future[Block]:
        future = self._blocks.pop(key, None)
        if future is None or (future.done() and future.exception() is not None):
            while len(self._blocks) >= _BLOCKS_IN_USE + self._ahead:
                self._blocks.popitem(last=False)[1].cancel()
            future = self._loader.submit(self._load, key)
        self._blocks[key] = future
        return future

    def _load(self, key: Key) -> Block:
        """Read a block's pieces and put every wanted row in its shuffled place, in the background threads."""
        pieces, order, first = self._order.pieces(key), self._order.rows(key), self._order.first(key)
        within = (first + np.arange(len(order))) % self._each
        wanted = (within >= self._low) & (within < self._high)
        count = int(wanted.sum())
        # Where each row of the pieces goes, in their order; -1 for rows that are not wanted.
        lengths = [high - low for low, high in pieces]
        place = np.full(sum(lengths), -1)
        place[order[wanted]] = np.arange(count)
        # numpy moves plain integers about twice as fast as bfloat16
        moved = np.dtype(np.uint16) if self._reader.dtype == BF16 else self._reader.dtype
        shuffled: Block = {}
        for name, d in self._reader.hook_points.items():
            rows = np.empty((count, d), moved)
            half = len(pieces) // 2
            other = self._helper.submit(self._fill, rows, name, pieces[half:], place[sum(lengths[:half]) :])
            self._fill(rows, name, pieces[:half], place)
            other.result()
            rows.flags.writeable = False  # batches may be views of it
            shuffled[name] = rows.view(self._reader.dtype)
        return shuffled

    def _fill(self, rows: np.ndarray, name: str, pieces: Sequence[tuple[int, int]], place: np.ndarray) -> None:
        """Read row ranges, and put their row i into rows[place[i]], or nowhere where that is -1."""
        start, all_wanted = 0, bool((place >= 0).all())
        for piece in self._reader.read_pieces(name, pieces):
            to = place[start : start + len(piece)]
            wanted = slice(None) if all_wanted else to >= 0
            rows[to[wanted]] = piece.view(rows.dtype)[wanted]
            start += len(piece)


def _dealt_chunks(
    n_rows: int, chunk_rows: int, block_chunks: int, shares: int, keys: Sequence[int], batch_size: int
) -> list[EpochOrder]:
    """The streams of all shares; `keys` are their seeds."""
    chunks = -(-n_rows // chunk_rows)
    if shares < 1 or batch_size % shares or shares > chunks:
        raise ConfigError(
            f"{shares} shares of a store of {chunks} chunks, for batches of {batch_size}: the batch must be a multiple "
            "of the shares, and each must have a chunk."
        )
    orders = []
    for share, key in enumerate(keys):
        # The store's last chunk may be ragged: it is the last one of its share too.
        missing = chunks * chunk_rows - n_rows if (chunks - 1) % shares == share else 0
        rows = len(range(share, chunks, shares)) * chunk_rows - missing
        orders.append(EpochOrder(rows, chunk_rows, -(-block_chunks // shares), key, share, shares))
    return orders
