"""Means over data sets with intervals, and which of two dictionaries is better on the same data sets.

The interval is the percentile bootstrap over data sets, or letters (`core.bootstrap`). One of fewer than two is not
known.
"""

import dataclasses
from collections.abc import Sequence

from saejax.core.bootstrap import mean_interval


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean of n numbers, and the bounds of its interval; None where n is 1."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def verdict(self) -> str:
        """Of a difference: "better" or "worse" where its interval excludes 0, else "open"."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "open"
        return "better" if self.low > 0 else "worse"


def mean_over(values: Sequence[float], resamples: int, seed: int) -> Mean:
    """The mean of the values with its interval. The same resamples for the same seed and number of values."""
    if not len(values):
        raise ValueError("no values")
    mean, low, high = mean_interval(values, resamples=resamples, seed=seed)
    return Mean(mean, low, high, len(values)) if len(values) > 1 else Mean(mean, None, None, 1)


def difference(values: dict[str, float], others: dict[str, float], resamples: int, seed: int) -> Mean | None:
    """The mean difference over the data sets that both have, paired; None where there are none."""
    both = [name for name in values if name in others]
    return mean_over([values[name] - others[name] for name in both], resamples, seed) if both else None
