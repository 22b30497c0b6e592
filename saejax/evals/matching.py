"""Match directions of two dictionaries one to one, with the largest sum of cosines."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Matched:
    """The pairs of a one-to-one matching, as many as the smaller side has rows.

    Attributes:
        first, second: int64 [M], row numbers of the two sides; `first` rises.
        cosine: float64 [M], |cos| of each pair, or cos where signs count.
    """

    first: np.ndarray
    second: np.ndarray
    cosine: np.ndarray

    @property
    def mean(self) -> float:
        """Mean cosine of the pairs: of a decoder and the true directions, MCC."""
        return float(self.cosine.mean())


def cosines(rows_AD: np.ndarray, rows_BD: np.ndarray) -> np.ndarray:
    """cos(a, b) of all pairs of rows, float32 [A, B]. A row of zeros has cosine 0 with everything."""

    def unit(rows_ND: np.ndarray) -> np.ndarray:
        rows_ND = np.asarray(rows_ND, np.float64)
        norms_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
        return (rows_ND / np.where(norms_N1 > 0, norms_N1, 1.0)).astype(np.float32)

    return unit(rows_AD) @ unit(rows_BD).T


def match(rows_AD: np.ndarray, rows_BD: np.ndarray, signed: bool = False) -> Matched:
    """max over one-to-one pairings of sum |cos(a, b)| (the Hungarian method), of [A, D] and [B, D].

    `signed` keeps the sign of the cosine. The time grows with the third power of the smaller side: 4,096 rows of each
    take seconds, 16,384 minutes.
    """
    from scipy.optimize import linear_sum_assignment

    cosines_AB = cosines(rows_AD, rows_BD)
    if not signed:
        cosines_AB = np.abs(cosines_AB)
    first, second = linear_sum_assignment(cosines_AB, maximize=True)
    return Matched(first, second, cosines_AB[first, second].astype(np.float64))
