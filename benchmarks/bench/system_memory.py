"""The widest TopK that trains within this machine's memory: ours and the peers'."""

import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.bench import training
from benchmarks.bench.frame import LeftOut, Result, Told
from benchmarks.bench.markdown import table
from benchmarks.bench.protocol import WorkerFailed, WorkerGone
from benchmarks.bench.rows import Row as TrainRow
from benchmarks.bench.system_rows import Row

ROWS = (Row("widest-topk", quick=False),)

_D_IN, _K, _BATCH = 768, 32, 1024
# The first width that is tried, doubled until it fails; then so many halvings of what is between. Close to the limit
# one try fails where the next does not: where threads put their heaps is chance.
_FIRST, _HALVINGS, _TRIES = 98_304, 2, 2
_SHARE = 0.8


def run(row: Row, told: Told) -> Result:
    """Two steps at each width, in a process that is given four fifths of the machine's memory."""
    del row
    if sys.platform != "linux":
        raise LeftOut("only Linux ends a process's memory where it is told to")
    limit = int(_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    data, _ = training.tokens(_row(_FIRST), told.folder)
    found = {}
    for name in ("saejax", *_row(_FIRST).peers) if told.peers else ("saejax",):
        peaks: dict[int, int | None] = {}

        def fits(width: int, name: str = name, peaks: dict[int, int | None] = peaks) -> bool:
            tries = (_peak(name, width, str(data), limit, told) for _ in range(_TRIES))
            peaks[width] = next((peak for peak in tries if peak is not None), None)
            return peaks[width] is not None

        width = widest(fits, _FIRST, _HALVINGS)
        found[name] = {"width": width, "peak": peaks.get(width), "tried": sorted(peaks)}
    return {"limit": limit, "found": found}


def _row(width: int) -> TrainRow:
    return TrainRow(f"topk-{width}", "topk", _D_IN, width, k=_K, batch=_BATCH)


def widest(fits: Callable[[int], bool], first: int, halvings: int) -> int:
    """The largest width found that fits, 0 for none: doubled from the first, then halved between it and what fails."""
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    for _ in range(halvings if low else 0):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _peak(name: str, width: int, data: str, limit: int, told: Told) -> int | None:
    """Bytes at the most in two steps, which make the moments too; None where they do not fit."""
    more: dict[str, Any] = {"steps": 2} if name == "saejax" else {"peer": name}
    with training.ours(told) if name == "saejax" else training.new_peer(name, told) as worker:
        worker.limit_memory(limit)
        try:
            worker.ask("prepare", row=_row(width).to_json(), data=data, lr=training.LR, **more)
            peak = int(worker.ask("run", steps=2)["peak"])
        except (WorkerFailed, WorkerGone) as why:
            print(f"  {width:,} does not fit: {why}", flush=True)
            return None
    print(f"  {name} {width:,}: {peak / 1e9:.1f} GB", flush=True)
    return peak


def lines(results: list[Result]) -> list[str]:
    rows = [
        [name, f"{of['width']:,}", "-" if of["peak"] is None else f"{of['peak'] / 1e9:.1f}"]
        for r in results
        for name, of in r["found"].items()
    ]
    limits = ", ".join(f"{r['limit'] / 1e9:.1f} GB" for r in results)
    return [
        f"widest-topk: TopK {_D_IN} -> F, k {_K}, batch {_BATCH:,}, in a process that may have {limits}",
        f"of private memory. F is doubled from {_FIRST:,} until two steps fail in {_TRIES} tries; what is between is",
        f"then halved {_HALVINGS} times.",
        "",
        *table(("", "widest F", "GB at the most"), rows),
    ]
