"""Statistics of one hook point's activations: float64 sums by shard, and the moments."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from saejax.core.errors import DataError

_SUMMED_ROWS = 256


@dataclass(frozen=True)
class Sums:
    """Sums over rows x: count, sum x [d] float64, sum ||x||^2, sum ||x||."""

    count: int
    total: np.ndarray
    squared_norms: float
    norms: float

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.count + other.count,
            self.total + other.total,
            self.squared_norms + other.squared_norms,
            self.norms + other.norms,
        )


@dataclass(frozen=True)
class Statistics:
    """Moments of one hook point over a whole store.

    Attributes:
        count: rows.
        mean: E x, float64 [d].
        mean_norm: E ||x||.
        mean_squared_norm: E ||x||^2.
    """

    count: int
    mean: np.ndarray
    mean_norm: float
    mean_squared_norm: float

    @property
    def total_variance(self) -> float:
        """E ||x||^2 - ||E x||^2, the denominator of the fraction of variance unexplained."""
        return self.mean_squared_norm - float(np.sum(self.mean * self.mean))

    @property
    def mean_over_spread(self) -> float:
        """||E x|| / sqrt(total variance)."""
        return float(np.sum(self.mean * self.mean)) ** 0.5 / max(self.total_variance, 1e-300) ** 0.5

    def to_json(self) -> dict[str, Any]:
        """A JSON dict from which `from_json` gets the same numbers back, bit for bit."""
        return {**vars(self), "mean": self.mean.tolist()}

    @classmethod
    def from_json(cls, value: dict[str, Any], width: int) -> "Statistics":
        """Inverse of `to_json`.

        Raises:
            DataError: the mean has not `width` entries.
        """
        mean = np.asarray(value["mean"], np.float64)
        if mean.shape != (width,):
            raise DataError(f"statistics: the mean has shape {mean.shape}, the hook point has width {width}")
        return cls(int(value["count"]), mean, float(value["mean_norm"]), float(value["mean_squared_norm"]))


def zero_sums(width: int) -> Sums:
    """The sums of no rows."""
    return Sums(0, np.zeros(width), 0.0, 0.0)


def sums_of(rows: np.ndarray) -> Sums:
    """Sums of bfloat16 rows [n, d] in float64, by pieces of 256 rows (no BLAS: same on any core count)."""
    result = zero_sums(rows.shape[1])
    for start in range(0, len(rows), _SUMMED_ROWS):
        piece = rows[start : start + _SUMMED_ROWS].astype(np.float64)
        squared = np.einsum("nd,nd->n", piece, piece)
        result = result + Sums(len(piece), piece.sum(axis=0), float(squared.sum()), float(np.sqrt(squared).sum()))
    return result


def moments(sums: Sums) -> Statistics:
    """The means of `sums`; count must be at least 1."""
    return Statistics(sums.count, sums.total / sums.count, sums.norms / sums.count, sums.squared_norms / sums.count)
