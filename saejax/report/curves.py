"""Curves of a report: as many points as a page can draw."""

from collections.abc import Sequence
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
