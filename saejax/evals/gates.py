"""Gates: the bars that a run must reach before its latents are worth looking at, and the changes where it does not.

They come from the reports this project grew from (RTX 6000 training analysis, computational specifications), and loss
recovered is added. A warning stands beside the gates and decides nothing.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from saejax.coders import SPARSITIES, CoderConfig
from saejax.coders.parts import TERMS
from saejax.core.settings import Settings, setting, settings_of


@dataclasses.dataclass(frozen=True)
class Change:
    """Each of `keys` that the run has, times `factor`, and not beyond `low` and `high`.

    Attributes:
        keys: "coder.k", "train.lr": they change together. What does nothing to a coder stays as it is.
        start: the value that a key gets which is 0 so far; None leaves it at 0.
    """

    keys: tuple[str, ...]
    factor: float
    low: float = 0.0
    high: float = math.inf
    start: float | None = None

    def of(self, coder: CoderConfig, values: Mapping[str, Any]) -> dict[str, float]:
        """{key: its new value}, of those that change; `values` has all keys, `coder` its preset's values."""
        changed = {}
        for key in self.keys:
            now = values[key]
            new = self.start if not now else min(max(now * self.factor, self.low), self.high)
            if new is None or not _used(coder, key):
                continue
            new = round(new) if isinstance(now, int) else float(f"{new:.6g}")
            # One that is beyond its bound already must not move the other way.
            if (new > now) == (self.factor > 1 or not now) and new != now and (new > 0 or not isinstance(now, int)):
                changed[key] = new
        return changed


def _used(coder: CoderConfig, key: str) -> bool:
    """True where a key does something: keys of sparsities and loss terms do where the coder has that part."""
    room, _, name = key.partition(".")
    if room != "coder":
        return True
    if any(name in settings_of(kind.settings) for kind in SPARSITIES.values()):
        return name in settings_of(SPARSITIES[coder.sparsity].settings)
    for term in TERMS.values():
        if name in settings_of(term.settings):
            return name == term.key() or bool(getattr(coder, term.key()))
    return name != "expansion" or not coder.d_sae


# Weights of penalties; a coder that is drawn to a number of latents changes the number.
_WEIGHTS = tuple(
    f"coder.{term.key()}"
    for term in TERMS.values()
    if term.is_sparsity_weight() and term.key() != "target_l0_coefficient"
)
_COUNTS = ("coder.k", "coder.target_l0")

DENSER = (Change(_COUNTS, 1.5), Change(_WEIGHTS, 0.5))
SPARSER = (Change(_COUNTS, 0.5, low=1), Change(_WEIGHTS, 2.0))
SLOWER = Change(("train.lr",), 0.5, low=1e-6)
FASTER = Change(("train.lr",), 2.0, high=1e-2)
LONGER_WARMUP = Change(("train.warmup_fraction",), 2.0, high=0.5, start=0.05)
NARROWER = Change(("coder.expansion", "coder.d_sae"), 0.5, low=1)
DECORRELATED = Change(("coder.decorrelation_coefficient",), 2.0, high=100.0, start=1.0)


@dataclasses.dataclass(frozen=True)
class GateConfig(Settings, section="gates"):
    """The bars."""

    loss_rise: float = setting(
        0.01, "Largest rise of the mean loss from one fifth of training (after warm-up) to the next, relative.", low=0
    )
    relative_error: float = setting(
        0.10, "sum ||x - x_hat||^2 / sum ||x - mean x||^2 on held-out text (1 - FVE) stays below.", low=0
    )
    loss_recovered: float = setting(
        0.9, "The share of the model's loss that the reconstruction recovers from zeros stays above.", low=0
    )
    zero_fraction: float = setting(0.85, "The share of latents that are zero stays above.", low=0)
    gram_rms: float = setting(0.3, "The decoder Gram matrix's off-diagonal RMS stays below.", low=0)
    r2: float = setting(0.7, "Validation R2 at r2_step stays above.", low=0)
    r2_step: int = setting(
        1000,
        "R2 is that of the first validation from this step on. A training that ends before it has not measured it.",
        low=0,
        high=math.inf,
    )
    runtime: float = setting(
        0.2,
        "No gate, but a warning, where the training took this much longer than its steps at their median pace, "
        "relative.",
        low=0,
    )
    retries: int = setting(
        0,
        "How often `saejax pipeline` may train again when a gate fails. Each time it changes what the gate names, and "
        "trains from the stored activations into runs/<name>/attempt-1, attempt-2. The best is kept. Sweeps are not "
        "tried again.",
        low=0,
        high=9,
    )


PASSED, FAILED, NOT_MEASURED = "passed", "failed", "not measured"


@dataclasses.dataclass(frozen=True)
class Gate:
    """One gate: `value` must be `comparison` `bar`. A value that is NaN or infinite fails.

    Attributes:
        unmeasured: what would measure it, where its value is None.
        asked: the experiment sets a bar of its own: where it could not be measured, the evaluation does not end well.
    """

    name: str
    title: str
    value: float | None
    bar: float
    comparison: str
    advice: str
    unmeasured: str = ""
    asked: bool = False

    @property
    def state(self) -> str:
        return PASSED if self.passed else NOT_MEASURED if self.unmeasured else FAILED

    @property
    def ends_well(self) -> bool:
        """An evaluation may end with 0: the gate passed, or could not be measured and was not asked for."""
        return self.passed or (bool(self.unmeasured) and not self.asked)

    @property
    def miss(self) -> float:
        """(distance of the value beyond the bar) / bar; 0 where it passed, infinite if not measured."""
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
        value = self.value if self.value is not None and np.isfinite(self.value) else None
        verdict = {"passed": self.passed, "state": self.state, "ends_well": self.ends_well}
        return dataclasses.asdict(self) | {"value": value} | verdict

    @classmethod
    def from_json(cls, gate: dict[str, Any]) -> "Gate":
        """The gate that `to_json` wrote; an infinite bar is null in a file."""
        fields = {field.name: gate[field.name] for field in dataclasses.fields(cls)}
        return cls(**fields | {"bar": math.inf if gate["bar"] is None else gate["bar"]})


@dataclasses.dataclass(frozen=True)
class _Row:
    """The definition of a gate.

    Attributes:
        bar: its key in `GateConfig`. also: other keys that ask for it.
        measured: (bars, the evaluation's metrics, the training's rows) -> the value, or what would measure it.
        changes: for a retry, the first that can be made; none where no setting helps.
        of_training: it looks at the training's rows, and not at the evaluation.
    """

    name: str
    title: str
    measured: Callable[[GateConfig, Mapping[str, float], Sequence[dict[str, Any]]], float | str]
    bar: str
    comparison: str
    advice: str
    changes: tuple[Change, ...] = ()
    of_training: bool = False
    also: tuple[str, ...] = ()

    def gate(self, config: GateConfig, metrics: Mapping[str, float], rows: Sequence[dict[str, Any]]) -> Gate:
        title = self.title.format(config.r2_step)
        result, bar = self.measured(config, metrics, rows), getattr(config, self.bar)
        value, unmeasured = (None, result) if isinstance(result, str) else (result, "")
        asked = any(getattr(config, key) != getattr(_USUAL, key) for key in (self.bar, *self.also))
        return Gate(self.name, title, value, bar, self.comparison, self.advice, unmeasured, asked)


_USUAL = GateConfig()


def _evaluated_metric(name: str, metrics: Mapping[str, float]) -> float | str:
    value = metrics.get(name)
    return f"An evaluation gives {name}: saejax evaluate." if value is None else value


_GATES = (
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
        "Reconstruction error on held-out text, relative to the variance (1 - FVE)",
        lambda config, metrics, rows: fve if isinstance(fve := _evaluated_metric("fve", metrics), str) else 1 - fve,
        "relative_error",
        "<",
        "Raise coder.k (or lower coder.l1_coefficient), widen coder.expansion, or train on more tokens.",
        (*DENSER, FASTER),
    ),
    _Row(
        "sparsity",
        "Latents that are zero",
        lambda config, metrics, rows: _evaluated_metric("zero_fraction", metrics),
        "zero_fraction",
        ">",
        "Lower coder.k, raise coder.l1_coefficient, or widen coder.expansion.",
        SPARSER,
    ),
    _Row(
        "decorrelation",
        "Decoder Gram off-diagonal RMS",
        lambda config, metrics, rows: _evaluated_metric("gram_rms", metrics),
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
        "Raise coder.k or train.lr.",
        (*DENSER, FASTER),
        of_training=True,
        also=("r2_step",),
    ),
    _Row(
        "loss_recovered",
        "Loss recovered on held-out text",
        lambda config, metrics, rows: _evaluated_metric("loss_recovered", metrics),
        "loss_recovered",
        ">",
        "Raise coder.k (or lower coder.l1_coefficient), widen coder.expansion, or train on more tokens.",
        (*DENSER, FASTER),
    ),
)

_WARNINGS = (
    _Row(
        "runtime",
        "Training time beyond that of its steps at their median pace",
        lambda config, metrics, rows: _slowed(rows),
        "runtime",
        "<",
        "Some steps were slower than most: other programs, or the reading of the store. Look at time and "
        "train/tokens_per_second in metrics.jsonl.",
        of_training=True,
    ),
)

# Gates that look at the training's rows, and not at the evaluation.
OF_TRAINING = tuple(row.name for row in _GATES if row.of_training)

# {gate: what a retry changes when it fails}, of those that a setting can help.
CHANGES = {row.name: row.changes for row in _GATES if row.changes}


def check_gates(
    config: GateConfig, metrics: Mapping[str, float], rows: Sequence[dict[str, Any]] | None = None
) -> list[Gate]:
    """All gates, from the evaluation's metrics and the rows of metrics.jsonl; without rows all but `OF_TRAINING`.

    Loss recovered is judged where the metrics have it: a coder may write where it does not touch the model's loss.
    """
    judged = [row for row in _GATES if rows is not None or not row.of_training]
    judged = [row for row in judged if row.name != "loss_recovered" or "loss_recovered" in metrics]
    # NaN is written as null.
    known = {name: math.nan if value is None else value for name, value in metrics.items()}
    return [row.gate(config, known, rows or ()) for row in judged]


def check_warnings(config: GateConfig, rows: Sequence[dict[str, Any]]) -> list[Gate]:
    """Warnings that were measured and are beyond their bars."""
    return [gate for row in _WARNINGS if (gate := row.gate(config, {}, rows)).state == FAILED]


def ends_well(gates: Iterable[Gate]) -> bool:
    """True where the evaluation that these gates judge ends with 0."""
    return all(gate.ends_well for gate in gates)


def _largest_rise(rows: Sequence[dict[str, Any]]) -> float | str:
    """max over fifths of mean loss(i+1) / mean loss(i) - 1, without the first tenth of training."""
    loss = [row["train/loss"] for row in rows if row.get("train/loss") is not None and not _has_second(row)]
    if not loss and any(map(_has_second, rows)):
        return "All steps have a second loss (train.through), for which the reconstruction may get worse."
    logged, loss = len(loss), loss[len(loss) // 10 :]
    if len(loss) < 10:
        return f"It needs 11 logged steps, and there are {logged}: lower train.log_every, or train longer."
    means = [float(np.mean(part)) for part in np.array_split(loss, 5)]
    return max(after / max(before, 1e-300) - 1 for before, after in itertools.pairwise(means))


def _has_second(row: Mapping[str, Any]) -> bool:
    """Logged with a second loss in the step."""
    return any(value is not None for key, value in row.items() if key.startswith("train/through_"))


def _r2_at(rows: Sequence[dict[str, Any]], step: int) -> float | str:
    """Validation R2 at the first validation at or after `step`."""
    validated = [(row["step"], row["val/r2"]) for row in rows if "val/r2" in row]
    if not validated:
        return "Nothing was validated: it needs held-out activations and train.validate_every."
    last = validated[-1][0]
    if last < step:
        return f"The last validation was after {last:,} steps: train longer, or lower gates.r2_step."
    return next((value for at, value in validated if at >= step and value is not None), math.nan)


def _slowed(rows: Sequence[dict[str, Any]]) -> float | str:
    """Seconds between the logged steps / what they would be at the median pace - 1.

    Steps between which something was validated, and those with a second loss, have medians of their own.
    """
    logged = [row for row in rows if "train/loss" in row and row.get("time") is not None]
    times = [(row["step"], row["time"], _has_second(row)) for row in logged]
    validated = np.array([row["step"] for row in rows if "val/r2" in row])
    between = collections.defaultdict[tuple[bool, bool], list[tuple[int, float]]](list)
    for (before, start, _), (after, end, second) in itertools.pairwise(times):
        kind = bool(((validated > before) & (validated <= after)).any()), second
        between[kind].append((after - before, end - start))
    if len(times) < 11:
        return f"It needs 11 logged steps, and there are {len(times)}: lower train.log_every, or train longer."
    seconds = sum(taken for spans in between.values() for _, taken in spans)
    paces = {kind: float(np.median([taken / steps for steps, taken in spans])) for kind, spans in between.items()}
    usual = sum(paces[kind] * steps for kind, spans in between.items() for steps, _ in spans)
    return seconds / max(usual, 1e-9) - 1
