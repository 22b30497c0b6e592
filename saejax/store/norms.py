"""The lengths of a store's rows: whether a few of them decide a mean squared error by themselves."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.store.batches import RowSource
from saejax.store.reader import StoreReader

# Rows looked at: the first of a store, which its shards have shuffled; fewer where they are wide or many.
_MOST, _LEAST, _NUMBERS = 8192, 512, 2**24
# A row is long beyond so many medians. Long rows decide where they hold so much of the variance.
LONG, _MUCH = 5.0, 0.25
# What to do about them; each is given largest / median.
_CAPTURE_AGAIN = "Set capture.max_norm_ratio below {:.3g} and capture again."
_LEAVE_OUT = "Leave out rows that are so long; the longest is {:.3g} medians."


@dataclasses.dataclass(frozen=True)
class Norms:
    """Of n rows of a hook point.

    Attributes:
        median, largest: of ||x||.
        long: the share of the rows for which ||x|| > `LONG` * median; 0 where the median is 0.
        share: sum ||x - mean x||^2 over the long rows / that sum over all.
        positions: {"0", "1", "2 to 3", "4 to 7", ...: median ||x|| there / median}, of positions that are stored.
    """

    n: int
    median: float
    largest: float
    long: float
    share: float
    positions: dict[str, float]

    @property
    def few_decide(self) -> bool:
        return self.share > _MUCH

    @property
    def ratio(self) -> float:
        """largest / median."""
        return self.largest / self.median if self.median else 0.0


def norms(rows: RowSource, hook_point: str) -> Norms:
    """Raises DataError where a store is damaged. Positions are those of a store."""
    room = _NUMBERS // sum(rows.hook_points.values())
    n = min(rows.n_tokens, max(_LEAST, min(_MOST, room)))
    x_BD = rows.only([hook_point]).rows(0, n)[hook_point].astype(np.float32)
    position_B = rows.array_rows("position", 0, n) if isinstance(rows, StoreReader) else np.zeros(0, np.int32)
    norm_B = np.linalg.norm(x_BD, axis=1)
    away_B = np.square(x_BD - x_BD.mean(0, dtype=np.float64)).sum(1)
    median = float(np.median(norm_B))
    long_B = (norm_B > LONG * median) & (median > 0)
    share = float(away_B[long_B].sum() / max(away_B.sum(), 1e-300))
    by_position = {label: float(np.median(norm_B[inside])) for label, inside in _by_position(position_B)}
    positions = {label: value / median for label, value in by_position.items()} if median else {}
    return Norms(n, median, float(norm_B.max()), float(long_B.mean()), share, positions)


def _by_position(position_B: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(label, the rows there) by powers of two; groups without a row are left out."""
    low, high = 0, 1
    while low <= position_B.max(initial=-1):
        inside = (position_B >= low) & (position_B < high)
        if inside.any():
            yield str(low) if high == low + 1 else f"{low} to {high - 1}", inside
        low, high = high, 2 * high


def norm_lines(reader: StoreReader) -> list[str]:
    """A line for each hook point; one that says why, where rows cannot be read."""
    try:
        every = {name: norms(reader, name) for name in reader.hook_points}
    except DataError as error:
        return [f"  norms: not known. {error}"]
    lines = []
    for name, of in every.items():
        where = ", ".join(f"{ratio:.3g} at {label}" for label, ratio in of.positions.items())
        lines.append(
            f"  norms at {name}, {of.n:,} rows: median {of.median:.4g}, largest {of.largest:.4g}; {of.long:.2%} of the "
            f"rows, longer than {LONG:g} medians, hold {of.share:.1%} of the variance"
            + (f"; by position, in medians: {where}" if where else "")
        )
    return lines


def sink_lines(path: str | os.PathLike[str]) -> list[str]:
    """Lines for a terminal: how many sinks the capture of a complete store left out, and a warning of those in it."""
    reader = StoreReader.open(path)
    of = store_norms(reader, tuple(reader.hook_points))
    lines = []
    first, massive = (of["left_out"] or {}).values() or (0, 0)
    if first or massive:
        lines.append(f"  left out as sinks: {first:,} tokens that stand first, {massive:,} with a massive activation")
    return lines + [f"  warning: {warning}" for warning in of["warnings"]]


def store_norms(reader: StoreReader, hook_points: Sequence[str]) -> dict[str, Any]:
    """The lengths of a complete store's rows as a page and the end of a capture show them, as JSON.

    {"rows", "beyond": `LONG`, "left_out": {"first", "massive"} or None where no capture counted them,
    "hook_points": {name: `Norms` and mean_over_spread}, "warnings": those of `few_rows`}.

    Raises:
        DataError: the store is damaged.
    """
    every = {name: norms(reader, name) for name in hook_points}
    counted = {key: reader.counters.get(f"dropped_{key}") for key in ("first", "massive")}
    return {
        "rows": reader.n_tokens,
        "beyond": LONG,
        "left_out": None if None in counted.values() else counted,
        "hook_points": {
            name: dataclasses.asdict(of) | {"mean_over_spread": reader.statistics[name].mean_over_spread}
            for name, of in every.items()
        },
        "warnings": _warnings(every, _LEAVE_OUT if "imported" in reader.identity else _CAPTURE_AGAIN),
    }


def few_rows(rows: RowSource, hook_points: Sequence[str]) -> list[str]:
    """A warning for each hook point of others' activations where long rows hold the variance."""
    return _warnings({name: norms(rows, name) for name in hook_points}, _LEAVE_OUT)


def _warnings(every: Mapping[str, Norms], remedy: str) -> list[str]:
    return [
        f"{of.long:.2%} of the rows hold {of.share:.0%} of the variance at {name} (norms to {of.largest:.4g}, the "
        f"median is {of.median:.4g}): a coder will learn those first. " + remedy.format(of.ratio)
        for name, of in every.items()
        if of.few_decide
    ]
