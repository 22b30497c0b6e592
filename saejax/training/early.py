"""Early stopping: its whole memory, which every checkpoint carries."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class EarlySettings(Settings, section="train"):
    """When training stops before its end."""

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
        memory = dict(meta.get("early_stopping", {}))
        # Checkpoints of before may hold a NaN.
        if memory.get("best") is not None and not math.isfinite(memory["best"]):
            memory["best"] = None
        return cls(config.early_stop_patience, config.early_stop_min_delta, **memory)

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
        """What a checkpoint must say."""
        return {"early_stopping": {"best": self.best, "waited": self.waited}, "stopped_early": self.stopped}
