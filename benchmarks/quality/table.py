"""What the lines say: figures at equal L0, intervals over documents and seeds, tables and pictures of a data set."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.quality.runs import TRAINERS, Row, at_target
from benchmarks.quality.sets import DataSet

RESAMPLES = 2000
# Of an L0 something is said where a training is as near, or the two around it are no further apart: ratios.
_NEAR, _APART = 1.5, 3.0
# In the order of TRAINERS.
NAMES = ("saejax", "SAELens", "dictionary_learning")
_COLOURS = ("#0072b2", "#d55e00", "#009e73")
_OF_SEEDS = ("dead", "mcc", "f1", "precision", "recall", "uniqueness", "absorption", "shrinkage")


@dataclasses.dataclass(frozen=True)
class Figures:
    """One trainer's dictionaries of a family, brought to one L0.

    Attributes:
        error: [seeds, groups]; variance: [groups]: sums over held-out rows.
        of_seeds: {name: [seeds]}.
    """

    error: np.ndarray
    variance: np.ndarray
    of_seeds: dict[str, np.ndarray]

    @property
    def share(self) -> float:
        return float(self.error.mean(0).sum() / self.variance.sum())

    @property
    def fve(self) -> float:
        return 1 - self.share

    def fves(self, seeds_RS: np.ndarray, groups_RG: np.ndarray) -> np.ndarray:
        """FVE of each resample of seeds and of groups, [R]."""
        error_RG = np.einsum("rs,sg->rg", seeds_RS, self.error) / seeds_RS.sum(1, keepdims=True)
        return 1 - (error_RG * groups_RG).sum(1) / (self.variance[None] * groups_RG).sum(1)


def figures_at(rows: Sequence[Row], variance_G: np.ndarray, l0: int) -> Figures | None:
    """From one trainer's rows of a family at one setting: between the two L0 next to `l0` along log L0, by seed.

    None where a seed has no trainings near that L0.
    """
    errors, others = [], []
    for seed in sorted({row["seed"] for row in rows}):
        points = sorted((row for row in rows if row["seed"] == seed), key=lambda row: row["l0"])
        if len(points) < 2:
            return None
        low, high, share = _around(points, l0)
        apart = high["l0"] / low["l0"]
        near = apart ** min(abs(share), abs(share - 1))
        if near > _NEAR and not (0 <= share <= 1 and apart <= _APART):
            return None
        errors.append((1 - share) * np.array(low["error"]) + share * np.array(high["error"]))
        # Shares and rates stay between the two.
        inside = min(max(share, 0.0), 1.0)
        names = [name for name in _OF_SEEDS if name in low]
        others.append({name: (1 - inside) * low[name] + inside * high[name] for name in names})
    if not errors:
        return None
    of_seeds = {name: np.array([one[name] for one in others]) for name in others[0]}
    return Figures(np.stack(errors), variance_G, of_seeds)


def _around(points: Sequence[Row], l0: int) -> tuple[Row, Row, float]:
    """The two rows next to `l0`, and how far it is from the first to the second along log L0; beyond the ends a
    little below 0 or above 1."""
    at = int(np.clip(np.searchsorted([row["l0"] for row in points], l0), 1, len(points) - 1))
    low, high = points[at - 1], points[at]
    return low, high, math.log(l0 / low["l0"]) / math.log(high["l0"] / low["l0"])


@dataclasses.dataclass(frozen=True)
class Cell:
    """A family at an L0: every trainer's figures."""

    family: str
    l0: int
    of: tuple[Figures | None, ...]


def difference(a: Figures | None, b: Figures | None, sign: int = 1) -> str:
    """FVE of a minus that of b with its 95 % interval over seeds and groups, drawn alike; bold where 0 is outside.

    With sign -1 of the share that is not explained.
    """
    if a is None or b is None or len(a.error) != len(b.error):
        return "-"
    random, n_groups, n_seeds = np.random.default_rng(0), a.error.shape[1], len(a.error)
    groups_RG = random.multinomial(n_groups, np.full(n_groups, 1 / n_groups), RESAMPLES)
    seeds_RS = random.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), RESAMPLES)
    drawn = sign * (a.fves(seeds_RS, groups_RG) - b.fves(seeds_RS, groups_RG))
    low, high = np.quantile(drawn, [0.025, 0.975])
    shown = f"{sign * (a.fve - b.fve):+.4f} [{low:+.4f}, {high:+.4f}]"
    return f"**{shown}**" if low > 0 or high < 0 else shown


def cells(data: DataSet, rows: Sequence[Row], variance_G: np.ndarray) -> Iterator[Cell]:
    """Every family and L0 of a data set that something is known of."""
    for family in data.families:
        mine = [row for row in rows if (row["set"], row["family"]) == (data.name, family)]
        chosen = [rows_of(mine, trainer) for trainer in TRAINERS]
        for l0 in data.l0s:
            found = tuple(figures_at(some, variance_G, l0) if some else None for some in chosen)
            if any(found):
                yield Cell(family, l0, found)


def rows_of(rows: Sequence[Row], trainer: str) -> list[Row]:
    """Of saejax the rows with its defaults; of a peer those of the setting that was run with the most seeds and L0."""
    mine = [row for row in rows if row["trainer"] == trainer]
    if trainer == "saejax":
        return [row for row in mine if row["lr"] is None]
    settings: dict[Any, list[Row]] = {}
    for row in mine:
        settings.setdefault((row["lr"], row["dead_share"]), []).append(row)
    return max(settings.values(), key=len, default=[])


def table(found: Sequence[Cell]) -> Iterator[str]:
    """Markdown: FVE at equal L0, differences with intervals, dead latents."""
    yield from _head("family", "L0", *NAMES, "- SAELens", "- dictionary_learning", "dead: saejax, SAELens, d_l")
    for cell in found:
        fve = [f"{f.fve:.4f}" if f else "-" for f in cell.of]
        against = [difference(cell.of[0], cell.of[other]) for other in (1, 2)]
        yield _line(cell.family, cell.l0, *fve, *against, _list(cell, "dead", ".1%"))


def score_table(found: Sequence[Cell], name: str) -> Iterator[str]:
    """Markdown: a score at equal L0, means over seeds, and differences with intervals over seeds."""
    yield from _head("family", "L0", *NAMES, "- SAELens", "- dictionary_learning")
    for cell in found:
        means = [f"{f.of_seeds[name].mean():.3f}" if f else "-" for f in cell.of]
        against = [_score_difference(cell.of[0], cell.of[other], name) for other in (1, 2)]
        yield _line(cell.family, cell.l0, *means, *against)


def loss_table(found: Sequence[Cell], recovered: bool) -> Iterator[str]:
    """Markdown: loss recovered at equal L0, else the KL divergence, and differences with intervals."""
    yield from _head("family", "L0", *NAMES, "- SAELens", "- dictionary_learning")
    for cell in found:
        values = [f"{f.fve if recovered else f.share:.4f}" if f else "-" for f in cell.of]
        against = [difference(cell.of[0], cell.of[other], 1 if recovered else -1) for other in (1, 2)]
        yield _line(cell.family, cell.l0, *values, *against)


def _score_difference(a: Figures | None, b: Figures | None, name: str) -> str:
    """The mean of a - b of each seed with its 95 % t interval; bold where 0 is outside."""
    if a is None or b is None or len(a.error) != len(b.error) or len(a.error) < 2:
        return "-"
    each = a.of_seeds[name] - b.of_seeds[name]
    mean, half = each.mean(), stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each))
    shown = f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"
    return f"**{shown}**" if abs(mean) > half else shown


def default_table(data: DataSet, rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: FVE of saejax's trainings at the middle L0 by the first seed, at each rate and with the defaults."""
    rates = [*data.rates, None]
    yield from _head("family", *("defaults" if lr is None else f"rate {lr:g}" for lr in rates), "defaults - best")
    for family in data.families:
        mine = [row for row in rows if (row["family"], row["trainer"], row["seed"]) == (family, "saejax", 0)]
        of_rate = [[row for row in mine if row["lr"] == lr] for lr in rates]
        if not all(of_rate):
            continue
        fve = [_at_middle(data, some, rows) for some in of_rate]
        yield _line(family, *(f"{value:.4f}" for value in fve), f"{fve[-1] - max(fve[:-1]):+.4f}")


def _at_middle(data: DataSet, some: Sequence[Row], rows: Sequence[Row]) -> float:
    """FVE at the middle L0, between the nearest trainings below and above it along log L0."""
    points = [(math.log(max(row["l0"], 1e-3) / data.l0s[1]), row) for row in some]
    sides = [[point for point in points if (point[0] > 0) == above] for above in (False, True)]
    if not all(sides):
        return at_target(min(points, key=lambda point: abs(point[0]))[1], list(rows))
    (x0, under), (x1, over) = (min(side, key=lambda point: abs(point[0])) for side in sides)
    return float(under["fve"] - x0 * (over["fve"] - under["fve"]) / (x1 - x0))


def _head(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield f"|{'---|' * len(names)}"


def _line(*values: Any) -> str:
    return f"| {' | '.join(map(str, values))} |"


def _list(cell: Cell, name: str, form: str) -> str:
    return ", ".join(format(f.of_seeds[name].mean(), form) if f and name in f.of_seeds else "-" for f in cell.of)


def picture(data: DataSet, found: Sequence[Cell], what: str = "fve") -> Figure:
    """FVE or a score over L0: one panel a family."""
    columns = len(data.families) // 2
    figure = Figure(figsize=(4 * columns, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, family in zip(figure.subplots(2, columns, sharex=True, sharey=True).flat, data.families, strict=True):
        mine = [cell for cell in found if cell.family == family]
        for i, (name, colour) in enumerate(zip(NAMES, _COLOURS, strict=True)):
            points = [(cell.l0, cell.of[i]) for cell in mine]
            known = [(l0, f.fve if what == "fve" else float(f.of_seeds[what].mean())) for l0, f in points if f]
            if known:
                axes.plot(*zip(*known, strict=True), marker="o", color=colour, label=name)
        axes.set(title=family, xscale="log")
        axes.set_xticks(data.l0s, [str(l0) for l0 in data.l0s])
        axes.minorticks_off()
        axes.grid(True, color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        if mine:
            axes.legend(frameon=False)
    figure.supxlabel("L0 on held-out rows (log scale)")
    figure.supylabel({"fve": "FVE: fraction of variance explained", "f1": "F1 of latents", "mcc": "MCC"}[what])
    figure.suptitle(data.title)
    return figure
