"""Measures the house: what a stranger has to walk through to understand it.

    python -m benchmarks.house            every figure, beside its bar
    python -m benchmarks.house --names    and the names that several files define
    python -m benchmarks.house --times    and how long the doors take to open (three processes each)

Everything but the times is read from the source with `ast`; nothing of saejax is imported. tests/house/test_house.py
holds the figures that have a bar.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
# What the lines shall come down to, and what they may not exceed again until then.
LINES, HELD = 50_000, 64_278
SHARED_NAMES = 20
# Words that tell a stranger nothing about what they name.
VAGUE = frozenset({"found", "own", "one", "said", "kept", "asked", "given", "taken", "agreed"})
QUESTION = re.compile(r"(What|Whether|Where|Who|Whose|Which|How|That)\b")
BARS = {"import saejax": 0.05, "saejax --help": 0.3, "saejax store info": 1.5}


def modules(root: Path = ROOT) -> dict[Path, ast.Module]:
    """The parsed files of saejax/, by their path below `root`."""
    return {path.relative_to(root): ast.parse(path.read_text()) for path in sorted((root / "saejax").rglob("*.py"))}


def lines_of_rooms(root: Path = ROOT) -> Counter[str]:
    """room -> lines of Python; modules of the package's root count as the room "(doors)"."""
    count: Counter[str] = Counter()
    for path in (root / "saejax").rglob("*.py"):
        parts = path.relative_to(root / "saejax").parts
        count[parts[0] if len(parts) > 1 else "(doors)"] += path.read_text().count("\n")
    return count


def _top_level(tree: ast.Module) -> Iterator[str]:
    """Functions, classes, constants and aliases that a module defines; not its dunders and type variables."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        value = getattr(node, "value", None)
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Name)
            and value.func.id in ("TypeVar", "ParamSpec")
        ):
            continue
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("__"))


def shared_names(trees: Mapping[Path, ast.Module], files: int = 3) -> dict[str, list[Path]]:
    """name -> the files that define it at top level, for names that at least `files` files define."""
    where: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for name in _top_level(tree):
            where[name].add(path)
    return {name: sorted(paths) for name, paths in sorted(where.items()) if len(paths) >= files}


def vague_share(trees: Mapping[Path, ast.Module]) -> float:
    """Share of bound names (arguments, local variables, functions) that are one of `VAGUE`."""
    bound: Counter[str] = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                bound[node.arg] += 1
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound[node.id] += 1
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound[node.name] += 1
    return sum(bound[name] for name in VAGUE) / sum(bound.values())


def question_docstrings(trees: Mapping[Path, ast.Module]) -> list[str]:
    """ "file:line: first line" of docstrings that begin with a question's word, not with a verb or the contract."""
    bad = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if QUESTION.match(text):
                    bad.append(f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return bad


def used_once(trees: Mapping[Path, ast.Module]) -> tuple[int, int]:
    """(private functions that their file names once, their lines)."""
    count = lines = 0
    for tree in trees.values():
        uses: Counter[str] = Counter()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and re.match(r"_[^_]", node.name) and uses[node.name] == 1:
                count, lines = count + 1, lines + (node.end_lineno or node.lineno) - node.lineno + 1
    return count, lines


def _seconds(command: list[str], folder: str) -> float:
    """The least wall time of three runs of `command`."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, cwd=folder, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        best = min(best, time.perf_counter() - start)
    return best


def door_seconds() -> dict[str, float]:
    """Door -> seconds until it answers, the least of three; `import saejax` without the bare interpreter's time."""
    python, saejax = [sys.executable, "-c"], [sys.executable, "-m", "saejax"]
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "x.npy"), np.random.default_rng(0).normal(size=(512, 16)).astype(np.float32))
        importing = ["store", "import", "store", "x.npy", "--hook_point=blocks.0.resid_pre"]
        subprocess.run([*saejax, *importing], check=True, capture_output=True, cwd=folder)
        bare = _seconds([*python, "pass"], folder)
        return {
            "import saejax": _seconds([*python, "import saejax"], folder) - bare,
            "saejax --help": _seconds([*saejax, "--help"], folder),
            "saejax store info": _seconds([*saejax, "store", "info", "store"], folder),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list the names that three files or more define")
    parser.add_argument("--times", action="store_true", help="measure how long the doors take to open")
    options = parser.parse_args()
    trees, rooms = modules(), lines_of_rooms()
    names, (count, lines) = shared_names(trees), used_once(trees)
    print(f"lines of saejax/: {sum(rooms.values()):,} in {len(trees)} files (aim {LINES:,}, held at {HELD:,})")
    print("  " + ", ".join(f"{room} {n:,}" for room, n in rooms.most_common()))
    print(f"top-level names defined in 3 files or more: {len(names)} (bar {SHARED_NAMES})")
    if options.names:
        for name, paths in sorted(names.items(), key=lambda item: -len(item[1])):
            print(f"  {len(paths):2} {name}: {' '.join(map(str, paths))}")
    print(f"docstrings that begin with a question's word: {len(question_docstrings(trees))} (bar 0)")
    print(f"bound names that say nothing: {vague_share(trees):.1%}")
    print(f"private functions that are used once: {count}, {lines:,} lines")
    if options.times:
        for door, seconds in door_seconds().items():
            print(f"{door}: {1000 * seconds:.0f} ms (bar {1000 * BARS[door]:.0f})")


if __name__ == "__main__":
    main()
