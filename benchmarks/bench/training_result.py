"""What the result of a row of train steps says: medians, quotients, growth. From the JSON alone."""

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.bench.frame import Result

PEERS = {"saelens": "SAELens", "dictionary_learning": "dictionary_learning"}
AXES = {"d_sae": "width", "batch": "batch", "k": "k"}


def done(results: list[Result]) -> list[Result]:
    return [r for r in results if "contestants" in r]


def seconds(result: Result, name: str = "saejax") -> float | None:
    """The median of a contestant's steps; None where it has none."""
    return result["contestants"].get(name, {}).get("median")


def faster_peer(result: Result) -> str | None:
    there = [name for name in PEERS if seconds(result, name) is not None]
    return min(there, key=lambda name: seconds(result, name) or math.inf, default=None)


def over_peer(result: Result) -> float | None:
    """Seconds of the faster peer over ours."""
    peer = faster_peer(result)
    return None if peer is None else quotient(result, peer, "saejax")


def over_beside(result: Result) -> float | None:
    """Our seconds over those of the row that ran beside it."""
    beside = f"saejax {result['about']['beside']}"
    return None if seconds(result, beside) is None else quotient(result, "saejax", beside)


def quotient(result: Result, above: str, below: str) -> float:
    return (seconds(result, above) or math.nan) / (seconds(result, below) or math.nan)


def by_round(result: Result, above: str, below: str) -> list[float]:
    """The quotient of the medians of each round: how far a busy machine moves it."""
    rounds = zip(*(result["contestants"][name]["seconds"] for name in (above, below)), strict=True)
    return [statistics.median(a) / statistics.median(b) for a, b in rounds]


def share_of_floor(result: Result) -> float:
    """(products + Adam's pass over the weights) / our step."""
    return (result["floor"]["products"] + result["floor"]["adam"]) / (seconds(result) or math.nan)


def busy(said: dict[str, Any]) -> float:
    return (said["user"] + said["system"]) / said["real"]


def in_kernel(said: dict[str, Any]) -> float:
    return said["system"] / (said["user"] + said["system"])


def lines_of(result: Result) -> Iterator[str]:
    """What the console says of a row."""
    for name, said in result["contestants"].items():
        if "failed" not in said:
            yield (
                f"{name:<34}{1000 * said['median']:9.1f} ms   FVE {said['fve']:.4f}   L0 {said['l0']:.1f}   "
                f"{said['peak'] / 1e9:.1f} GB   {busy(said):.2f} cores busy, {in_kernel(said):.0%} of it in the kernel"
            )
    if (ratio := over_peer(result)) is not None:
        yield f"{ratio:.2f} times the faster peer; {share_of_floor(result):.0%} of the floor"
    if (ratio := over_beside(result)) is not None:
        yield f"{ratio:.2f} times the time of {result['about']['beside']}"


def rate(result: Result) -> float:
    return result["about"]["batch"] / (seconds(result) or math.nan)


def late_over_early(rows: list[Result]) -> tuple[str, float | None]:
    """Of the row with the most steps: the second half of its rounds over the first."""
    if not rows:
        return "", None
    most = max(rows, key=lambda r: r["tokens"] / r["about"]["batch"])
    rounds = [statistics.median(turn) for turn in most["contestants"]["saejax"]["seconds"]]
    half = len(rounds) // 2
    return most["row"], statistics.median(rounds[-half:]) / statistics.median(rounds[:half]) if half else None


def chain(rows: list[Result], axis: str, preset: str = "topk") -> list[Result]:
    """Rows of a preset that differ in `axis` alone, rising along it; the longest such list."""
    same = ("d_in", "sites", "dead", *(one for one in AXES if one != axis))
    lists: dict[tuple[Any, ...], dict[int, Result]] = {}
    for r in rows:
        if r["about"]["preset"] == preset and not r["about"]["dead"] and seconds(r) is not None:
            about = r["about"]
            lists.setdefault(tuple(about[key] for key in same), {}).setdefault(about[axis], r)
    longest = max(lists.values(), key=len, default={})
    return [longest[at] for at in sorted(longest)]


def neighbours(rows: list[Result]) -> Iterator[tuple[str, Result, Result]]:
    """(axis, smaller, larger) along each axis, of topk and of batchtopk."""
    for axis in AXES:
        for preset in ("topk", "batchtopk"):
            found = chain(rows, axis, preset)
            for before, after in itertools.pairwise(found):
                yield axis, before, after


def for_a_doubling(axis: str, before: Result, after: Result) -> float:
    """By how much the time grows where the axis doubles, between two rows that may be further apart."""
    doublings = math.log2(after["about"][axis] / before["about"][axis])
    return ((seconds(after) or math.nan) / (seconds(before) or math.nan)) ** (1 / doublings)
