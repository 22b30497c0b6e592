"""The section of selections alone: the largest of a batch's latents, ours and both frameworks' own."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.training import floor_workers, ours

NAME = "selection"
TITLE = "Selection alone"


@dataclasses.dataclass(frozen=True)
class Row:
    """k of each of `rows` x `width` latents."""

    name: str
    rows: int = 1024
    width: int = 49152
    k: int = 32
    quick: bool = True


def rows(told: Told) -> list[Row]:
    return [Row("selection" if told.backend == "cpu" else "gpu-selection")]


def run(row: Row, told: Told) -> Result:
    """Medians over the rounds; in each round everybody in turn."""
    shape = {"rows": row.rows, "width": row.width, "k": row.k, "calls": 3 if told.backend == "cpu" else 20}
    workers = [("saejax", ours(told)), *floor_workers(told)]
    seconds: dict[str, list[float]] = {}
    try:
        for _ in range(told.rounds):
            for _, worker in workers:
                for what, found in worker.ask("select", **shape)["seconds"].items():
                    seconds.setdefault(what, []).append(found)
    finally:
        for _, worker in workers:
            worker.close()
    medians = {what: statistics.median(found) for what, found in seconds.items()}
    for what, found in medians.items():
        print(f"  {what:<34}{1000 * found:9.1f} ms", flush=True)
    return {"about": dataclasses.asdict(row), "seconds": medians}


def figures(results: list[Result]) -> list[dict[str, Any]]:
    return [
        {"what": f"selection: {what}, ms", "row": r["row"], "value": 1000 * value, "aim": 2.0, "better": "less"}
        for r in results
        if "seconds" in r and r["row"].startswith("gpu-")
        for what, value in r["seconds"].items()
        if what.startswith("saejax")
    ]


def page(results: list[Result], folder: Path) -> list[str]:
    del folder
    lines: list[str] = []
    for r in results:
        if "seconds" not in r:
            continue
        a = r["about"]
        lines += [
            f"{r['row']}: [{a['rows']:,} x {a['width']:,}] rectified normal numbers, {a['k']} of a row: the row's own,",
            "or as many over the whole batch. The CLT report had 133 ms for torch.topk on a GPU.",
            "",
            *table(("", "ms"), [[what, f"{1000 * seconds:,.1f}"] for what, seconds in r["seconds"].items()]),
            "",
        ]
    return lines
