"""What a run's rows of metrics say of memory, of utilisation, and of what the loop did (`train.monitor`)."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from saejax.report.curves import thin

OF_MONITOR = ("host/", "device/", "loop/")

# Series of each chart, by the name they have there, with what a value is multiplied by.
_MEMORY = {
    "host": "host/memory_bytes",
    "device": "device/memory_bytes",
    "device, most so far": "device/peak_memory_bytes",
}
_USE = {"CPUs": "host/cpu", "device": "device/utilisation"}
_MEGA = 1e-6

_LOOP = {
    "loop/data": "wait for data",
    "loop/step": "the step",
    "loop/metrics": "write metrics",
    "loop/validation": "validation",
    "loop/checkpoint": "checkpoints",
    "loop/other": "the loop itself",
}


def monitored(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The charts and the table of the page; None where no row says anything.

    Returns:
        {"memory", "use": {name: series}, "phases": rows with name, ms a step and share, "steps", "most": MB by name}
    """
    memory = {name: found for name, key in _MEMORY.items() if (found := _series(metrics, key, _MEGA))}
    use = {name: found for name, key in _USE.items() if (found := _series(metrics, key, 1.0))}
    phases, steps = _phases(metrics)
    if not memory and not use and not phases:
        return None
    most = {name: max(found["values"]) for name, found in memory.items()}
    return {"memory": memory, "use": use, "phases": phases, "steps": steps, "most": most}


def _series(metrics: Sequence[Mapping[str, Any]], key: str, factor: float) -> dict[str, Any] | None:
    known = [(row["step"], float(f"{row[key] * factor:.5g}")) for row in metrics if _number(row.get(key))]
    return thin(*(list(column) for column in zip(*known, strict=True))) if known else None


def _phases(metrics: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """(rows of the table, steps they are about): shares of the time between two rows, weighed by that time."""
    rows = [row for row in metrics if _number(row.get("time")) and all(_number(row.get(key)) for key in _LOOP)]
    seconds, steps = dict.fromkeys(_LOOP, 0.0), 0
    for before, after in itertools.pairwise(rows):
        passed = max(0.0, after["time"] - before["time"])
        steps += after["step"] - before["step"]
        for key in _LOOP:
            seconds[key] += passed * after[key]
    total = sum(seconds.values())
    if not steps or not total:
        return [], 0
    return [
        {"name": name, "ms": 1e3 * seconds[key] / steps, "share": seconds[key] / total} for key, name in _LOOP.items()
    ], steps


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
