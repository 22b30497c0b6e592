"""The figures of `python -m benchmarks.house` that have a bar; and that the ruler measures."""

import ast
import re
from pathlib import Path

from tiny import ROOT

from benchmarks import house
from benchmarks.mutations.__main__ import problems
from benchmarks.mutations.mutants import MUTANTS, Mutant

TREES = house.modules()


def test_a_name_at_top_level_says_which_file_it_is_in() -> None:
    shared = house.shared_names(TREES)
    assert len(shared) <= house.SHARED_NAMES, shared


def test_a_docstring_begins_with_a_verb_or_the_contract() -> None:
    assert house.question_docstrings(TREES) == []


def test_the_house_does_not_grow() -> None:
    assert sum(house.lines_of_rooms().values()) <= house.HELD


def test_every_fault_of_the_list_can_be_put_in() -> None:
    assert not problems(MUTANTS)
    lost = Mutant("core", "no such text", "", ("no/such/test.py",))
    assert problems([lost]) == ["core: 'no such text' stands 0 times in saejax/", "no tests/no/such/test.py"]


def test_the_ruler_sees_what_it_measures() -> None:
    text = (
        'A: int = 1\nT = TypeVar("T")\ndef f(found):\n    """What it is."""\n    return _g()\ndef _g():\n    return 1\n'
    )
    trees = {Path(name): ast.parse(text) for name in ("a.py", "b.py", "c.py")}
    assert set(house.shared_names(trees)) == {"A", "f", "_g"}
    assert house.question_docstrings(trees) == [f"{name}:3: What it is." for name in trees]
    assert house.used_once(trees) == (3, 6)
    assert house.vague_share(trees) == 3 / 15


def test_no_test_imports_pytorch_unasked() -> None:
    """The suite runs without it on Python 3.12 and newer: `tiny.torches`, or pytest.importorskip."""
    top = re.compile(r"^(import|from) torch", re.MULTILINE)
    assert [path for path in (ROOT / "tests").rglob("*.py") if top.search(path.read_text())] == []
