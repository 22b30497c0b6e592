"""Curves of a run's rows of metrics: the quantities, and what `train.monitor` says of memory, use and the loop."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

CURVE_POINTS = 1500


def thin(steps: Sequence[int], values: Sequence[float | None]) -> dict[str, Any]:
    """At most about `CURVE_POINTS` points: of each bucket the lowest, the highest and the first NaN.

    A plain stride would hide spikes, which are what one looks for; the first and the last point stay.
    """
    n = len(steps)
    keep = list(range(n))
    if n > CURVE_POINTS:
        chosen = {0, n - 1}
        buckets = CURVE_POINTS // 3
        for bucket in range(buckets):
            places = range(bucket * n // buckets, (bucket + 1) * n // buckets)
            known = [(value, i) for i in places if (value := values[i]) is not None]
            chosen.update(next(([i] for i in places if values[i] is None), []))
            if known:
                chosen.update((min(known)[1], max(known)[1]))
        keep = sorted(chosen)
    return {"steps": [steps[i] for i in keep], "values": [values[i] for i in keep], "logged": n}


_NOT_CURVES = ("step", "tokens", "time")
# Rows of time and of the end of a training are no curves, and those of `train.monitor` have charts of their own.
_OF_OTHERS = ("time/", "after/", "host/", "device/", "loop/")

# Series of each chart, by the name they have there, with what a value is multiplied by.
_MEMORY = {
    "host": "host/memory_bytes",
    "device": "device/memory_bytes",
    "device, most so far": "device/peak_memory_bytes",
}
_USE = {"CPUs": "host/cpu", "device": "device/utilisation"}

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
    memory = {name: series for name, key in _MEMORY.items() if (series := _series(metrics, key, 1e-6))}
    use = {name: series for name, key in _USE.items() if (series := _series(metrics, key, 1.0))}
    phases, steps = _phases(metrics)
    if not memory and not use and not phases:
        return None
    most = {name: max(series["values"]) for name, series in memory.items()}
    return {"memory": memory, "use": use, "phases": phases, "steps": steps, "most": most}


def _phases(metrics: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """(rows of the table, steps they are about): shares of the time between two rows, weighed by that time."""
    rows = [row for row in metrics if _is_finite(row.get("time")) and all(_is_finite(row.get(key)) for key in _LOOP)]
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


def curves_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """{quantity: its points} of all that was logged by step; NaN and infinities, which are null there, are gaps."""
    curves: dict[str, tuple[list[int], list[float | None]]] = {}
    for row in metrics:
        for key, value in row.items():
            if key not in _NOT_CURVES and not key.startswith(_OF_OTHERS) and (value is None or is_number(value)):
                steps, values = curves.setdefault(key, ([], []))
                steps.append(row["step"])
                values.append(float(f"{value:.6g}") if is_number(value) and math.isfinite(value) else None)
    return {key: thin(*points) for key, points in curves.items()}


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _series(metrics: Sequence[Mapping[str, Any]], key: str, factor: float) -> dict[str, Any] | None:
    known = [(row["step"], float(f"{row[key] * factor:.5g}")) for row in metrics if _is_finite(row.get(key))]
    return thin(*(list(column) for column in zip(*known, strict=True))) if known else None


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)
