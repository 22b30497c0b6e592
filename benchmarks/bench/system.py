"""The section of what surrounds the train step: from capture and store to start-up, sweeps, busy cores and memory.

Each part is a module with ROWS, `run(row, told)` and `lines(results)`. None imports JAX: workers and commands do.
"""

from pathlib import Path

from benchmarks.bench import (
    system_busy,
    system_capture,
    system_checkpoint,
    system_door,
    system_memory,
    system_pipeline,
    system_start,
    system_store,
    system_sweep,
    system_waits,
)
from benchmarks.bench.frame import Result, Told
from benchmarks.bench.system_rows import Row

NAME = "system"
TITLE = "Around the step"

_PARTS = (
    system_capture,
    system_store,
    system_checkpoint,
    system_start,
    system_door,
    system_sweep,
    system_pipeline,
    system_busy,
    system_waits,
    system_memory,
)
# What a CPU alone has: an accelerator's training leaves the cores idle, and its memory is another.
_OF_CPUS = (system_busy, system_memory)


def rows(told: Told) -> list[Row]:
    parts = [part for part in _PARTS if told.backend == "cpu" or part not in _OF_CPUS]
    return [row for part in parts for row in part.ROWS]


def run(row: Row, told: Told) -> Result:
    print(f"  python -m benchmarks.bench --rows={row.name}{' --quick' if told.quick else ''}", flush=True)
    (part,) = (part for part in _PARTS if row in part.ROWS)
    result = part.run(row, told)
    for line in part.lines([{"row": row.name, **result}]):
        print(f"  {line}", flush=True)
    return result


def page(results: list[Result], folder: Path) -> list[str]:
    del folder
    found: list[str] = []
    for part in _PARTS:
        names = [row.name for row in part.ROWS]
        if own := [r for r in results if r["row"] in names]:
            found += [*part.lines(own), ""]
    return found[:-1]
