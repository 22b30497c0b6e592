"""Every fault that a capture and its store are said to survive, tried; one table of what came of it.

    python -m benchmarks.faults [--kills=50 --flips=300]      (make faults)

Kills, a disk that is full, lost files, flipped bits, second writers, NaN, a hub that is not there, hostile models: each
in a temporary folder, most with real processes of launch.capture. Writes the table to benchmarks/faults.md; exits with
1 when anything did not hold.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from benchmarks.faults import captures, models, stores
from benchmarks.faults.outcome import MACHINE, Outcome

_KILLS = flags.DEFINE_integer("kills", 50, "kill -9 of launch.capture, and as many of a store's writer.")
_FLIPS = flags.DEFINE_integer("flips", 300, "Flipped bits.")
_DATE = flags.DEFINE_string("date", time.strftime("%Y-%m-%d"), "The date above the table.")
_TABLE = stores.ROOT / "benchmarks" / "faults.md"


def hostile_models(folder: Path, backend: str) -> Outcome:
    """Every case of benchmarks.faults.models in one process; held: refused by a message, without memory or code."""
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.faults.models", str(folder), backend]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=stores.ROOT, env=environment, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    held = sum(models.refused(result) for result in results)
    peak = max(result["bytes"] for result in results) / 2**20
    said = next(result["said"] for result in results if result["case"] == "an index to ../../etc/passwd")
    note = f"lm.backend={backend}; at most {peak:.0f} MB of memory, {max(r['seconds'] for r in results):.1f} s for one"
    said = said.replace(str(folder), "")
    return Outcome("a hostile model folder", len(results), held, time.monotonic() - started, said, note)


def outcomes(folder: Path) -> Iterator[Outcome]:
    lab = captures.Lab(folder)
    yield captures.kills(lab, _KILLS.value)
    yield stores.kill_writer(folder / "writer", _KILLS.value)
    yield captures.full_disk(lab)
    yield captures.no_room(lab)
    stores.capture(folder / "small")
    yield stores.lose_files(folder / "small")
    yield stores.flip_bits(folder / "small", _FLIPS.value)
    yield stores.hostile_files(folder / "small")
    yield stores.second_writer(folder / "second")
    yield captures.second_capture(lab)
    yield captures.not_finite(lab)
    yield captures.no_hub(lab, "closed")
    yield captures.no_hub(lab, "silent")
    for backend in ("jax", "torch"):
        (folder / backend).mkdir()
        yield hostile_models(folder / backend, backend)


def main(_: list[str]) -> int:
    lines = [
        "# What a capture survives",
        "",
        f"`python -m benchmarks.faults --kills={_KILLS.value} --flips={_FLIPS.value}`, {MACHINE}, {_DATE.value}.",
        "Held: the store is identical to an undisturbed one, or the fault is refused with a message that names it.",
        "",
        "| fault | tried | held | seconds | what the user sees |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes(Path(folder)):
            lines.append(outcome.row)
            print(outcome.row, flush=True)
            counts.update(tried=outcome.tried, held=outcome.held)
    _TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{counts['held']:,} of {counts['tried']:,} held; {_TABLE}")
    return int(counts["held"] != counts["tried"])


if __name__ == "__main__":
    app.run(main)
