"""The loop's memory of a coder that it trains, beside its state; every checkpoint carries it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from saejax.training.config import BETTER, TrainConfig


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of one member: early stopping, the best validation, and the steps that were not taken.

    Attributes:
        fve: the highest val/fve that early stopping saw, None before the first that is finite.
        waited: validations since then.
        skipped, in_a_row: steps that were not taken, since step 0 and up to the last step read.
        best, best_step: the best value of `train.keep_best`, and the step of that validation and its checkpoint.
        failed: the step at which it was given up, because it did not stay finite; None where it was not.
        stopped: the step at which it stopped early; None where it did not.
        after: at the end, the L0 that `program.compare` gives, where the coder for after training can be another.
    """

    config: TrainConfig
    fve: float | None = None
    waited: int = 0
    skipped: int = 0
    in_a_row: int = 0
    best: float | None = None
    best_step: int | None = None
    failed: int | None = None
    stopped: int | None = None
    after: Mapping[str, float] | None = None

    @classmethod
    def resumed(cls, config: TrainConfig, meta: Mapping[str, Any]) -> "Memory":
        """From the settings, and what the last checkpoint says; what is best by another metric begins anew."""
        early, skipped, best = (meta.get(name) or {} for name in ("early_stopping", "skipped", "best"))
        if best.get("metric") != config.keep_best:
            best = {}
        return cls(
            config,
            fve=early.get("best"),
            waited=early.get("waited", 0),
            skipped=skipped.get("total", 0),
            in_a_row=skipped.get("in_a_row", 0),
            best=best.get("value"),
            best_step=best.get("step"),
            **{name: meta.get(name) for name in ("failed", "stopped", "after")},
        )

    @property
    def going(self) -> bool:
        """It still trains."""
        return self.failed is None and self.stopped is None

    @property
    def patient(self) -> bool:
        """Early stopping has not had `early_stop_patience` validations in a row without a higher val/fve."""
        return not self.config.early_stop_patience or self.waited < self.config.early_stop_patience

    def stepped(self, taken: bool) -> "Memory":
        """The memory after a step."""
        if taken:
            return dataclasses.replace(self, in_a_row=0)
        return dataclasses.replace(self, skipped=self.skipped + 1, in_a_row=self.in_a_row + 1)

    def validated(self, step: int, metrics: Mapping[str, float]) -> "Memory":
        """The memory after a validation; a value that is not finite is never the best, and no improvement."""
        c, memory = self.config, self
        if c.early_stop_patience:
            fve = metrics["fve"]
            higher = math.isfinite(fve) and (self.fve is None or fve > self.fve + c.early_stop_min_delta)
            news: dict[str, Any] = {"fve": fve, "waited": 0} if higher else {"waited": self.waited + 1}
            memory = dataclasses.replace(memory, **news)
        if c.keep_best:
            value = metrics[c.keep_best.removeprefix("val/")]
            if math.isfinite(value) and (self.best is None or BETTER[c.keep_best](value, self.best)):
                memory = dataclasses.replace(memory, best=value, best_step=step)
        return memory if memory.patient else dataclasses.replace(memory, stopped=step)

    def counts(self) -> dict[str, Any]:
        """The count of steps that were not taken, for a checkpoint."""
        return {"skipped": {"total": self.skipped, "in_a_row": self.in_a_row}}

    def to_meta(self) -> dict[str, Any]:
        """The memory, for a checkpoint."""
        metric = self.config.keep_best
        best = {"best": {"metric": metric, "value": self.best, "step": self.best_step}} if metric else {}
        ends = {"failed": self.failed, "stopped": self.stopped, "after": self.after}
        return {
            "early_stopping": {"best": self.fve, "waited": self.waited},
            "stopped_early": not self.patient,
            **self.counts(),
            **best,
            **{name: value for name, value in ends.items() if value is not None},
        }
