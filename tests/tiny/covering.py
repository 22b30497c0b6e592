"""Which combinations of several choices to try, where all of them take too long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def covering(*choices: Sequence[Any], possible: Callable[..., bool] = lambda *row: True) -> list[tuple[Any, ...]]:
    """Rows, one value of each of `choices`, so that every two values that can meet do: the same rows each time.

    Greedy: each row is the first of those with the most pairs that no row before it has.
    """
    rows = [row for row in itertools.product(*choices) if possible(*row)]
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def rest_in(mark: str, rows: Iterable[Any], few: Iterable[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`: all rows, of which `make test` runs `few`; the others have the mark."""
    rows, few = list(rows), list(few)
    if absent := [row for row in few if row not in rows]:
        raise ValueError(f"not among the rows: {absent}")
    marks = getattr(pytest.mark, mark)
    return [
        row if row in few else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=marks) for row in rows
    ]
