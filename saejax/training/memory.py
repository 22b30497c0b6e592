"""The loop's memory of a coder that it trains, beside its state; every checkpoint carries it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from saejax.training.best import Best, EarlyStopping
from saejax.training.config import TrainConfig
from saejax.training.guard import Skipped


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one member.

    Attributes:
        failed: the step at which it was given up, because it did not stay finite; None where it was not.
        stopped: the step at which it stopped early; None where it did not.
        after: at the end, the L0 that `after.compare` gives, where the coder for after training can be another.
    """

    early: EarlyStopping
    skipped: Skipped
    best: Best
    failed: int | None = None
    stopped: int | None = None
    after: Mapping[str, float] | None = None

    @classmethod
    def resumed(cls, config: TrainConfig, meta: Mapping[str, Any]) -> "Memory":
        """From the settings, and what the last checkpoint says."""
        early, best = EarlyStopping.resumed(config, meta), Best.resumed(config.keep_best, meta)
        return cls(early, Skipped.resumed(meta), best, meta.get("failed"), meta.get("stopped"), meta.get("after"))

    @property
    def going(self) -> bool:
        """It still trains."""
        return self.failed is None and self.stopped is None

    def validated(self, step: int, metrics: Mapping[str, float]) -> "Memory":
        """The memory after a validation."""
        early = self.early.after(metrics)
        best = self.best.after(step, metrics)
        return dataclasses.replace(self, early=early, best=best, stopped=step if early.stopped else None)

    def to_meta(self) -> dict[str, Any]:
        """The memory, for a checkpoint."""
        ends = {"failed": self.failed, "stopped": self.stopped, "after": self.after}
        known = {name: value for name, value in ends.items() if value is not None}
        return self.early.to_meta() | self.skipped.to_meta() | self.best.to_meta() | known


def of_member(meta: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The part of a checkpoint's meta that is about one member; of a single run all of it."""
    return meta["members"].get(name, {}) if "members" in meta else meta
