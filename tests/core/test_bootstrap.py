"""The bootstrap that every interval of a mean comes from: against resampling by hand, and its coverage."""

import numpy as np
import pytest

from saejax.core.bootstrap import mean_interval, middle

PAIRS, EACH = 20, 5


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Five measurements of each of 20 pairs: pairs differ more than what is measured of one of them."""
    pair_C = rng.normal(size=PAIRS)
    return (pair_C + 0.5 * rng.normal(size=(EACH, PAIRS))).ravel(), np.tile(np.arange(PAIRS), EACH)


@pytest.mark.parametrize(("clustered", "least", "most"), [(True, 0.87, 0.99), (False, 0.0, 0.75)])
def test_an_interval_over_sources_covers_the_truth_and_one_over_their_values_does_not(
    clustered: bool, least: float, most: float
) -> None:
    """400 experiments whose true mean is 0. (Of 20 sources percentile intervals cover about 92 %, not 95.)"""
    rng, inside = np.random.default_rng(0), 0
    for i in range(400):
        values, pairs = drawn(rng)
        _, low, high = mean_interval(values, pairs if clustered else None, resamples=300, seed=i)
        inside += low <= 0 <= high
    assert least < inside / 400 < most


def test_a_resample_takes_sources_with_all_their_values() -> None:
    """Unequal ones: each resample is a mean over all values that were drawn, computed here one by one."""
    values, sources = [1.0, 2, 3, 10, np.nan, 4], ["a", "a", "a", "b", "b", "c"]
    rng, means = np.random.default_rng(5), []
    own = [[1.0, 2, 3], [10.0], [4.0]]
    for row in rng.integers(0, 3, (500, 3)):
        means.append(np.mean([value for source in row for value in own[source]]))
    found = mean_interval(values, sources, resamples=500, seed=5)
    assert found == pytest.approx((4.0, *np.quantile(means, [0.025, 0.975])), rel=1e-12)
    assert middle(np.arange(1001.0), level=0.9) == pytest.approx((50.0, 950.0))


def test_sources_of_one_value_each_are_values() -> None:
    values = np.random.default_rng(1).normal(size=17)
    assert mean_interval(values, resamples=2500, seed=3) == mean_interval(values, np.arange(17), resamples=2500, seed=3)
    assert np.isnan(mean_interval([], resamples=10)).all() and np.isnan(mean_interval([np.nan], resamples=10)).all()
