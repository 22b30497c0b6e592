"""What the steps of a training wait for: data, the device's copy of it, checkpoints (benchmarks/waits.py)."""

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.system_rows import Row, ours

ROWS = (Row("waits-topk"),)

_SHAPE = {"d_in": 384, "d_sae": 3072, "k": 32, "batch": 2048}


def run(row: Row, told: Told) -> Result:
    """Shares of the time between the first step and the last."""
    steps = 30 if told.quick else 120
    with ours(told) as worker:
        found = worker.ask("waits", **_SHAPE, steps=steps, checkpoint_every=steps // 3)
    waited = found["data"] + found["put"] + found["checkpoints"]
    figure = {"what": "a step waits for data and checkpoints, share", "value": waited, "aim": 0.03, "better": "less"}
    return {"steps": steps, "found": found, "figures": [figure]}


def lines(results: list[Result]) -> list[str]:
    heading = ("", "seconds", "data", "copy to the device", "checkpoints", "main thread", "ms of the longest save")
    rows = [
        [
            r["row"],
            f"{r['found']['seconds']:.1f}",
            *(f"{r['found'][name]:.1%}" for name in ("data", "put", "checkpoints", "main thread")),
            f"{1000 * r['found']['save']:.0f}",
        ]
        for r in results
    ]
    return [
        f"waits-*: a training of {_SHAPE['d_in']} -> {_SHAPE['d_sae']:,} from a store, with three checkpoints. Main",
        "thread: all that the loop does on the host, metrics with it; meanwhile the device does the step before.",
        "",
        *table(heading, rows),
    ]
