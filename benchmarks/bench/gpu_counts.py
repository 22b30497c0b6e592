"""The section of what a GPU's rows would do, where there is none: XLA's counts of their programs beside the floor's."""

import sys
from pathlib import Path

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import number, table
from benchmarks.bench.protocol import Worker
from benchmarks.bench.rows import GPU_ROWS, Row, shape
from benchmarks.bench.training import environment

NAME = "gpu-counts"
TITLE = "On a GPU: not measured"


def rows(told: Told) -> list[Row]:
    """Those of a GPU, where there is none; --quick leaves them to the whole run."""
    return [] if told.backend != "cpu" else [row.as_count() for row in GPU_ROWS]


def run(row: Row, told: Told) -> Result:
    command = [sys.executable, "-m", "benchmarks.bench.ours"]
    with Worker("saejax", command, environment=environment(told)) as worker:
        found = worker.ask("count", row=row.to_json())
    print(f"  {found['flops'] / 1e9:,.0f} GFLOP, {found['bytes'] / 1e9:,.1f} GB a step", flush=True)
    return {"about": row.to_json(), "floor": {"flops": row.flops, "bytes": row.adam_bytes}, **found}


def page(results: list[Result], folder: Path) -> list[str]:
    del folder
    if not results:
        return []
    lines = [
        [
            r["row"].removeprefix("count-"),
            shape(r["about"]),
            *(number(value, 1e9) for value in (r["flops"], r["floor"]["flops"], r["bytes"], r["floor"]["bytes"])),
            number(r["memory"], 1e9),
            "not measured",
            r["about"]["published"] or "-",
        ]
        for r in results
    ]
    return [
        "This machine has no GPU. The same command measures these rows on one. Their programs were compiled here, for",
        "this machine's CPU, and not run: FLOPs, bytes and memory by XLA.",
        "",
        *table(("row", "shape", "GFLOP by XLA", "of the floor", "GB by XLA", "of the floor", "memory, GB", "here",
                "published"), lines),
    ]  # fmt: skip
