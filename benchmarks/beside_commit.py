"""Train steps of an earlier commit beside those of this checkout, in turn: is a step as fast as it was?

    python -m benchmarks.beside_commit a8d082b [--rows=topk-6144,clt-1536x4] [--rounds=5] [--output=FILE]

The commit is checked out into a temporary folder. Both sides are contestants of `benchmarks.bench`, each a process of
its own tree, with the same activations; who begins moves on from round to round, so a busy machine slows both. A row's
ratio is the median over the rounds of (seconds of the earlier commit) / (seconds of this one): above 1 is faster now.
"""

import argparse
import contextlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from benchmarks.bench.protocol import ROOT, Worker
from benchmarks.bench.rows import CPU_ROWS, Row
from benchmarks.bench.training import LR, tokens

_ROWS = ("topk-6144", "batchtopk-6144", "standard-6144", "jumprelu-6144", "transcoder-6144", "clt-1536x4")


# A worker begins in this checkout; what it imports comes from PYTHONPATH.
_OURS = "import os, runpy; os.chdir({tree!r}); runpy.run_module('benchmarks.bench.ours', run_name='__main__')"


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A folder with the commit's files, for the time."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def rounds_of(row: Row, trees: dict[str, Path], rounds: int, folder: Path) -> dict[str, list[float]]:
    """{commit: median seconds of a step, of each round}"""
    data, _ = tokens(row, folder)
    found: dict[str, list[float]] = {name: [] for name in trees}
    with contextlib.ExitStack() as stack:
        workers = {}
        for name, tree in trees.items():
            code = _OURS.format(tree=str(tree))
            environment = {"PYTHONPATH": str(tree)}
            # -P: else the folder that the process starts in comes first.
            workers[name] = stack.enter_context(
                Worker(name, [sys.executable, "-P", "-c", code], environment=environment)
            )
            workers[name].ask("prepare", row=row.to_json(), data=str(data), lr=LR, steps=1 + rounds * row.steps)
            workers[name].ask("run", steps=1)
        for number in range(rounds):
            for name in list(trees)[:: 1 if number % 2 else -1]:
                found[name].append(statistics.median(workers[name].ask("run", steps=row.steps)["seconds"]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier one")
    parser.add_argument("--rows", default=",".join(_ROWS), help="of benchmarks.bench --list")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="also write the page there")
    told = parser.parse_args()
    known = {row.name: row for row in CPU_ROWS}
    if unknown := [name for name in told.rows.split(",") if name not in known]:
        parser.error(f"--rows: there is no {', '.join(unknown)}")
    now = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    lines = [_HEAD.format(commit=told.commit, now=now.stdout.strip(), machine=_machine(), rounds=told.rounds)]
    with checked_out(told.commit) as earlier, tempfile.TemporaryDirectory() as folder:
        for name in told.rows.split(","):
            found = rounds_of(known[name], {"then": earlier, "now": ROOT}, told.rounds, Path(folder))
            ratios = [then / at_present for then, at_present in zip(found["then"], found["now"], strict=True)]
            cells = [f"{1000 * statistics.median(found[which]):.0f}" for which in ("then", "now")]
            cells += [f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"]
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if told.output:
        told.output.write_text("\n".join(lines) + "\n")
    return 0


def _machine() -> str:
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, {versions}"


_HEAD = """# A step, then and now

`python -m benchmarks.beside_commit {commit}`: {machine}. Milliseconds of a train step at {commit} and at
{now}, in turn, {rounds} rounds; the ratio is the median of the rounds, in brackets their range. Above 1: faster now.

| row | then | now | times as fast now |
|---|---|---|---|"""

if __name__ == "__main__":
    sys.exit(main())
