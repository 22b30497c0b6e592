"""What the loop remembers of a coder that it trains, beside its state; every checkpoint carries it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from saejax.training.best import Best
from saejax.training.config import TrainConfig
from saejax.training.early import EarlyStopping
from saejax.training.guard import Skipped


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one member.

    Attributes:
        failed: the step at which it was given up, because it did not stay finite; None where it was not.
        stopped: the step at which it stopped early; None where it did not.
    """

    early: EarlyStopping
    skipped: Skipped
    best: Best
    failed: int | None = None
    stopped: int | None = None

    @classmethod
    def resumed(cls, config: TrainConfig, meta: Mapping[str, Any]) -> "Memory":
        """From the settings, and what the last checkpoint says."""
        early = EarlyStopping.resumed(config, meta)
        best = Best.resumed(config.keep_best, meta)
        stopped = meta.get("stopped", meta.get("step") if early.stopped else None)
        return cls(early, Skipped.resumed(meta), best, meta.get("failed"), stopped)

    @property
    def going(self) -> bool:
        """Whether it still trains."""
        return self.failed is None and self.stopped is None

    def validated(self, step: int, metrics: Mapping[str, float]) -> "Memory":
        """The memory after a validation."""
        early = self.early.after(metrics)
        best = self.best.after(step, metrics)
        return dataclasses.replace(self, early=early, best=best, stopped=step if early.stopped else None)

    def to_meta(self) -> dict[str, Any]:
        """What a checkpoint must say."""
        ends = {"failed": self.failed, "stopped": self.stopped}
        known = {name: step for name, step in ends.items() if step is not None}
        return self.early.to_meta() | self.skipped.to_meta() | self.best.to_meta() | known
