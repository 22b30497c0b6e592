"""The loop of a sweep: every program takes the same step on the same batch, which is read once."""

import collections
import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from saejax.app.sweep.programs import Program, place
from saejax.checkpoints import Checkpoints
from saejax.core.errors import DataError
from saejax.core.metrics import Writer
from saejax.core.progress import Progress
from saejax.training import TrainConfig, TrainState
from saejax.training.loop import from_items, items_of
from saejax.training.preemption import Preemption


@dataclasses.dataclass(frozen=True)
class SweepSetup:
    """What the loop works with, besides the part of the training's configuration that all share.

    Attributes:
        batches: start step -> endless batches {hook point: [B, D]} as stored; batch i is a pure function of (seed, i).
        validate: states -> {member: metrics on held-out activations}.
        validate_every: steps between validations; 0 for none.
        writers: {member: where its rows of metrics go}.
        checkpoints: of each program.
        tell: takes a line for the user.
    """

    programs: Sequence[Program]
    batches: Callable[[int], Generator[dict[str, np.ndarray]]]
    validate: Callable[[Sequence[TrainState]], dict[str, dict[str, float]]]
    validate_every: int
    writers: dict[str, Writer]
    checkpoints: Sequence[Checkpoints]
    tell: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class SweepOutcome:
    """How a session of a sweep ended.

    Attributes:
        step: steps done in all.
        finished: False when a signal stopped it; everything is saved.
        states: of each program.
        failed: {member: the step at which its loss was no longer finite}.
        seconds: of training, over all sessions, without compilation.
    """

    step: int
    finished: bool
    states: Sequence[TrainState]
    failed: dict[str, int]
    seconds: float


def train_together(config: TrainConfig, setup: SweepSetup) -> SweepOutcome:
    """Train all programs from the newest step at which all of them have a good checkpoint, or from nothing.

    Raises:
        DataError: there are checkpoints but none that is good in all programs, or one cannot be written.
    """
    restored = restore_common(setup.checkpoints, [program.abstract for program in setup.programs])
    step, states, meta = restored or (0, [program.start() for program in setup.programs], {})
    return _Session(config, setup, step, meta).run(list(states))


def restore_common(
    checkpoints: Sequence[Checkpoints], abstract: Sequence[TrainState]
) -> tuple[int, list[TrainState], dict[str, Any]] | None:
    """(step, states, meta) of the newest step that is good everywhere; None where no step is everywhere.

    Raises:
        DataError: there are such steps, but at each of them a checkpoint is damaged.
    """
    common = set.intersection(*(set(one.steps()) for one in checkpoints))
    for step in sorted(common, reverse=True):
        problems = [problem for one in checkpoints for problem in one.verify(step)]
        if not problems:
            restored = [one.restore(step, items_of(a)) for one, a in zip(checkpoints, abstract, strict=True)]
            return step, [from_items(items) for items, _ in restored], restored[0][1]
        warnings.warn(f"checkpoint {step} of the sweep is not usable: {problems[0]}.", stacklevel=2)
    if common:
        raise DataError(
            f"None of the sweep's checkpoints in {checkpoints[0].directory.parent.parent} is good in all groups (steps "
            f"{sorted(common)}; see the warnings). Copy one back from elsewhere, or remove the folder to start anew."
        )
    return None


class _Session:
    """One process's part of a sweep: the loop and what it remembers from step to step."""

    def __init__(self, config: TrainConfig, setup: SweepSetup, first: int, meta: dict[str, Any]):
        self.config, self.setup, self.first = config, setup, first
        self.before: float = meta.get("seconds", 0.0)
        self.failed: dict[str, int] = dict(meta.get("failed", {}))
        self.started = time.perf_counter()
        self.pending: collections.deque[tuple[int, list[dict[str, jax.Array]]]] = collections.deque()
        self.saved = first

    def run(self, states: list[TrainState]) -> SweepOutcome:
        config, setup, total = self.config, self.setup, self.config.steps
        step = self.first
        if step == 0:
            self.validate(step, states)
        self.started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            preemption = stack.enter_context(Preemption())
            progress = stack.enter_context(Progress("sweep", total * config.batch_size, step * config.batch_size))
            batches = stack.enter_context(contextlib.closing(setup.batches(step)))
            # The order is that of a single run: batch, step, metrics of the step before, validation, checkpoint.
            while step < total and not preemption.requested:
                on = place(setup.programs, next(batches))
                found = []
                for i, program in enumerate(setup.programs):
                    states[i], metrics = program.step(states[i], program.put(on[program.device]), program.hyper)
                    found.append(metrics)
                step += 1
                self.pending.append((step, found))
                progress.advance(config.batch_size, **self.read_metrics(keep=1))
                if setup.validate_every and (step % setup.validate_every == 0 or step == total):
                    self.validate(step, states)
                if step == total:
                    self.read_metrics(keep=0)
                    self.write(step, {name: {"time/seconds": self.seconds()} for name in setup.writers})
                if step % config.checkpoint_every == 0 or step == total:
                    self.save(step, states)
            if step > self.saved:
                self.save(step, states)
            for checkpoints in setup.checkpoints:
                checkpoints.wait()
        trained = step > self.first
        return SweepOutcome(step, step == total, states, self.failed, self.seconds() if trained else self.before)

    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def read_metrics(self, keep: int) -> dict[str, str]:
        """Read all but the newest `keep` pending steps; a member that is not finite counts as failed from there on."""
        shown: dict[str, str] = {}
        while len(self.pending) > keep:
            step, found = self.pending.popleft()
            rows: dict[str, dict[str, float]] = {}
            for program, metrics in zip(self.setup.programs, jax.device_get(found), strict=True):
                for i, name in enumerate(program.names):
                    row = {key: float(values[i]) for key, values in metrics.items() if key != "skipped"}
                    if np.isfinite(row["loss"]) and np.isfinite(row["grad_norm"]):
                        rows[name] = row
                    elif name not in self.failed:
                        self.failed[name] = step
                        self.setup.tell(
                            f"sweep: the loss of {name} is {row['loss']} at step {step}, its gradient norm "
                            f"{row['grad_norm']}; it has failed, the others go on"
                        )
            if step % self.config.log_every == 0 or step in (1, self.config.steps):
                self.log(step, rows)
                fves = [row["fve"] for name, row in rows.items() if name not in self.failed]
                shown = {"fve": f"{min(fves):.3f}-{max(fves):.3f}" if fves else "none"}
        return shown

    def log(self, step: int, rows: dict[str, dict[str, float]]) -> None:
        tokens = step * self.config.batch_size
        rate = (step - self.first) * self.config.batch_size / max(1e-9, time.perf_counter() - self.started)
        timing = {"tokens": tokens, "time": self.seconds(), "train/tokens_per_second": rate}
        named = {name: {f"train/{key}": value for key, value in row.items()} | timing for name, row in rows.items()}
        self.write(step, named)

    def validate(self, step: int, states: Sequence[TrainState]) -> None:
        if self.setup.validate_every:
            metrics = self.setup.validate(states)
            self.write(step, {name: {f"val/{k}": v for k, v in row.items()} for name, row in metrics.items()})

    def save(self, step: int, states: Sequence[TrainState]) -> None:
        self.read_metrics(keep=0)
        meta = {"step": step, "seconds": self.seconds(), "failed": self.failed}
        # No program is a checkpoint ahead of another: the older one of this step may go only when all have it.
        for checkpoints in self.setup.checkpoints:
            checkpoints.wait()
        for checkpoints, state in zip(self.setup.checkpoints, states, strict=True):
            checkpoints.save(step, items_of(state), meta)
        self.saved = step

    def write(self, step: int, rows: dict[str, dict[str, float]]) -> None:
        """Rows of those members that have not failed."""
        for name, row in rows.items():
            if name not in self.failed:
                self.setup.writers[name].write(step, row)
