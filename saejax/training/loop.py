"""The training loop: what happens in which order, and nothing else."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, Sites
from saejax.core.errors import DataError
from saejax.core.metrics import Writer
from saejax.core.progress import Progress
from saejax.parallel import batch_sharding
from saejax.training.best import Best
from saejax.training.config import TrainConfig
from saejax.training.early import EarlyStopping
from saejax.training.guard import Skipped, is_sound
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.preemption import Preemption
from saejax.training.state import TrainState, abstract_state, init_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

# The run's length is predicted after this many steps, or a fifth of a shorter run.
_PREDICT_AT = 60


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a session of training ended.

    Attributes:
        step: steps done in all.
        finished: False when a signal stopped it; everything is saved. True also when it stopped early.
        tokens, seconds: of this session alone.
    """

    step: int
    finished: bool
    tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the loop works with, besides its configuration.

    Attributes:
        batches: start step -> endless batches {hook point: [B, D]} as stored; batch i is a pure function of (seed, i).
            Of several processes each gives the rows of its own devices.
        sites: which hook points the coder reads and writes, and their scales.
        prepare: fresh parameters -> those that training begins with; pure.
        epoch_rows: activations in an epoch of the store.
        validate: (params, statistics) -> metrics on held-out activations, or None.
        blame: (number of a batch, its rows, what is known of its step) -> the file that says where they came from;
            called when training gives up because of them.
        writers: where rows of metrics go.
        meta: goes into every checkpoint, for those who load it.
        fsdp: the state is spread over "data" too.
        mode: how a step becomes a program for all devices, of `parallel.MODES`.
    """

    coder: Coder
    mesh: Mesh
    batches: Callable[[int], Generator[dict[str, np.ndarray]]]
    sites: Sites
    prepare: Callable[[Any], Any]
    epoch_rows: int
    seed: int
    validate: Callable[[Any, Any], dict[str, float]] | None
    writers: Sequence[Writer]
    checkpoints: Checkpoints
    meta: dict[str, Any]
    blame: Callable[[int, Mapping[str, np.ndarray], dict[str, Any]], Path] | None = None
    fsdp: bool = False
    mode: str = "jit"


def train(config: TrainConfig, setup: Setup) -> Outcome:
    """Train from the last good checkpoint, or from nothing, to `config.steps` or until validation stops improving.

    Raises:
        DataError: `max_skipped_steps` steps in a row whose loss or gradient is not finite (nothing of them is saved),
            or a checkpoint that cannot be written.
    """
    optimizer, schedule = make_optimizer(config), make_schedule(config)
    init = make_init(setup.coder, optimizer, config, setup.prepare)
    abstract = abstract_state(setup.coder, init, setup.mesh, setup.fsdp)
    step_fn = compile_step(
        make_step(setup.coder, optimizer, schedule, setup.sites, config), abstract, setup.mesh, setup.mode
    )

    # Resume order: the newest good checkpoint of this run, else step 0.
    restored = setup.checkpoints.restore_latest(items_of(abstract))
    state = from_items(restored[1]) if restored else init_state(init, setup.seed, abstract)
    hyper = default_hyper(setup.seed)
    session = _Session(config, setup, int(state.step), restored[2] if restored else {})
    if session.first < config.steps and not session.early.stopped:
        # Compiled before the clock starts, so that the prediction is about steps alone.
        sharding = batch_sharding(setup.mesh)
        arrays = {
            name: jax.ShapeDtypeStruct((config.batch_size, width), jnp.bfloat16, sharding=sharding)
            for name, width in _widths(setup).items()
        }
        step_fn = step_fn.lower(abstract, arrays, hyper).compile()  # type: ignore[attr-defined]
    return session.run(lambda state, arrays: step_fn(state, arrays, hyper), state)


def _widths(setup: Setup) -> dict[str, int]:
    """{hook point: its width}"""
    topology, sites = setup.coder.topology, setup.sites
    return dict.fromkeys(sites.writes, topology.out_shape[-1]) | dict.fromkeys(sites.reads, topology.in_shape[-1])


def items_of(state: TrainState) -> dict[str, Any]:
    """The state as the items of a checkpoint."""
    return {
        "params": state.params,
        "averaged": state.averaged,
        "opt_state": state.opt_state,
        "stats": state.stats,
        "step": {"step": state.step} | state.recent,
    }


def from_items(items: dict[str, Any]) -> TrainState:
    """Inverse of `items_of`."""
    recent = {name: value for name, value in items["step"].items() if name != "step"}
    named = {name: items[name] for name in ("params", "opt_state", "stats", "averaged")}
    return TrainState(items["step"]["step"], **named, recent=recent)


class _Session:
    """One process's part of a training run: the loop and what it remembers from step to step."""

    def __init__(self, config: TrainConfig, setup: Setup, first: int, meta: dict[str, Any]):
        self.config, self.setup, self.first = config, setup, first
        self.before: float = meta.get("seconds", 0.0)
        self.predicted: bool = meta.get("predicted", False)
        self.started = time.perf_counter()
        self.pending: collections.deque[tuple[int, dict[str, jax.Array], dict[str, np.ndarray]]] = collections.deque()
        self.saved = first
        self.mark: float | None = None
        self.validation_seconds = 0.0
        self.waited = 0.0
        self.early = EarlyStopping.resumed(config, meta)
        self.skipped = Skipped.resumed(meta)
        self.best = Best.resumed(config.keep_best, meta)
        self.validate_every = config.validation_interval(setup.epoch_rows) if setup.validate else 0

    def run(self, step_fn: Callable[..., Any], state: TrainState) -> Outcome:
        config, total = self.config, self.config.steps
        step = self.first
        sharding = batch_sharding(self.setup.mesh)
        if step < total and not self.early.stopped:
            self.validate_first(state)
        self.started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            preemption = stack.enter_context(Preemption(self.setup.mesh))
            progress = Progress(
                "train", total * config.batch_size, step * config.batch_size, shown=jax.process_index() == 0
            )
            stack.enter_context(progress)
            batches = stack.enter_context(contextlib.closing(self.setup.batches(step)))
            # DO NOT CHANGE THE ORDER: batch, step, metrics of the step before, validation, checkpoint. A batch
            # is a function of its step's number, and a checkpoint of step n holds everything up to n.
            while step < total and not self.early.stopped and not preemption.agreed():
                asked = time.perf_counter()
                batch = next(batches)
                self.waited += time.perf_counter() - asked
                arrays = {
                    name: jax.make_array_from_process_local_data(sharding, rows, (config.batch_size, rows.shape[1]))
                    for name, rows in batch.items()
                }
                state, metrics = step_fn(state, arrays)
                step += 1
                self.pending.append((step, metrics, batch))
                shown = self.read_metrics(keep=1)
                progress.advance(config.batch_size, **shown)
                self.validate_if_due(step, state)
                last = step == total or self.early.stopped
                if last:
                    # Before the checkpoint that makes the run complete: nothing is written after that one.
                    self.read_metrics(keep=0)
                    self.write(step, {"time/seconds": self.seconds()})
                if step % config.checkpoint_every == 0 or last or step == self.best.step:
                    self.save(step, state)
            if step > self.saved:
                self.save(step, state)
            self.setup.checkpoints.wait()
            finished = step == total or self.early.stopped
            return Outcome(step, finished, progress.tokens, progress.seconds)

    def seconds(self) -> float:
        """Seconds of training so far, over all sessions, without compilation."""
        return self.before + time.perf_counter() - self.started

    def read_metrics(self, keep: int) -> dict[str, str]:
        """Read all but the newest `keep` pending steps (waiting for the oldest bounds the steps in flight)."""
        shown: dict[str, str] = {}
        while len(self.pending) > keep:
            step, device_metrics, batch = self.pending.popleft()
            row = {name: float(value) for name, value in jax.device_get(device_metrics).items()}
            self.predict(step)
            if self.count_skipped(step, row, batch):
                continue
            if step % self.config.log_every == 0 or step in (1, self.config.steps):
                tokens = step * self.config.batch_size
                done = (step - self.first) * self.config.batch_size
                passed = max(1e-9, time.perf_counter() - self.started)
                named = {f"train/{name}": value for name, value in row.items()}
                timing = {
                    "tokens": tokens,
                    "time": self.seconds(),
                    "train/tokens_per_second": done / passed,
                    "train/data_wait": self.waited / passed,
                }
                self.write(step, named | timing)
                shown = {"fve": f"{row['fve']:.3f}", "l0": f"{row['l0']:.0f}"}
        return shown

    def count_skipped(self, step: int, row: dict[str, float], batch: dict[str, np.ndarray]) -> bool:
        """Whether the step was not taken, which is counted and written; raises when that was once too often."""
        skipped = bool(row["skipped"])
        self.skipped = self.skipped.after(skipped)
        row["skipped"] = float(self.skipped.total)
        if not skipped:
            return False
        self.write(step, {"train/skipped": row["skipped"]})
        if self.skipped.in_a_row >= self.config.max_skipped_steps:
            known = {"step": step, "loss": row["loss"], "grad_norm": row["grad_norm"]} | self.skipped.to_meta()
            blame = self.setup.blame
            where = f" {blame(step - 1, batch, known)} says where its rows came from." if blame else ""
            raise DataError(
                f"The loss of step {step} is {row['loss']}, its gradient norm {row['grad_norm']}: it is the last of "
                f"{self.skipped.in_a_row} in a row that could not be taken (train.max_skipped_steps). Checkpoints "
                f"before them are good (last: step {self.saved}).{where} Lower train.lr, or look for extreme "
                "activations in the store."
            )
        return True

    def predict(self, step: int) -> None:
        """Predict the run's whole length once, from the pace of its first steps and the length of a validation."""
        at = min(_PREDICT_AT, self.config.steps // 5)
        since = at // 4
        if self.predicted or since < 1:
            return
        if step == self.first + since:
            self.mark = time.perf_counter()
        elif step == self.first + at and self.mark is not None:
            pace = (time.perf_counter() - self.mark) / (at - since)
            every = self.validate_every
            validations = self.config.steps // every - step // every if every else 0
            left = pace * (self.config.steps - step) + validations * self.validation_seconds
            self.write(step, {"time/predicted_seconds": self.seconds() + left})
            self.predicted = True

    def validate_first(self, state: TrainState) -> None:
        """The curve's first point; the second call, already compiled, tells how long a validation takes."""
        if self.setup.validate and self.validate_every and not self.predicted:
            self.setup.validate(state.evaluated(), state.stats)
            started = time.perf_counter()
            metrics = self.setup.validate(state.evaluated(), state.stats)
            self.validation_seconds = time.perf_counter() - started
            self.write(self.first, {f"val/{name}": value for name, value in metrics.items()})

    def validate_if_due(self, step: int, state: TrainState) -> None:
        every = self.validate_every
        if self.setup.validate and every and (step % every == 0 or step == self.config.steps):
            metrics = self.setup.validate(state.evaluated(), state.stats)
            self.write(step, {f"val/{name}": value for name, value in metrics.items()})
            self.early = self.early.after(metrics)
            self.best = self.best.after(step, metrics)

    def save(self, step: int, state: TrainState) -> None:
        self.read_metrics(keep=0)  # what is counted up to here goes into the meta, and may say that it is enough
        if not is_sound((state.params, state.averaged, state.opt_state, state.stats)):
            raise DataError(
                f"The state after step {step} is not finite, though its loss was. Nothing of it is saved; the last "
                f"checkpoint is that of step {self.saved}. Lower train.lr."
            )
        meta = {"step": step, "seconds": self.seconds(), "predicted": self.predicted}
        meta |= self.early.to_meta() | self.skipped.to_meta() | self.best.to_meta()
        kept = () if self.best.step is None else (self.best.step,)
        self.setup.checkpoints.save(step, items_of(state), meta | self.setup.meta, keep=kept)
        self.saved = step

    def write(self, step: int, row: dict[str, float]) -> None:
        for writer in self.setup.writers:
            writer.write(step, row)
