"""The best validation so far decides when a training stops early and which checkpoint stays.

Each is a whole memory, which every checkpoint carries.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from saejax.core.settings import Settings, setting

# The metrics that can be best, and what a better value is.
BETTER: dict[str, Callable[[float, float], bool]] = {
    "val/fve": operator.gt,
    "val/r2": operator.gt,
    "val/relative_error": operator.lt,
}


@dataclasses.dataclass(frozen=True)
class BestSettings(Settings, section="train"):
    """The choice of the best checkpoint."""

    keep_best: str = setting(
        "",
        "A validation that is the best so far by this metric is saved, and that checkpoint stays too "
        '(`saejax.load(run, step="best")`); empty keeps none for being best.',
        choices=BETTER,
        decides=False,
        needs=("heldout", "run"),
    )


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far.

    Attributes:
        metric: by which it is best; "" when nobody asks.
        value: of the metric.
        step: of the validation, and of the checkpoint taken then.
    """

    metric: str
    value: float | None = None
    step: int | None = None

    @classmethod
    def resumed(cls, metric: str, meta: Mapping[str, Any]) -> "Best":
        """From the setting and what the last checkpoint says; another metric begins anew."""
        memory = meta.get("best") or {}
        return cls(**memory) if metric and memory.get("metric") == metric else cls(metric)

    def after(self, step: int, metrics: Mapping[str, float]) -> "Best":
        """The memory after a validation; a value that is not finite is never the best."""
        if not self.metric:
            return self
        value = metrics[self.metric.removeprefix("val/")]
        if not math.isfinite(value) or (self.value is not None and not BETTER[self.metric](value, self.value)):
            return self
        return Best(self.metric, value, step)

    def to_meta(self) -> dict[str, Any]:
        """The memory, for a checkpoint."""
        return {"best": dataclasses.asdict(self)} if self.metric else {}


@dataclasses.dataclass(frozen=True)
class EarlySettings(Settings, section="train"):
    """The end of a training before its last step."""

    early_stop_patience: int = setting(
        0,
        "Stop when so many validations in a row did not raise val/fve; 0 never stops early.",
        low=0,
        needs=("heldout",),
    )
    early_stop_min_delta: float = setting(0.0, "A validation raises val/fve when it does so by more than this.", low=0)


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
    """Stops after `patience` validations in a row without val/fve above best + min_delta; patience 0 never stops.

    One that is not finite is never the best, and no improvement.

    Attributes:
        best: the highest val/fve so far, None before the first that is finite.
        waited: validations since then.
    """

    patience: int
    min_delta: float
    best: float | None = None
    waited: int = 0

    @classmethod
    def resumed(cls, config: EarlySettings, meta: Mapping[str, Any]) -> "EarlyStopping":
        """From the settings, and what the last checkpoint says."""
        return cls(config.early_stop_patience, config.early_stop_min_delta, **meta.get("early_stopping", {}))

    def after(self, metrics: Mapping[str, float]) -> "EarlyStopping":
        """The memory after a validation."""
        if not self.patience:
            return self
        fve = metrics["fve"]
        if math.isfinite(fve) and (self.best is None or fve > self.best + self.min_delta):
            return dataclasses.replace(self, best=fve, waited=0)
        return dataclasses.replace(self, waited=self.waited + 1)

    @property
    def stopped(self) -> bool:
        return bool(self.patience) and self.waited >= self.patience

    def to_meta(self) -> dict[str, Any]:
        """The memory, for a checkpoint."""
        return {"early_stopping": {"best": self.best, "waited": self.waited}, "stopped_early": self.stopped}
