"""The uncertainty of a mean: the percentile bootstrap over what was drawn independently.

    mean       the sum of all values / their number
    resample   as many clusters as there are, drawn with replacement, each with all its values; its mean
    interval   the middle 95 % of the means of the resamples

(Efron and Tibshirani, An Introduction to the Bootstrap, chapters 8 and 13.) Values of one source are alike: a pair of
prompts that is measured five times, five questions about one text. They are one cluster. Drawn one by one they would
count as more than they are, and the interval would be too narrow.
"""

from typing import Any

import numpy as np

LEVEL = 0.95
# Resamples that are drawn at a time.
_RESAMPLES_AT_ONCE = 1000


def middle(resampled_W: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """(low, high): the quantiles between which the share `level` of the resamples lies."""
    low, high = np.quantile(resampled_W, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_interval(
    values: Any, clusters: Any = None, *, resamples: int, seed: int = 0, level: float = LEVEL
) -> tuple[float, float, float]:
    """(mean, low, high) of values [N]; the same for the same seed. Values that are NaN are left out.

    Args:
        clusters: [N], equal for values that are of one source; None: each has a source of its own.

    Of no value all three are NaN.
    """
    value_N = np.asarray(values, np.float64).ravel()
    known_N = ~np.isnan(value_N)
    if not known_N.any():
        return (float("nan"),) * 3
    value_N = value_N[known_N]
    sums_C: np.ndarray = value_N
    counts_C: np.ndarray = np.ones(len(value_N))
    if clusters is not None:
        of_N = np.unique(np.asarray(clusters).ravel()[known_N], return_inverse=True)[1]
        sums_C, counts_C = np.bincount(of_N, value_N), np.bincount(of_N).astype(np.float64)
    n, rng, means = len(sums_C), np.random.default_rng(seed), []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        drawn_WC = rng.integers(0, n, (min(_RESAMPLES_AT_ONCE, resamples - start), n))
        means.append(sums_C[drawn_WC].sum(1) / counts_C[drawn_WC].sum(1))
    return (float(value_N.mean()), *middle(np.concatenate(means), level))
