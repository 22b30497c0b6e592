"""Shuffled batches of a store as a pure function of (seed, step): nothing to save but one integer.

Epoch e occupies rows [e N, (e+1) N) of an endless stream and batch s its rows [s B, (s+1) B), so that
batches straddle blocks and epochs and no row is ever dropped.
"""

from collections import OrderedDict
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from saejax.core.errors import ConfigError
from saejax.store.layout import BF16
from saejax.store.order import EpochOrder
from saejax.store.reader import StoreReader

_BLOCKS_KEPT = 3

_Block = dict[str, np.ndarray]


class Batches:
    """batch_at(step): hook point -> bfloat16 [B, d], the same for the same (seed, step) everywhere.

    Args:
        reader: an open store; all its hook points are read, row-aligned.
        batch_size: B, rows of the global batch.
        seed: of the order.
        block_chunks: inner chunks that are mixed in memory at a time; at most three blocks of
            block_chunks * chunk_rows rows are held. One thread at a time may ask for batches.
        max_rows: use only this many rows, the store's first ones; 0 for all.
        data_slice: (rank, world): only rows [rank B / world, (rank + 1) B / world) of each global batch.

    Attributes:
        hook_points: name -> width.
        statistics: name -> moments of the whole store.
        epoch_rows: rows of an epoch.

    Raises:
        ConfigError: a size below 1, a negative max_rows, or a slice that does not divide the batch.
    """

    def __init__(
        self,
        reader: StoreReader,
        batch_size: int,
        seed: int,
        block_chunks: int = 64,
        data_slice: tuple[int, int] | None = None,
        max_rows: int = 0,
    ) -> None:
        rank, world = data_slice or (0, 1)
        if batch_size < 1 or world < 1 or not 0 <= rank < world or batch_size % world:
            raise ConfigError(
                f"batch_size={batch_size}, data_slice={data_slice}: the batch must be a positive multiple of "
                "world, and 0 <= rank < world."
            )
        if max_rows < 0:
            raise ConfigError(f"max_rows={max_rows}: give the number of rows to use, or 0 for all.")
        self.batch_size = batch_size
        n_rows = min(max_rows, reader.n_tokens) if max_rows else reader.n_tokens
        self.order = EpochOrder(n_rows, reader.layout.chunk_rows, block_chunks, seed)
        self.hook_points, self.statistics, self.epoch_rows = reader.hook_points, reader.statistics, n_rows
        self._reader = reader
        self._local = batch_size // world
        self._first = rank * self._local
        self._blocks: OrderedDict[tuple[int, int], Future[_Block]] = OrderedDict()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="store-reader")

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        """The batch of `step` >= 0 (this process's slice of it); read-only where it is a view of a block.

        Raises:
            ConfigError: a negative step.
            DataError: damage, with store, hook point, shard and remedy.
        """
        if step < 0:
            raise ConfigError(f"step={step}: give an integer >= 0.")
        row = step * self.batch_size + self._first
        key, offset = self._locate(row)
        if offset + self._local <= self.order.block_size(key[1]):
            return {name: rows[offset : offset + self._local] for name, rows in self._block(key).result().items()}
        out = {name: np.empty((self._local, d), BF16) for name, d in self.hook_points.items()}
        done = 0
        while done < self._local:
            key, offset = self._locate(row + done)
            block = self._block(key).result()
            count = min(self._local - done, self.order.block_size(key[1]) - offset)
            for name, values in out.items():
                values[done : done + count] = block[name][offset : offset + count]
            done += count
        return out

    def iterate(self, start_step: int = 0) -> Generator[dict[str, np.ndarray]]:
        """batch_at(start_step), batch_at(start_step + 1), ... without end; the next block loads meanwhile."""
        step = start_step
        while True:
            batch = self.batch_at(step)
            (epoch, block), _ = self._locate(step * self.batch_size + self._first + self._local - 1)
            self._block((epoch, block + 1) if block + 1 < self.order.blocks else (epoch + 1, 0))
            yield batch
            step += 1

    def _locate(self, row: int) -> tuple[tuple[int, int], int]:
        """(epoch, block) and offset in the block of a row of the endless stream."""
        epoch, within = divmod(row, self.order.n_rows)
        block, offset = divmod(within, self.order.block_rows)
        return (epoch, block), offset

    def _block(self, key: tuple[int, int]) -> Future[_Block]:
        future = self._blocks.pop(key, None)
        if future is None or (future.done() and future.exception() is not None):
            while len(self._blocks) >= _BLOCKS_KEPT:
                self._blocks.popitem(last=False)[1].cancel()
            future = self._loader.submit(self._load, *key)
        self._blocks[key] = future
        return future

    def _load(self, epoch: int, block: int) -> _Block:
        """Read a block's chunks and put every row in its shuffled place, in the background thread."""
        chunk_rows, n = self.order.chunk_rows, self.order.n_rows
        chunks = self.order.chunks(epoch, block)
        pieces = [(int(c) * chunk_rows, min(n, (int(c) + 1) * chunk_rows)) for c in chunks]
        order = self.order.row_order(epoch, block)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        shuffled: _Block = {}
        for name, d in self.hook_points.items():
            # uint16, because numpy moves plain integers about twice as fast as bfloat16
            rows, start = np.empty((len(order), d), np.uint16), 0
            for piece in self._reader.read_pieces(name, pieces):
                rows[place[start : start + len(piece)]] = piece.view(np.uint16)
                start += len(piece)
            rows.flags.writeable = False  # batches may be views of it
            shuffled[name] = rows.view(BF16)
        return shuffled
