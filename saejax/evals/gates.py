"""Gates: what a run must reach before its latents are worth looking at, and what to change where it does not.

The six come from the reports this project grew from (RTX 6000 training analysis, computational specifications).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from saejax.core.settings import Settings, setting
from saejax.evals.changes import DECORRELATED, DENSER, FASTER, LONGER_WARMUP, NARROWER, SLOWER, SPARSER, Change


@dataclasses.dataclass(frozen=True)
class GateConfig(Settings, section="gates"):
    """The bars."""

    loss_rise: float = setting(
        0.01,
        "Largest rise of the mean loss from one fifth of training (after warm-up) to the next, relative.",
        low=0,
    )
    relative_error: float = setting(0.10, "sum ||x - x_hat||^2 / sum ||x||^2 on held-out text stays below.", low=0)
    zero_fraction: float = setting(0.85, "The share of latents that are zero stays above.", low=0)
    gram_rms: float = setting(0.3, "The decoder Gram matrix's off-diagonal RMS stays below.", low=0)
    r2: float = setting(0.7, "Validation R2 at r2_step stays above.", low=0)
    r2_step: int = setting(
        1000, "R2 is that of the first validation from this step on, or the last one.", low=0, high=math.inf
    )
    runtime: float = setting(
        0.2, "Relative deviation of the training time from the prediction after the first steps stays below.", low=0
    )
    retries: int = setting(
        0,
        "How often `saejax pipeline` may train again when a gate fails. Each time it changes what the gate names, and "
        "trains from the stored activations into runs/<name>/attempt-1, attempt-2. The best is kept. Sweeps are not "
        "tried again.",
        low=0,
        high=9,
    )


@dataclasses.dataclass(frozen=True)
class Gate:
    """One gate: `value` must be `comparison` `bar`. A gate that could not be measured has value None and fails."""

    name: str
    title: str
    value: float | None
    bar: float
    comparison: str
    advice: str

    @property
    def miss(self) -> float:
        """How far the value is beyond the bar, relative to the bar; 0 where it passed, infinite if not measured."""
        if self.passed:
            return 0.0
        if self.value is None or not np.isfinite(self.value):
            return math.inf
        return abs(self.value - self.bar) / max(abs(self.bar), 1e-12)

    @property
    def passed(self) -> bool:
        if self.value is None or not np.isfinite(self.value):
            return False
        return self.value < self.bar if self.comparison == "<" else self.value > self.bar

    def to_json(self) -> dict[str, Any]:
        measured = self.value is not None and bool(np.isfinite(self.value))
        return dataclasses.asdict(self) | {"value": self.value if measured else None, "passed": self.passed}

    @classmethod
    def from_json(cls, gate: dict[str, Any]) -> "Gate":
        """The gate that `to_json` wrote; `passed` follows from the rest. An infinite bar was written as null."""
        kept = {name: value for name, value in gate.items() if name != "passed"}
        return cls(**kept | {"bar": math.inf if gate["bar"] is None else gate["bar"]})


@dataclasses.dataclass(frozen=True)
class _Row:
    """What there is to know of a gate before it is measured.

    Attributes:
        bar: its key in `GateConfig`.
        measured: (bars, the evaluation's metrics, the training's rows) -> the value, or None.
        changes: what a retry changes when it fails, the first that can be made; none where no setting helps.
        of_training: whether it looks at the training's rows, and not at the evaluation.
    """

    name: str
    title: str
    measured: Callable[[GateConfig, Mapping[str, float], Sequence[dict[str, Any]]], float | None]
    bar: str
    comparison: str
    advice: str
    changes: tuple[Change, ...] = ()
    of_training: bool = False

    def gate(self, config: GateConfig, metrics: Mapping[str, float], rows: Sequence[dict[str, Any]]) -> Gate:
        title = self.title.format(config.r2_step)
        value, bar = self.measured(config, metrics, rows), getattr(config, self.bar)
        return Gate(self.name, title, value, bar, self.comparison, self.advice)


_ROWS = (
    _Row(
        "loss_falls",
        "Loss falls: largest rise between fifths of training",
        lambda config, metrics, rows: _largest_rise(rows),
        "loss_rise",
        "<",
        "Lower train.lr, or lengthen train.warmup_fraction.",
        (SLOWER, LONGER_WARMUP),
        of_training=True,
    ),
    _Row(
        "relative_error",
        "Relative reconstruction error on held-out text",
        lambda config, metrics, rows: metrics.get("relative_error"),
        "relative_error",
        "<",
        "Raise coder.k (or lower coder.l1_coefficient), widen coder.expansion, or train on more tokens.",
        (*DENSER, FASTER),
    ),
    _Row(
        "sparsity",
        "Latents that are zero",
        lambda config, metrics, rows: metrics.get("zero_fraction"),
        "zero_fraction",
        ">",
        "Lower coder.k, raise coder.l1_coefficient, or widen coder.expansion.",
        SPARSER,
    ),
    _Row(
        "decorrelation",
        "Decoder Gram off-diagonal RMS",
        lambda config, metrics, rows: metrics.get("gram_rms"),
        "gram_rms",
        "<",
        "Lower coder.expansion or train.lr, or raise coder.decorrelation_coefficient; many latents have learnt the "
        "same direction.",
        (NARROWER, DECORRELATED, SLOWER),
    ),
    _Row(
        "r2",
        "Validation R2 after {:,} steps",
        lambda config, metrics, rows: _r2_at(rows, config.r2_step),
        "r2",
        ">",
        "Raise coder.k or train.lr; validate with train.validate_every.",
        (*DENSER, FASTER),
        of_training=True,
    ),
    _Row(
        "runtime",
        "Training time against the prediction after the first steps",
        lambda config, metrics, rows: _runtime_deviation(rows),
        "runtime",
        "<",
        "Something slowed the machine or the reading of the store; look at train/tokens_per_second in the report.",
        of_training=True,
    ),
)

# The gates that look at the training's rows, and not at the evaluation.
OF_TRAINING = tuple(row.name for row in _ROWS if row.of_training)

# {gate: what a retry changes when it fails}, of those that a setting can help.
CHANGES = {row.name: row.changes for row in _ROWS if row.changes}


def check_gates(
    config: GateConfig, metrics: Mapping[str, float], rows: Sequence[dict[str, Any]] | None = None
) -> list[Gate]:
    """All gates, from the evaluation's metrics and the rows of metrics.jsonl; without rows all but `OF_TRAINING`."""
    judged = [row for row in _ROWS if rows is not None or not row.of_training]
    return [row.gate(config, metrics, rows or ()) for row in judged]


def _column(rows: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _largest_rise(rows: Sequence[dict[str, Any]]) -> float | None:
    """max over fifths of mean loss(i+1) / mean loss(i) - 1, without the first tenth of training."""
    loss = [value for _, value in _column(rows, "train/loss")]
    loss = loss[len(loss) // 10 :]
    if len(loss) < 10:
        return None
    means = [float(np.mean(part)) for part in np.array_split(loss, 5)]
    return max(after / max(before, 1e-300) - 1 for before, after in itertools.pairwise(means))


def _r2_at(rows: Sequence[dict[str, Any]], step: int) -> float | None:
    """Validation R2 at the first validation at or after `step`; of a shorter run, at its last."""
    values = _column(rows, "val/r2")
    return next((value for at, value in values if at >= step), values[-1][1] if values else None)


def _runtime_deviation(rows: Sequence[dict[str, Any]]) -> float | None:
    """|seconds / predicted seconds - 1|."""
    predicted, seconds = _column(rows, "time/predicted_seconds"), _column(rows, "time/seconds")
    return abs(seconds[-1][1] / predicted[-1][1] - 1) if predicted and seconds else None
