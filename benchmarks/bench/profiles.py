"""What a step is made of: one table of the rows that miss an aim, by the parts of the step.

    python -m benchmarks.bench.profiles [--rows=topk-6144,...]

Each row trains alone in this process, with saejax's defaults, under JAX's profiler (`saejax/training/trace.py` reads
it, as for `train.profile`). Writes profiles.md beside this file. The profiler slows a step, so compare shares.
"""

import argparse
import gc
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.bench import activations
from benchmarks.bench.ours import Training
from benchmarks.bench.rows import CPU_ROWS, Row, shape
from benchmarks.bench.training import LR
from saejax.core.host import keep_memory
from saejax.training.trace import COMPONENTS, newest_trace

PAGE = Path(__file__).with_name("profiles.md")
# Steps before the trace, and in it; batches of data. The first rows of a process were twice as slow after three steps
# as after other rows.
_WARM, _TRACED, _BATCHES = 12, 6, 4
_ROWS = (
    "topk-128-1024",
    "topk-3072",
    "topk-6144",
    "topk-6144-k128",
    "topk-6144-dead3072",
    "batchtopk-6144",
    "matryoshka-6144",
    "standard-6144",
    "topk-24576",
    "clt-1536x4",
)
_LARGEST = 4


def profile(row: Row, folder: Path) -> dict[str, Any]:
    """`by_component` of some steps of a row: milliseconds a step of each part, and the largest operations."""
    data = folder / f"{row.d_in}x{row.sites}-{row.batch}.npy"
    activations.make(data, _BATCHES * row.batch, row.d_in, row.sites)
    training = Training(row.to_json(), str(data), LR, _WARM + _TRACED)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0

    def steps(count: int) -> None:
        for _ in range(count):
            training.step(training.before())
            training.wait()

    steps(_WARM)
    with jax.profiler.trace(folder / row.name, profiler_options=options):
        steps(_TRACED)
    traced = newest_trace(folder / row.name, training.program.step, _TRACED)
    if traced is None:
        raise SystemExit(f"JAX's profiler wrote nothing of {row.name}.")
    return traced[1]


def page(profiles: dict[Row, dict[str, Any]]) -> str:
    """Markdown: parts by rows, then the largest operations of each row."""
    where = f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    text = (
        f"# What a step is made of\n\n`python -m benchmarks.bench.profiles`: {where}. Milliseconds a step under the\n"
    )
    text += "profiler, each row alone; idle is what the host does between two steps.\n\n"
    names = [row.name for row in profiles]
    text += f"| part | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
    parts = {row: {one["name"]: one["ms"] for one in found["components"]} for row, found in profiles.items()}
    idle = {row: sum(one["ms"] for one in found["idle"]) for row, found in profiles.items()}
    for part in COMPONENTS:
        if any(part in of for of in parts.values()):
            text += f"| {part} | {' | '.join(_ms(of.get(part)) for of in parts.values())} |\n"
    text += f"| idle | {' | '.join(_ms(ms) for ms in idle.values())} |\n"
    text += f"| **whole** | {' | '.join(_ms(found['step_ms']) for found in profiles.values())} |\n"
    text += f"\n| row | shape | the {_LARGEST} largest operations, ms |\n|---|---|---|\n"
    for row, found in profiles.items():
        largest = "; ".join(f"{one['component']}: {one['ms']:.1f}" for one in found["largest"][:_LARGEST])
        text += f"| {row.name} | {shape(row.to_json())} | {largest} |\n"
    return text


def _ms(value: float | None) -> str:
    return f"{value:.1f}" if value is not None and value >= 0.05 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(_ROWS), help="of benchmarks/bench/rows.py")
    given = parser.parse_args()
    there = {row.name: row for row in CPU_ROWS}
    if unknown := set(given.rows.split(",")) - set(there):
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    keep_memory()
    found: dict[Row, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in given.rows.split(","):
            found[there[name]] = profile(there[name], Path(folder))
            print(f"{name}: {found[there[name]]['step_ms']:.1f} ms", flush=True)
            gc.collect()
            PAGE.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
