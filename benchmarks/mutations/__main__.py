"""Do the tests of a room notice a fault in it? Each fault of `mutants` is put into a clone of this checkout and the
tests that it names are run: first those of `make test`, and where they all pass, those that only `make soak` and
.ci/run run.

    python -m benchmarks.mutations                         # all of them, hours on two cores
    python -m benchmarks.mutations --rooms=coders,store    # those of two rooms
    python -m benchmarks.mutations --check                 # only: does each text still stand once in saejax/?

Results are added to --output as they come, one line of JSON each; a mutant that is there already is not run again. The
table is printed at the end. A room whose tests fail without any fault is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.mutations.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SELECTIONS = {"make test": (), "soak and ci": ("-m", "soak or ci")}
NOTICED, MISSED, LATE = "noticed", "missed", "noticed (too slow)"
_NO_TESTS = 5  # pytest's exit code where a selection is empty


def _clone(folder: Path) -> Path:
    """What is committed here, in a repository of its own: tests ask git."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "clone")], check=True)
    return folder / "clone"


def _places(mutant: Mutant, root: Path) -> list[Path]:
    """The files below saejax/ with the mutant's text, one as often as it stands there: one in all, if all is well."""
    files = (root / "saejax").rglob("*.py")
    return [path for path in files for _ in range(path.read_text(encoding="utf-8").count(mutant.old))]


def problems(mutants: Sequence[Mutant]) -> list[str]:
    """Mutants whose text does not stand once in saejax/, and test files that are not there, a line each."""
    texts = [f"{m.room}: {m.old!r} stands {n} times in saejax/" for m in mutants if (n := len(_places(m, ROOT))) != 1]
    files = {name for mutant in mutants for name in mutant.tests}
    return texts + [f"no tests/{name}" for name in sorted(files) if not (ROOT / "tests" / name).is_file()]


def _tests(root: Path, names: tuple[str, ...], selection: tuple[str, ...], limit_s: float) -> tuple[str, str]:
    """(noticed or missed, the first test that failed)."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *selection]
    try:
        done = subprocess.run(
            [*words, *(f"tests/{name}" for name in names)],
            cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=limit_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return LATE, ""
    if done.returncode in (0, _NO_TESTS):
        return MISSED, ""
    by = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return NOTICED, by[1] if by else (done.stdout + done.stderr).strip()[-200:]


def _run(mutant: Mutant, root: Path, limit_s: float) -> dict[str, object]:
    (path,) = _places(mutant, root)
    text, began = path.read_text(encoding="utf-8"), time.monotonic()
    row: dict[str, object] = {"room": mutant.room, "old": mutant.old, "new": mutant.new}
    row["file"] = str(path.relative_to(root))
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        for name, selection in SELECTIONS.items():
            row[name], by = _tests(root, mutant.tests, selection, limit_s)
            if row[name] != MISSED:
                row["by"] = by
                break
    finally:
        path.write_text(text, encoding="utf-8")
    return row | {"seconds": round(time.monotonic() - began)}


def _clean(tests: tuple[str, ...], root: Path, limit_s: float) -> bool:
    """Do the tests pass where there is no fault? Otherwise they say nothing about one."""
    state, by = _tests(root, tests, SELECTIONS["make test"], limit_s)
    if state != MISSED:
        print(f"left out: {', '.join(tests)}: without a fault {by or 'they take too long'}", file=sys.stderr)
    return state == MISSED


def table(rows: list[dict[str, object]]) -> str:
    """Markdown: what noticed each fault. All tests notice what those of `make test` do."""
    lines = ["| room | fault | make test | all tests | first to fail |", "|---|---|---|---|---|"]
    for row in rows:
        default, rest = str(row["make test"]), str(row.get("soak and ci", row["make test"]))
        fault = f"`{row['old']}` to `{row['new']}`".replace("|", "\\|")
        by = str(row.get("by", "")).rpartition("/")[2].replace("|", "\\|")
        lines.append(f"| {row['room']} | {fault} | {default} | {rest} | {by} |")
    by_default = sum(row["make test"] != MISSED for row in rows)
    by_all = sum(row.get("soak and ci", row["make test"]) != MISSED for row in rows)
    return "\n".join([*lines, "", f"{len(rows)} faults: {by_default} noticed by `make test`, {by_all} by all tests."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", default="", help="only those of these rooms, with commas between")
    parser.add_argument("--output", type=Path, default=Path("build/mutations.jsonl"), help="rows of JSON, added to")
    parser.add_argument("--limit", type=float, default=1200, help="seconds that the tests of one fault may take")
    parser.add_argument("--check", action="store_true", help="only look for the texts")
    parser.add_argument("--table", action="store_true", help="only print the table of --output")
    told = parser.parse_args()
    rooms = told.rooms.split(",") if told.rooms else {mutant.room for mutant in MUTANTS}
    wanted = [mutant for mutant in MUTANTS if mutant.room in rooms]
    told.output.parent.mkdir(parents=True, exist_ok=True)
    lines = told.output.read_text(encoding="utf-8").splitlines() if told.output.is_file() else []
    rows = [json.loads(line) for line in lines]
    if not told.table and (wrong := problems(wanted)):
        raise SystemExit("\n".join(wrong))
    if told.check or told.table:
        print(table(rows) if told.table else f"{len(wanted)} texts stand once in saejax/")
        return
    done, passing = {(row["old"], row["new"]) for row in rows}, dict[tuple[str, ...], bool]()
    with tempfile.TemporaryDirectory(prefix="saejax-mutations-") as folder, told.output.open("a") as output:
        root = _clone(Path(folder))
        for mutant in (mutant for mutant in wanted if (mutant.old, mutant.new) not in done):
            if mutant.tests not in passing:
                passing[mutant.tests] = _clean(mutant.tests, root, told.limit)
            if passing[mutant.tests]:
                rows.append(_run(mutant, root, told.limit))
                output.write(json.dumps(rows[-1]) + "\n")
                output.flush()
                print(rows[-1], flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
