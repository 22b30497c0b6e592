"""Blocks: their rows, and their place in the endless stream that batches are cut from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from saejax.store.order import EpochOrder

# (epoch, number of the block in it)
Key = tuple[int, int]


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


@dataclass(frozen=True)
class ChunkBlocks:
    """Every row of the store's chunks `number`, `number + shares`, ... in an `EpochOrder`."""

    order: EpochOrder
    n_rows: int
    number: int = 0
    shares: int = 1

    def locate(self, row: int) -> tuple[Key, int]:
        epoch, within = divmod(row, self.order.n_rows)
        block, offset = divmod(within, self.order.block_rows)
        return (epoch, block), offset

    def first(self, key: Key) -> int:
        return key[0] * self.order.n_rows + key[1] * self.order.block_rows

    def size(self, key: Key) -> int:
        return self.order.block_size(key[1])

    def after(self, key: Key, n: int) -> Key:
        later, block = divmod(key[1] + n, self.order.blocks)
        return key[0] + later, block

    def pieces(self, key: Key) -> list[tuple[int, int]]:
        size = self.order.chunk_rows
        chunks = (int(chunk) * self.shares + self.number for chunk in self.order.chunks(*key))
        return [(chunk * size, min(self.n_rows, (chunk + 1) * size)) for chunk in chunks]

    def rows(self, key: Key) -> np.ndarray:
        return self.order.row_order(*key)


def places(blocks: Blocks, chunk_rows: int, start: int, stop: int) -> dict[str, np.ndarray]:
    """epoch, block, chunk and row (of the store, in stored order) of rows [start, stop) of a stream, int64 [n] each.

    The order read backwards, to find the rows that spoiled a step.
    """
    epoch, block, row = (np.empty(stop - start, np.int64) for _ in range(3))
    at = start
    while at < stop:
        key, offset = blocks.locate(at)
        count = min(stop - at, blocks.size(key) - offset)
        stored = np.concatenate([np.arange(low, high) for low, high in blocks.pieces(key)])
        here = slice(at - start, at - start + count)
        epoch[here], block[here] = key
        row[here] = stored[blocks.rows(key)[offset : offset + count]]
        at += count
    return {"epoch": epoch, "block": block, "chunk": row // chunk_rows, "row": row}
