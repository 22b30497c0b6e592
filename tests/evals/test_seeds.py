"""Figures over seeds against values from tables, and the rule by which a setting is chosen."""

import dataclasses
import math
from typing import Any

import pytest

from saejax.evals.seeds import Trained, choices, over_seeds, summary


def coder(name: str, fve: float | None, l0: float | None = 10.0, like: str = "", place: str = "h") -> Trained:
    return Trained(name, like or name.partition("-seed")[0], name, place, {"l0": l0, "fve": fve})


def test_the_interval_is_student_s() -> None:
    """Of three values: t of 2 degrees of freedom is 4.302653 in the tables, and 12.706205 of 1 degree."""
    three = summary([1.0, 2.0, 6.0])
    spread = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2)
    assert three["mean"] == 3 and three["spread"] == pytest.approx(spread)
    half = 4.302653 * spread / math.sqrt(3)
    assert three["interval"] == pytest.approx([3 - half, 3 + half], rel=1e-6)
    half = 12.706205 * math.sqrt(2) / math.sqrt(2)
    assert summary([1.0, 3.0])["interval"] == pytest.approx([2 - half, 2 + half], rel=1e-6)
    assert summary([0.5]) == {"mean": 0.5, "spread": None, "interval": None}
    assert summary([]) == summary([None, math.nan]) == {"mean": None, "spread": None, "interval": None}


def test_coders_are_put_together_by_all_but_their_seed() -> None:
    coders = [coder("k4-seed0", 0.5), coder("k8-seed0", 0.7), coder("k4-seed1", 0.7), coder("k8-seed1", None, None)]
    four, eight = over_seeds(coders)
    assert (four["setting"], four["members"], four["failed"]) == ("k4", ["k4-seed0", "k4-seed1"], 0)
    assert four["fve"]["mean"] == pytest.approx(0.6) and four["l0"]["spread"] == 0
    assert (eight["failed"], eight["fve"]) == (1, {"mean": 0.7, "spread": None, "interval": None})


def test_a_copy_is_no_other_seed() -> None:
    """A run and what was saved of it were two seeds without a spread."""
    run, saved, other = coder("run", 0.5, like="t"), coder("saved", 0.5, like="t"), coder("other", 0.7, like="t")
    (setting,) = over_seeds([run, dataclasses.replace(saved, seed="run"), other])
    assert setting["members"] == ["run", "other"] and setting["fve"]["mean"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["seed0", "seed1"], "all seeds"),
        (["k32"], "k32"),
        (["k4-seed9", "k4-seed10"], "k4"),
        (["topk_s0", "topk_s1"], "topk"),
        (["A", "B", "C"], "A and 2 more"),
    ],
)
def test_a_setting_is_called_by_what_its_coders_have_in_common(names: list[str], label: str) -> None:
    assert over_seeds([coder(name, 0.5, like="same") for name in names])[0]["setting"] == label


def seeds(name: str, l0: float, *fves: float | None, place: str = "h") -> list[Trained]:
    """One coder of a setting is called as it is."""
    ends = [f"-seed{i}" for i in range(len(fves))] if len(fves) > 1 else [""]
    return [coder(name + end, fve, l0, place=place) for end, fve in zip(ends, fves, strict=True)]


CASES: list[tuple[list[Trained], float | None, str]] = [
    # One seed: the largest FVE.
    ([*seeds("a", 8, 0.8), *seeds("b", 16, 0.9)], None, "Choose b (FVE 0.9000, L0 16.0): the largest FVE; it has one"),
    (
        [*seeds("a", 8, 0.8), *seeds("b", 16, 0.9)],
        10,
        "Choose a (FVE 0.8000, L0 8.0): the largest FVE at an L0 of at m",
    ),
    # Within the interval of the largest the smaller L0, outside of it not.
    (
        [*seeds("a", 8, 0.89, 0.89), *seeds("b", 16, 0.90, 0.91)],
        None,
        "Choose a (FVE 0.8900 [0.8900, 0.8900], L0 8.0): b",
    ),
    (
        [*seeds("a", 8, 0.80, 0.80), *seeds("b", 16, 0.90, 0.91)],
        None,
        "Choose b (FVE 0.9050 [0.8415, 0.9685], L0 16.0): t",
    ),
    # A setting of which a seed failed is not chosen.
    ([*seeds("a", 8, 0.8), *seeds("b", 16, 0.9, None)], None, "Choose a"),
    (seeds("b", 16, None), None, "Nothing to choose: no setting finished with all its seeds."),
    (seeds("b", 16, 0.9), 4.5, "Nothing to choose: no setting finished with all its seeds at an L0 of at most 4.5."),
]


@pytest.mark.parametrize(("coders", "most_l0", "line"), CASES)
def test_the_choice_follows_the_rule(coders: list[Trained], most_l0: float | None, line: str) -> None:
    (chosen,) = choices(over_seeds(coders), most_l0)
    assert chosen.startswith(line) and "\n" not in chosen and chosen.endswith(".")


def test_hook_points_are_not_compared_with_each_other() -> None:
    lines: Any = choices(over_seeds([*seeds("a", 8, 0.8, place="x"), *seeds("b", 8, 0.9, place="y")]))
    assert [line[:17] for line in lines] == ["At x: choose a (F", "At y: choose b (F"]
