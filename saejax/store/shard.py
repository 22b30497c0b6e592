"""Incoming rows, checked and rounded to what is stored, and the shard that they fill."""

import hashlib

import numpy as np

from saejax.core.arrays import as_array
from saejax.core.errors import DataError
from saejax.store.layout import BF16, ArrayKind
from saejax.store.order import shard_positions

_EXPONENT = np.uint16(0x7F80)  # all ones in the exponent of a bfloat16: infinite or NaN
_CHECKED_ROWS = 128


def as_bf16_rows(name: str, values: np.ndarray, n: int, width: int) -> np.ndarray:
    """`values` as contiguous bfloat16 [n, width].

    Raises:
        DataError: another shape, no float dtype, or a value that is not finite as bfloat16.
    """
    array = np.asarray(as_array(values, f"append: hook point {name!r}"))
    if array.shape != (n, width):
        raise DataError(f"append: hook point {name!r} has shape {array.shape}, expected {(n, width)}.")
    if array.dtype != BF16:
        if array.dtype.kind != "f":
            raise DataError(f"append: hook point {name!r} has dtype {array.dtype}, expected a float dtype.")
        array = _as_bfloat16(array)
    array = np.ascontiguousarray(array)
    if not _all_finite(array):
        bad = _not_finite(array)
        rows = np.flatnonzero(bad.any(axis=1))
        raise DataError(
            f"append: hook point {name!r} has {int(bad.sum())} values that are not finite as bfloat16, in "
            f"{len(rows)} rows (first: row {rows[0]} of the batch). Drop such rows before appending; "
            "nothing of the batch is stored."
        )
    return array


def finite_rows(values: np.ndarray) -> np.ndarray:
    """Mask of the rows of float [n, d] that are finite as bfloat16, bool [n]: 3.4e38 is a float32, but no bfloat16."""
    finite: np.ndarray = np.logical_not(_not_finite(np.ascontiguousarray(_as_bfloat16(values)))).all(axis=1)
    return finite


def _as_bfloat16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(BF16)


def _not_finite(array: np.ndarray) -> np.ndarray:
    bad: np.ndarray = (array.view(np.uint16) & _EXPONENT) == _EXPONENT
    return bad


def _all_finite(array: np.ndarray) -> bool:
    """True if bfloat16 [n, d] holds no NaN and no infinity; by pieces, which stay in a core's cache."""
    bits, exponents = array.view(np.uint16), np.empty((min(len(array), _CHECKED_ROWS), array.shape[1]), np.uint16)
    for start in range(0, len(array), _CHECKED_ROWS):
        piece = bits[start : start + _CHECKED_ROWS]
        if np.bitwise_and(piece, _EXPONENT, out=exponents[: len(piece)]).max() == _EXPONENT:
            return False
    return True


def as_int32_rows(name: str, values: np.ndarray, n: int) -> np.ndarray:
    """`values` as int32 [n].

    Raises:
        DataError: another shape, no integers, or values beyond int32.
    """
    array = np.asarray(as_array(values, f"append: tokens[{name!r}]"))
    if array.shape != (n,) or array.dtype.kind not in "iu":
        raise DataError(f"append: tokens[{name!r}] is {array.dtype}{list(array.shape)}, expected integers [{n}].")
    limits = np.iinfo(np.int32)
    if n and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise DataError(f"append: tokens[{name!r}] has values beyond int32.")
    return array.astype(np.int32, copy=False)


class Shard:
    """A shard being filled; every row goes straight to its permuted place.

    Args:
        kinds: the store's arrays.
        seed, index, shard_rows: they determine the permutation.
        left: rows that the store can still take; the shard holds min(shard_rows, left).
    """

    def __init__(self, kinds: tuple[ArrayKind, ...], seed: int, index: int, shard_rows: int, left: int) -> None:
        self.index = index
        self.filled = 0
        self._capacity = min(shard_rows, left)
        self._positions = shard_positions(seed, index, shard_rows, self._capacity)
        self._buffers = {kind.name: np.empty(kind.shape(self._capacity), kind.dtype) for kind in kinds}

    @property
    def is_full(self) -> bool:
        """No room for another row."""
        return self.filled == self._capacity

    def fill(self, rows: dict[str, np.ndarray], start: int) -> int:
        """Take rows from `start` on while there is room; returns how many."""
        count = min(self._capacity - self.filled, len(next(iter(rows.values()))) - start)
        places = self._positions[self.filled : self.filled + count]
        for name, buffer in self._buffers.items():
            _as_uint16(buffer)[places] = _as_uint16(rows[name])[start : start + count]
        self.filled += count
        return count

    def take(self) -> dict[str, np.ndarray]:
        """The filled rows in stored order; a ragged shard closes ranks, keeping the relative order."""
        if self.is_full:
            return self._buffers
        places = np.sort(self._positions[: self.filled])
        return {name: _as_uint16(buffer)[places].view(buffer.dtype) for name, buffer in self._buffers.items()}

    @staticmethod
    def digest(values: np.ndarray) -> str:
        """sha256 of the rows' bytes, little endian."""
        return hashlib.sha256(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()


def _as_uint16(array: np.ndarray) -> np.ndarray:
    """bfloat16 as uint16: numpy moves plain integers about twice as fast."""
    return array.view(np.uint16) if array.dtype == BF16 else array
