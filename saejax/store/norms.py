"""The lengths of a store's rows: whether a few of them decide a mean squared error by themselves."""

import dataclasses
import os
from collections.abc import Iterator, Sequence

import numpy as np

from saejax.store.batches import RowSource
from saejax.store.reader import StoreReader

# Rows looked at: the first of a store, which its shards have shuffled.
_ROWS = 8192
# The largest of a thousand; they are "few" where they hold this much of the variance.
_FEW, _MUCH = 1000, 0.25


@dataclasses.dataclass(frozen=True)
class Norms:
    """Of the first rows of a hook point, n of them.

    Attributes:
        median, largest: of ||x||.
        share: sum ||x - mean x||^2 over the largest thousandth of the rows (one at least) / that sum over all.
        positions: {"0", "1", "2 to 3", "4 to 7", ...: median ||x|| there / median}, of positions that are stored.
    """

    n: int
    median: float
    largest: float
    share: float
    positions: dict[str, float]

    @property
    def few_decide(self) -> bool:
        return self.share > _MUCH


def norms(rows: RowSource, hook_point: str) -> Norms:
    """Raises DataError where a store is damaged. Positions are those of a store."""
    n = min(rows.n_tokens, _ROWS)
    x_BD = rows.only([hook_point]).rows(0, n)[hook_point].astype(np.float64)
    position_B = rows.array_rows("position", 0, n) if isinstance(rows, StoreReader) else np.zeros(0, np.int32)
    norm_B = np.linalg.norm(x_BD, axis=1)
    away_B = np.square(x_BD - x_BD.mean(0)).sum(1)
    largest = np.argsort(norm_B)[-max(1, n // _FEW) :]
    median = float(np.median(norm_B))
    return Norms(
        n,
        median,
        float(norm_B.max()),
        float(away_B[largest].sum() / max(away_B.sum(), 1e-300)),
        {label: float(np.median(norm_B[inside])) / max(median, 1e-300) for label, inside in _by_position(position_B)},
    )


def _by_position(position_B: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(label, the rows there) by powers of two; groups without a row are left out."""
    low, high = 0, 1
    while low <= position_B.max(initial=-1):
        inside = (position_B >= low) & (position_B < high)
        if inside.any():
            yield str(low) if high == low + 1 else f"{low} to {high - 1}", inside
        low, high = high, 2 * high


def norm_lines(reader: StoreReader) -> list[str]:
    """A line for each hook point."""
    lines = []
    for name in reader.hook_points:
        of = norms(reader, name)
        where = ", ".join(f"{ratio:.3g} at {label}" for label, ratio in of.positions.items())
        lines.append(
            f"  norms at {name}: median {of.median:.4g}, largest {of.largest:.4g}; the largest thousandth of "
            f"{of.n:,} rows holds {of.share:.1%} of the variance; by position, times the median: {where}"
        )
    return lines


def sink_lines(path: str | os.PathLike[str]) -> list[str]:
    """Lines for a terminal: how many sinks the capture of a complete store left out, and a warning of those in it."""
    reader = StoreReader.open(path)
    lines = []
    first, massive = (reader.counters.get(name, 0) for name in ("dropped_first", "dropped_massive"))
    if first or massive:
        lines.append(f"  left out as sinks: {first:,} tokens that stand first, {massive:,} with a massive activation")
    remedy = "Lower capture.max_norm_ratio below {:.3g} and capture again."
    return lines + [f"  warning: {warning}" for warning in few_rows(reader, tuple(reader.hook_points), remedy)]


def few_rows(rows: RowSource, hook_points: Sequence[str], remedy: str) -> list[str]:
    """A warning for each hook point where a few rows hold the variance; `remedy` is given largest / median."""
    every = {name: norms(rows, name) for name in hook_points}
    return [
        f"a thousandth of the rows holds {of.share:.0%} of the variance at {name} (norms to {of.largest:.4g}, the "
        f"median is {of.median:.4g}): a coder will learn those alone. "
        + remedy.format(of.largest / max(of.median, 1e-300))
        for name, of in every.items()
        if of.few_decide
    ]
