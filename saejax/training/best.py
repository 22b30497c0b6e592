"""The checkpoint that did best on held-out activations, which stays however many come after it."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from saejax.core.settings import Settings, setting

# Which metrics can be best, and what a better value is.
BETTER: dict[str, Callable[[float, float], bool]] = {
    "val/fve": operator.gt,
    "val/r2": operator.gt,
    "val/relative_error": operator.lt,
}


@dataclasses.dataclass(frozen=True)
class BestSettings(Settings, section="train"):
    """Which checkpoint is the best."""

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
    """The best validation so far: its whole memory, which every checkpoint carries.

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
        found = cls(**memory) if metric and memory.get("metric") == metric else cls(metric)
        # Checkpoints of before may hold an infinity.
        return found if found.value is None or math.isfinite(found.value) else cls(metric)

    def after(self, step: int, metrics: Mapping[str, float]) -> "Best":
        """The memory after a validation; a value that is not finite is never the best."""
        if not self.metric:
            return self
        value = metrics[self.metric.removeprefix("val/")]
        if not math.isfinite(value) or (self.value is not None and not BETTER[self.metric](value, self.value)):
            return self
        return Best(self.metric, value, step)

    def to_meta(self) -> dict[str, Any]:
        """What a checkpoint must say."""
        return {"best": dataclasses.asdict(self)} if self.metric else {}
