"""The rows that `make test` takes of a full product."""

import itertools

import pytest
from tiny.covering import covering, rest_in

CHOICES = ("abcde", range(4), (None, "x", "y"))


def _possible(letter: str, number: int, word: str | None) -> bool:
    return word != "y" or number > 1


def test_every_two_values_that_can_meet_do_in_fewer_rows() -> None:
    rows, product = covering(*CHOICES, possible=_possible), list(itertools.product(*CHOICES))
    everything = [row for row in product if _possible(*row)]
    assert set(rows) < set(everything) and len(rows) < len(everything) / 2
    for i, j in itertools.combinations(range(3), 2):
        assert {(row[i], row[j]) for row in rows} == {(row[i], row[j]) for row in everything}
    assert rows == covering(*CHOICES, possible=_possible), "the same each time"


def test_the_rest_has_the_mark_and_a_row_that_is_not_there_is_refused() -> None:
    few, *rest = rest_in("ci", ["a", ("b", 1)], ["a"])
    assert few == "a" and [(row.values, row.marks[0].name) for row in rest] == [(("b", 1), "ci")]
    with pytest.raises(ValueError, match="not among the rows: \\['c'\\]"):
        rest_in("ci", ["a"], ["c"])
