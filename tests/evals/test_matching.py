"""Matching: the best of all pairings, by trying every one."""

import itertools

import numpy as np
import pytest

from saejax.evals.similarity import cosines, matched


@pytest.mark.parametrize(("a", "b"), [(4, 6), (6, 4), (5, 5)])
def test_it_is_the_best_of_all_pairings(a: int, b: int) -> None:
    random = np.random.default_rng(a * 10 + b)
    first_AD, second_BD = random.normal(size=(a, 3)), random.normal(size=(b, 3))
    cosine_AB = np.array([[x @ y / np.linalg.norm(x) / np.linalg.norm(y) for y in second_BD] for x in first_AD])
    cosine_AB = np.abs(cosine_AB)
    wide = cosine_AB if a <= b else cosine_AB.T
    best = max(
        sum(wide[i, j] for i, j in enumerate(chosen)) for chosen in itertools.permutations(range(max(a, b)), min(a, b))
    )

    np.testing.assert_allclose(cosines(first_AD, second_BD), cosine_AB, atol=1e-6)
    pairs = matched(cosine_AB)
    assert pairs.sum() == pytest.approx(best, abs=1e-6) and len(pairs) == min(a, b)


def test_a_dictionary_in_another_order_is_found_again() -> None:
    rows_FD = np.random.default_rng(0).normal(size=(40, 16))
    order = np.random.default_rng(1).permutation(40)
    np.testing.assert_allclose(matched(cosines(rows_FD, -3 * rows_FD[order])), 1, atol=1e-6)


def test_a_row_of_zeros_has_cosine_0() -> None:
    assert cosines(np.zeros((1, 3)), np.ones((2, 3))).tolist() == [[0.0, 0.0]]
