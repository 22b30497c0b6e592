"""Behaviours, and the tables that a study keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saejax.core.errors import ConfigError, DataError
from saejax.lm import load_lm
from saejax.studies.behaviours import BEHAVIOURS, Behaviour, Pair, as_jsonl, drawn, read_pairs, unfit
from saejax.studies.table import Table

LM = load_lm("demo")


def test_templates_are_filled_with_words_that_go_together() -> None:
    of = Behaviour("", (("The {one} by the {other}", "The {many} by the {other}", " is", " are"),),
                   {"one/many": ("key/keys", "car/cars"), "other": ("wall", "car")})  # fmt: skip
    pairs = list(of.pairs())
    assert pairs[0] == Pair("The key by the wall", "The keys by the wall", " is", " are")
    assert [pair.clean for pair in pairs] == ["The key by the wall", "The key by the car", "The car by the wall"]


@pytest.mark.parametrize("name", ["bracket", "quote", "argument"])
def test_the_demo_models_behaviours_have_enough_pairs_that_fit(name: str) -> None:
    """The same seed draws the same pairs, another one others; none is in both splits, and each fits."""
    first, again, other = (drawn(name, LM.tokenizer, 80, 20, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len({*first["train"], *first["test"]}) == 100
    for pair in first["test"]:
        clean, corrupt = (LM.tokenizer.encode(text) for text in (pair.clean, pair.corrupt))
        assert len(clean) == len(corrupt) and not unfit(pair, LM.tokenizer)
        assert sum(a != b for a, b in zip(clean, corrupt, strict=True)) >= 1


def test_every_behaviour_says_what_it_is_and_has_different_answers() -> None:
    for behaviour in BEHAVIOURS.values():
        pairs = list(behaviour.pairs())
        assert behaviour.about and len(pairs) >= 100
        assert all(pair.clean != pair.corrupt and pair.right != pair.wrong for pair in pairs)
        assert not any("{" in part for pair in pairs for part in (pair.right, pair.wrong))


@pytest.mark.parametrize(
    ("pair", "fit"),
    [
        (Pair("data[x", "data(x", "]", ")"), True),
        (Pair("data[x", "data(x", "] and more", ")"), False),
        (Pair("data[x", "data(x", "]", "]"), False),
        (Pair("data[x", "my data(x", "]", ")"), False),
        (Pair("", "", "]", ")"), False),
    ],
)
def test_pairs_that_do_not_fit_are_left_out(pair: Pair, fit: bool) -> None:
    assert bool(unfit(pair, LM.tokenizer)) != fit


def test_pairs_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    pairs = [Pair(f"data{i}[x", f"data{i}(x", "]", ")") for i in range(9)]
    path.write_text(as_jsonl(pairs) + "\n")
    assert read_pairs(path) == pairs
    splits = drawn("mine", LM.tokenizer, 4, 2, 0, str(path))
    assert {*splits["train"], *splits["test"]} <= {*pairs}
    with pytest.raises(
        DataError,
        match=r"mine: 400 . 2 pairs are wanted, and 9 of 9 different ones in .*mine.jsonl can be compared. Lower",
    ):
        drawn("mine", LM.tokenizer, 400, 2, 0, str(path))
    with pytest.raises(ConfigError, match="No behaviour 'brakets'; there are bracket"):
        drawn("brakets", LM.tokenizer, 4, 2, 0)


# --- tables ----------------------------------------------------------------------------------------------------------

ROWS: list[Any] = [("a, b", 1, np.float32(0.1)), ('"', -2, 1e-9), ("x\ny", 3, float("nan")), ("ü", 4, 2.0)]


def _filled(path: Path) -> bytes:
    table = Table(path, ("text", "number", "value"))
    done = table.keep([1] * len(ROWS))
    table.extend(ROWS[done:])
    return path.read_bytes()


@pytest.mark.parametrize("keep", [0, 3, 18, 25, 31, 40, 10_000])
def test_a_table_cut_at_any_place_ends_as_the_whole_one(keep: int, tmp_path: Path) -> None:
    """A row is one line, also where its text has several."""
    whole = _filled(tmp_path / "whole.csv")
    assert whole.count(b"\n") == 1 + len(ROWS)
    (tmp_path / "cut.csv").write_bytes(whole[:keep])
    assert _filled(tmp_path / "cut.csv") == whole


def test_numbers_come_back_as_float32(tmp_path: Path) -> None:
    table = Table(tmp_path / "a.csv", ("value",))
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    table.keep([50])
    table.extend((value,) for value in values)
    np.testing.assert_array_equal(table.numbers("value", table.read()).astype(np.float32), values)


def test_another_file_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match="is not the table of value"):
        Table(tmp_path / "a.csv", ("value",)).keep([1])


def test_what_a_table_holds_is_read_back(tmp_path: Path) -> None:
    table = Table(tmp_path / "b.csv", ("text", "number", "value"))
    table.keep([2])
    table.extend(ROWS[:2])
    assert [row["text"] for row in table.read()] == ["a, b", '"']
