"""A value of another shape than a file should have is named with what it holds."""

from typing import Any

import pytest

from saejax.runs.shape import Maybe, fault, histogram

ROW = {"name": str, "ms": float, "at": Maybe(int), "more": Maybe([float], null=False)}
BARS = {"edges": [0, 1.5], "counts": [1]}


@pytest.mark.parametrize(
    ("value", "shape", "wrong"),
    [
        ({"name": "a", "ms": 1, "at": None, "other": []}, ROW, ""),
        ([{"name": "a", "ms": 1.0, "more": [1, 2]}], [ROW], ""),
        ({"name": "a"}, ROW, "it has no ms"),
        ({"name": "a", "ms": True}, ROW, "it has the ms 'True', which is not a number"),
        ({"name": "a", "ms": 1, "at": 1.5}, ROW, "it has the at '1.5', which is not a whole number"),
        ({"name": "a", "ms": 1, "more": None}, ROW, "'more' is not a list"),
        ({"name": "a", "ms": 1, "more": ["b"]}, ROW, "'more' holds 'b', which is not a number"),
        ([1], [ROW], "it is not an object"),
        ({"x": 1, "y": "b"}, {...: Maybe(float)}, "it has the y 'b', which is not a number"),
        ({"x": 1, "y": "b"}, {"y": str, ...: float}, ""),
        (BARS, histogram("edges"), ""),
        (BARS | {"counts": []}, histogram("edges"), "it does not have one edge more than counts"),
        ([], histogram("edges"), "it is not an object"),
    ],
)
def test_the_first_thing_that_is_wrong_is_said(value: Any, shape: Any, wrong: str) -> None:
    assert fault(value, shape) == wrong
