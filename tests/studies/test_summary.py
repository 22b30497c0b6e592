"""What a study's tables say: each figure against a few lines of NumPy, with tables whose numbers are known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from saejax.core.bootstrap import mean_interval
from saejax.interventions import first_draws, matched
from saejax.studies import baseline, effects
from saejax.studies.effects import Group
from saejax.studies.summary import FEWEST_CONTROLS, effects_of, group_of, turns_of
from saejax.studies.table import Table

PAIRS, DRAWS, PROMPTS = 12, 10, 5


def summary(
    tmp_path: Path, columns: dict[tuple[str, int], np.ndarray], turn_R: np.ndarray, last: np.ndarray, new: Any = None
) -> dict[str, Any]:
    """`group_of` of a table in which change (kind, number) moves pair r by columns[kind, number][r]."""
    table = Table(tmp_path / "effects.csv", effects.EFFECT_COLUMNS)
    table.replace(
        ("own", "L0.1", kind, number, pair, 1.0, 1.0 + float(change))
        for (kind, number), changes in columns.items()
        for pair, change in enumerate(changes)
    )
    new = np.ones(DRAWS, bool) if new is None else new
    return group_of("L0.1", 0, effects_of(table, table.read()), turn_R, last, new)


def columns(rng: np.random.Generator) -> dict[tuple[str, int], np.ndarray]:
    found = {("ablate", 0): -5 + 0.1 * rng.normal(size=PAIRS)}
    found |= {("control", i): 0.1 * rng.normal(size=PAIRS) for i in range(DRAWS)}
    found |= {("patch", back): -np.arange(1.0, PAIRS + 1) for back in range(3)}
    pair_R = rng.normal(size=PAIRS)  # what a pair does with any other prompt's values
    return found | {("resample", i): pair_R + 0.2 * rng.normal(size=PAIRS) for i in range(PROMPTS)}


def test_the_interval_of_resampled_values_draws_pairs(tmp_path: Path) -> None:
    made = columns(np.random.default_rng(0))
    found = summary(tmp_path, made, np.full(PAIRS, -10.0), np.full(PAIRS, 9))["resample"]
    each = np.stack([made["resample", i] for i in range(PROMPTS)])
    of_pairs = mean_interval(each.mean(0), resamples=2_000)  # as many prompts for each pair: the mean of the means
    assert [found[key] for key in ("mean", "low", "high")] == pytest.approx(of_pairs, abs=1e-5)
    low, high = mean_interval(each, resamples=2_000)[1:]
    assert found["high"] - found["low"] > 1.7 * (high - low)


def test_a_share_of_patching_is_over_the_pairs_that_have_the_token(tmp_path: Path) -> None:
    """Patching turns every pair over as a whole; the short ones, which lack the last token but two, differ from the
    rest in how far that is."""
    made, turn_R, last = columns(np.random.default_rng(0)), -np.arange(1.0, PAIRS + 1), np.full(PAIRS, 9)
    last[:5] = 2
    patches = summary(tmp_path, made, turn_R, last)["patch"]
    assert [patch["pairs"] for patch in patches] == [PAIRS, PAIRS, PAIRS - 5]
    assert [patch["share"] for patch in patches] == pytest.approx([1.0, 1.0, 1.0], rel=1e-5)
    last[:] = 2
    assert summary(tmp_path, made, turn_R, last)["patch"][2] is None


def test_the_turn_of_each_pair_is_that_of_its_own_test_rows(tmp_path: Path) -> None:
    table = Table(tmp_path / "baseline.csv", baseline.PAIR_COLUMNS)
    rows = [
        (name, split, pair, "c", "d", "r", "w", clean, corrupt, 0.5, 0.5, True)
        for name, split, pair, clean, corrupt in [
            ("own", "train", 0, 7, 7), ("own", "test", 1, 3, -1), ("own", "test", 0, 2, -3), ("other", "test", 0, 9, 8),
        ]
    ]  # fmt: skip
    table.replace(rows)
    assert turns_of(table, table.read(), "own").tolist() == [-5.0, -4.0]


def test_a_control_that_is_drawn_again_counts_once_and_few_give_no_verdict(tmp_path: Path) -> None:
    made, rest = columns(np.random.default_rng(0)), (np.full(PAIRS, -10.0), np.full(PAIRS, 9))
    new = np.ones(DRAWS, bool)
    assert summary(tmp_path, made, *rest, new)["stands"] is True
    new[3:] = False
    few = summary(tmp_path, made, *rest, new)
    assert few["stands"] is None and (few["control"]["distinct"], few["control"]["draws"]) == (3, DRAWS)
    assert few["control"]["mean"] == pytest.approx(np.mean([made["control", i] for i in range(3)]), abs=1e-5)
    # One control that does as much is one of nine, although it was drawn twice: more than one in ten.
    made |= {("control", i): made["ablate", 0] for i in (8, 9)}
    new[:] = [True] * FEWEST_CONTROLS + [False] * (DRAWS - FEWEST_CONTROLS)
    one = summary(tmp_path, made, *rest, new)
    assert one["control"]["as_large"] == pytest.approx(1 / FEWEST_CONTROLS) and one["stands"] is False


def test_the_same_set_in_another_order_is_no_new_control() -> None:
    """Where three others fire, every control of three is the same one."""
    sets = matched([0, 1, 2], np.array([1.0, 1, 1, 1, 1, 1, 0, 0]), 5)
    assert first_draws(sets).tolist() == [True, False, False, False, False]
    assert first_draws(np.array([[1, 2], [2, 3], [2, 1], [1, 3]])).tolist() == [True, True, False, True]


def test_means_are_over_the_tokens_between_bos_and_the_end_of_each_prompt() -> None:
    """And of latents of the group's own layer that no other group holds."""
    rng, last = np.random.default_rng(0), np.array([2, 3])
    latents_RSGF = rng.uniform(size=(2, 5, 2, 3))
    stands_for: Any = SimpleNamespace
    inside = stands_for(dictionaries={"d": SimpleNamespace(coder=SimpleNamespace(topology=SimpleNamespace(d_sae=3)))})
    prompts, clean = stands_for(clean=np.zeros((2, 5), int), last=last), stands_for(latents={"d": latents_RSGF})
    first, second = Group("first", "d", 1, (3,)), Group("second", "d", 1, (5,))
    mean_F = effects._means(inside, prompts, clean, [first, second])(first)
    wanted = np.concatenate([latents_RSGF[0, 1:3, 1], latents_RSGF[1, 1:4, 1]]).mean(0)
    np.testing.assert_allclose(mean_F, [0, 0, 0, wanted[0], wanted[1], 0])
