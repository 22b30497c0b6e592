"""Each file name of a run and of a sweep is spelled in saejax/runs/folder.py and nowhere else in saejax."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from saejax.runs.folder import Run, Sweep, _Name

ROOT = Path(__file__).resolve().parents[2]
OWNER = "saejax/runs/folder.py"
# What lies beside an artifact is called as it is.
BESIDE = (".md", ".png", ".html")
# The same name of something else: the configuration of a language model or of another project's dictionary.
HOMONYMS = {
    "config.json": (
        *("saejax/lm/", "saejax/interop/", "saejax/core/places.py"),
        *("saejax/text/tokenizer.py", "saejax/text/in_memory.py"),
    )
}


def names() -> frozenset[str]:
    of = [
        str(name.__get__(None, owner)) for owner in (Run, Sweep) for name in vars(owner).values() if type(name) is _Name
    ]
    artifacts = [Path(name).stem for name in of if name.endswith((".json", ".md"))]
    return frozenset({*of, *(name + end for name in artifacts for end in BESIDE)})


def spelled(tree: ast.AST, of: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of each name that stands as a text; the bare word of a folder only where a path is made of it."""
    joined = {id(node.right) for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in of and ("." in node.value or id(node) in joined):
            yield node.lineno, node.value


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('folder / "eval.json"', ["eval.json"]),
        ("f\"{folder / 'table.html'}\"", ["table.html"]),
        ('(folder / "evaluated", "evaluated", "groups")', ["evaluated"]),
        ('"""eval.json of a run."""', []),
        ("Run(folder).evaluation", []),
    ],
)
def test_a_name_is_seen_where_it_stands(line: str, expected: list[str]) -> None:
    assert [name for _, name in spelled(ast.parse(line), names())] == expected


def test_no_other_file_spells_a_name() -> None:
    lines = []
    for path in sorted((ROOT / "saejax").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for line, name in spelled(ast.parse(path.read_text()), names()):
            if place != OWNER and not place.startswith(HOMONYMS.get(name, ("/",))):
                lines.append(f"{place}:{line}: {name!r} is spelled by {OWNER}: use Run or Sweep of saejax.runs")
    assert not lines, "\n" + "\n".join(lines)
