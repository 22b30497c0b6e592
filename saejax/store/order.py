"""Stateless order of rows: every permutation is a pure function of a key, so nothing has to be remembered.

An epoch's order: inner chunks permuted by (seed, epoch), taken `block_chunks` at a time, rows shuffled
within the block by (seed, epoch, block). The ragged last chunk always comes last, so block b holds
exactly the rows [b R, (b+1) R) of the epoch's order, R = block_chunks * chunk_rows.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from saejax.core.errors import ConfigError

# (epoch, number of a block in it)
Key = tuple[int, int]

_ROUNDS = 7
_U64 = np.uint64


def derive_key(*parts: int | str) -> int:
    """A 128-bit key from names and numbers, by sha256 of their text."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> _U64(31))
    return mixed


def permute(index: np.ndarray | int, n: int, key: int) -> np.ndarray:
    """pi_key(index), a keyed bijection of range(n): a Feistel network walked until it lands below n.

    Args:
        index: integers in [0, n), any shape.
        n: size of the range, 1 <= n <= 2^62.
        key: any non-negative integer below 2^128.

    Returns:
        int64 array of `index`'s shape. Memory is O(len(index)), whatever n.

    Raises:
        ConfigError: n or an index out of range.
    """
    values = np.asarray(index, dtype=np.int64)
    if not 1 <= n <= 1 << 62 or (values.size and not (values.min() >= 0 and values.max() < n)):
        raise ConfigError(f"permute: n={n} must be in [1, 2^62] and every index in [0, n).")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    round_keys = [_U64(derive_key("feistel", key, r) & (2**64 - 1)) for r in range(_ROUNDS)]
    out = values.reshape(-1).astype(_U64)
    walking = np.arange(out.size)
    while walking.size:  # at most 4 n points are walked over for n: 4 steps on average at worst
        out[walking] = _feistel(out[walking], half, round_keys)
        walking = walking[out[walking] >= _U64(n)]
    return out.astype(np.int64).reshape(values.shape)


def _feistel(x: np.ndarray, half: int, round_keys: list[np.uint64]) -> np.ndarray:
    mask = _U64((1 << half) - 1)
    left, right = x >> _U64(half), x & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) >> _U64(64 - half))
    return (left << _U64(half)) | right


def shuffled(n: int, key: int) -> np.ndarray:
    """A uniform permutation of range(n), int64 [n]: the stable argsort of n raw Philox words.

    Raw words, because numpy promises their stream for ever, which it does not for `Generator.permutation`.
    """
    words = np.random.Philox(key=key).random_raw(n)
    order = np.argsort(words)  # four times as fast as a stable one, and the same unless two words are equal
    ranked = words[order]
    return np.argsort(words, kind="stable") if (ranked[1:] == ranked[:-1]).any() else order


def shard_positions(seed: int, shard: int, shard_rows: int, rows: int) -> np.ndarray:
    """The stored place of row i of a shard, int64 [rows]: a permutation of range(rows) by (seed, shard).

    A ragged shard keeps the relative order of the full one: the result for fewer rows is the ranks of the
    result for more, so that a writer may learn late how many rows there are.
    """
    full = shuffled(shard_rows, derive_key("shard", seed, shard))
    return full if rows == shard_rows else np.argsort(np.argsort(full[:rows]))


@dataclass(frozen=True)
class EpochOrder:
    """The order of `n_rows` rows in every epoch: those of a store's chunks `number`, `number + shares`, ...

    It is the `batches.Blocks` of single rows.

    Raises:
        ConfigError: a size below 1.
    """

    n_rows: int
    chunk_rows: int
    block_chunks: int
    seed: int
    number: int = 0
    shares: int = 1

    def __post_init__(self) -> None:
        for name in ("n_rows", "chunk_rows", "block_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give an integer >= 1.")

    @property
    def block_rows(self) -> int:
        """R: rows of every block but perhaps the last."""
        return self.block_chunks * self.chunk_rows

    @property
    def blocks(self) -> int:
        """Blocks in an epoch."""
        return -(-self.n_rows // self.block_rows)

    def locate(self, row: int) -> tuple[Key, int]:
        epoch, within = divmod(row, self.n_rows)
        block, offset = divmod(within, self.block_rows)
        return (epoch, block), offset

    def first(self, key: Key) -> int:
        return key[0] * self.n_rows + key[1] * self.block_rows

    def size(self, key: Key) -> int:
        return min(self.n_rows - key[1] * self.block_rows, self.block_rows)

    def after(self, key: Key, n: int) -> Key:
        later, block = divmod(key[1] + n, self.blocks)
        return key[0] + later, block

    def chunks(self, key: Key) -> np.ndarray:
        """The inner chunks of a block, numbered within the share, in the order in which `rows` counts their rows."""
        full = self.n_rows // self.chunk_rows
        total = full + (self.n_rows % self.chunk_rows > 0)
        ids = np.arange(key[1] * self.block_chunks, min(total, (key[1] + 1) * self.block_chunks))
        whole = ids < full
        if whole.any():
            ids[whole] = permute(ids[whole], full, derive_key("chunks", self.seed, key[0]))
        return ids

    def pieces(self, key: Key) -> list[tuple[int, int]]:
        ranges = []
        for chunk in map(int, self.chunks(key)):
            low = (chunk * self.shares + self.number) * self.chunk_rows
            ranges.append((low, low + min(self.chunk_rows, self.n_rows - chunk * self.chunk_rows)))
        return ranges

    def rows(self, key: Key) -> np.ndarray:
        """The shuffle inside a block, int64 [size]: row i of it is row result[i] of its chunks."""
        return shuffled(self.size(key), derive_key("rows", self.seed, *key))


class RowOrder:
    """Row r of a store -> its row in the arrays: first all full shards by their number, then the others by theirs.

    A part of a store whose text ran out leaves a shard that is not full. In this order all chunks but those of the last
    few shards are whole, as the order of batches needs it. No row is empty.

    Args:
        shard_rows: rows of a full shard.
        counts: rows of each shard, 0 for those that are not there.

    Attributes:
        shards: the shards in this order, K of them.
        starts: the first row of each, and behind them the number of rows, int64 [K + 1].
    """

    def __init__(self, shard_rows: int, counts: Sequence[int]) -> None:
        rows = np.asarray(counts, np.int64)
        full, rest = np.flatnonzero(rows == shard_rows), np.flatnonzero((rows > 0) & (rows < shard_rows))
        self.shards = np.concatenate([full, rest])
        self.starts = np.concatenate([[0], np.cumsum(rows[self.shards])])
        self._first = self.shards * shard_rows

    @property
    def is_plain(self) -> bool:
        """Row r is row r of the arrays, unless the text of one of several parts ran out."""
        return bool((self._first == self.starts[:-1]).all())

    def pieces(self, low: int, high: int) -> list[tuple[int, int]]:
        """Rows [low, high) as row ranges of the arrays, none crossing a shard's border."""
        ranges = []
        while low < high:
            k = int(np.searchsorted(self.starts, low, "right")) - 1
            stop = min(high, int(self.starts[k + 1]))
            shift = int(self._first[k] - self.starts[k])
            ranges.append((low + shift, stop + shift))
            low = stop
        return ranges
