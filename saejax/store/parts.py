"""Where the rows of a store of several parts lie: a part whose text ran out leaves a shard that is not full."""

from collections.abc import Sequence

import numpy as np

from saejax.store.manifest import Manifest


class RowOrder:
    """Row r of a store -> its row in the arrays: first all full shards by their number, then the others by theirs.

    All chunks but those of the last few shards are therefore whole, as the order of batches needs it. No row is empty.

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

    @classmethod
    def of(cls, manifest: Manifest) -> "RowOrder":
        """The order of a complete store."""
        return cls(manifest.header.layout.shard_rows, [rows for rows, _ in manifest.shards])

    @property
    def is_plain(self) -> bool:
        """Whether row r is row r of the arrays: true unless the text of one of several parts ran out."""
        return bool((self._first == self.starts[:-1]).all())

    def pieces(self, low: int, high: int) -> list[tuple[int, int]]:
        """Rows [low, high) as row ranges of the arrays, none crossing a shard's border."""
        found = []
        while low < high:
            k = int(np.searchsorted(self.starts, low, "right")) - 1
            stop = min(high, int(self.starts[k + 1]))
            shift = int(self._first[k] - self.starts[k])
            found.append((low + shift, stop + shift))
            low = stop
        return found
