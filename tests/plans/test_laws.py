"""Seconds from work: the roofline by hand, and laws that are fitted to measurements."""

import numpy as np
import pytest

from saejax.core.errors import ConfigError
from saejax.plans.devices import EFFICIENCY, device
from saejax.plans.laws import Law, fitted, roofline, training_peak
from saejax.plans.programs import Footprint


def test_the_roofline_by_hand() -> None:
    h100 = device("h100")
    work = Footprint(0, 0, 0, flops=1e12, moved=1e9, sent=1e8, collectives=3, operations=100)
    by_hand = 1e12 / (EFFICIENCY["products"] * 989e12) + 1e9 / (EFFICIENCY["bandwidth"] * 3350e9)
    by_hand += 1e8 / (EFFICIENCY["links"] * 450e9) + 3 * 2 * 5e-6 + 100 * 5e-6
    assert roofline(h100, work, h100.bfloat16) == pytest.approx(by_hand)


def test_a_step_has_one_quick_product_and_two_of_half_the_speed() -> None:
    assert training_peak(device("h100"), "auto") == pytest.approx(3 / (1 / 989e12 + 2 / (989e12 / 2)))
    assert training_peak(device("h100"), "float32") == 67e12
    assert training_peak(device("cpu"), "auto") == device("cpu").float32


def test_a_law_finds_the_costs_that_made_its_measurements() -> None:
    random = np.random.default_rng(0)
    costs = np.array([1e-3, 2e-11, 0.0, 3e-10])
    amounts = [(1.0, *10 ** random.uniform(6, 9, 3)) for _ in range(12)]
    law = fitted([(at, float(np.dot(costs, at))) for at in amounts])
    for at in [(1.0, 1e8, 1e8, 1e8), (1.0, 3e9, 2e7, 5e6)]:
        assert law.seconds(at) == pytest.approx(np.dot(costs, at), rel=1e-6)


def test_near_what_was_measured_a_law_is_right_and_far_away_it_follows_the_trend() -> None:
    # Twice as slow as linear above 1e8, as work is that no longer fits the cache.
    points = [((1.0, n), n * 1e-9 * (2 if n > 1e8 else 1)) for n in (1e7, 3e7, 1e9, 3e9)]
    law = fitted(points)
    for at, seconds in points:
        assert law.seconds(at) == pytest.approx(seconds, rel=0.1)
    assert law.seconds((1.0, 1e14)) == pytest.approx(1e14 * law.coefficients[1], rel=0.05)


def test_a_law_survives_the_file_and_a_hostile_one_is_refused() -> None:
    law = fitted([((1.0, 2.0), 3.0), ((1.0, 4.0), 5.0)])
    again = Law.from_json(law.to_json(), "here")
    assert again.seconds((1.0, 3.0)) == pytest.approx(law.seconds((1.0, 3.0)), rel=1e-3)
    for wrong in (3, {}, {"coefficients": [1.0], "points": []}, {"coefficients": [1.0], "points": [[[1.0, 2.0], 1.0]]}):
        with pytest.raises(ConfigError, match="Run `saejax calibrate` again"):
            Law.from_json(wrong, "here: measured.forward")
