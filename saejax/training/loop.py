"""The training loop, of single runs and of sweeps: what happens in which order, and nothing else."""

import collections
import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.core.errors import DataError
from saejax.core.metrics import Writer, l0_note
from saejax.core.progress import Progress
from saejax.store import BatchSource
from saejax.training.blame import Blame
from saejax.training.config import TrainConfig
from saejax.training.guard import are_sound, is_sound
from saejax.training.memory import Memory
from saejax.training.preemption import Preemption
from saejax.training.program import Arrays, Program
from saejax.training.state import TrainState
from saejax.training.watch import Phases, Watch


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a session of training.

    Attributes:
        step: steps done in all.
        finished: False when a signal stopped it; everything is saved. True also when all members stopped early.
        tokens, seconds: of this session alone.
        all_seconds: of all sessions, without compilation.
        states: of each program.
        memories: of each member.
        signal: that came to this process during it; also in its last step, and then it is both finished and stopped. Of
            several processes one may have it, and all stop.
    """

    step: int
    finished: bool
    tokens: int
    seconds: float
    all_seconds: float
    states: Sequence[TrainState]
    memories: Mapping[str, Memory]
    signal: int | None = None

    @property
    def stopped(self) -> bool:
        """Its caller is to end too."""
        return self.signal is not None or not self.finished


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that the loop works with, besides the settings that all members share.

    Attributes:
        programs: each takes the same step on the same batch.
        batches: of several processes each gives the rows of its own devices.
        put: the rows of a batch -> the arrays of each program.
        validate: the states -> {member: metrics on held-out activations}, or None.
        writers: {member: where its rows of metrics go}.
        mesh: that several processes share; None for one process.
        own: {member: its own checkpoints}, of members whose program has several: the best, every
            `keep_every`-th, and the last.
        blame: (number of a batch, its rows, what is known of its step) -> the file that says where they came from;
            called when the last member fails because of them.
        stage: what the progress bar is called.
        unit: what is counted.
        rows: what a batch has rows of, for messages.
        figures: {metric: format} that it shows; of several members the first alone.
        tell: takes a line for the user.
        shown: whether there is a progress bar; of several processes one shows it.
        watches: are told what the loop does.
    """

    programs: Sequence[Program]
    batches: BatchSource
    put: Callable[[Mapping[str, np.ndarray]], Sequence[Arrays]]
    validate: Callable[[Sequence[TrainState]], Mapping[str, Mapping[str, float]]] | None = None
    writers: Mapping[str, Sequence[Writer]] = dataclasses.field(default_factory=dict)
    mesh: Mesh | None = None
    own: Mapping[str, Checkpoints] = dataclasses.field(default_factory=dict)
    blame: Blame | None = None
    stage: str = "train"
    unit: str = "tokens"
    rows: str = "activations in the store"
    figures: Mapping[str, str] = dataclasses.field(default_factory=lambda: {"fve": ".3f", "l0": ".0f"})
    tell: Callable[[str], None] = print
    shown: bool = True
    watches: Sequence[Watch] = ()


def run_loop(config: TrainConfig, setup: Setup) -> Outcome:
    """Train from the last good checkpoint, or from nothing, to `config.steps` or until every member has stopped.

    Raises:
        DataError: the only member had `max_skipped_steps` steps in a row whose loss or gradient is not finite (nothing
            of them is saved); or a checkpoint that cannot be written, or none of those there is good.
    """
    step, states, meta = _restored(setup.programs) or (0, None, {})
    session = _Session(config, setup, step, meta)
    if session.going(step):
        # Compiled before the clock starts, so that the pace is that of steps alone.
        programs = [program.compiled(setup.batches.dtype) for program in setup.programs]
        session.setup = dataclasses.replace(setup, programs=programs)
    return session.run(states or [program.start() for program in setup.programs])


def _restored(programs: Sequence[Program]) -> tuple[int, list[TrainState], dict[str, Any]] | None:
    """(step, states, meta) of the newest step at which every program has a good checkpoint; None where there is none.

    Raises:
        DataError: there are checkpoints but none that is good, or none that is good in all programs.
    """
    folders = [program.checkpoints for program in programs if program.checkpoints]
    if not folders:
        return None
    wanted = [program.abstract.to_items() for program in programs]
    if len(folders) == 1:
        newest = folders[0].restore_latest(wanted[0])
        return newest and (newest[0], [TrainState.from_items(newest[1])], newest[2])
    common = set.intersection(*(set(folder.steps()) for folder in folders))
    for step in sorted(common, reverse=True):
        problems = [problem for folder in folders for problem in folder.verify(step)]
        if not problems:
            restored = [folder.restore(step, items) for folder, items in zip(folders, wanted, strict=True)]
            states, metas = [TrainState.from_items(items) for items, _ in restored], [meta for _, meta in restored]
            # Of programs that trained apart each knows its own members, and the training took as long as the longest.
            members = {name: memory for meta in metas for name, memory in meta["members"].items()}
            seconds = max(meta.get("seconds", 0.0) for meta in metas)
            return step, states, {**metas[0], "members": members, "seconds": seconds}
        warnings.warn(f"checkpoint {step} of the sweep is not usable: {problems[0]}.", stacklevel=3)
    if common:
        raise DataError(
            f"None of the sweep's checkpoints in {folders[0].directory.parent.parent} is good in all groups (steps "
            f"{sorted(common)}; see the warnings). Copy one back from elsewhere, or remove the folder to start anew."
        )
    return None


class _Session:
    """One process's part of a training: the loop and what it remembers from step to step."""

    def __init__(self, config: TrainConfig, setup: Setup, first: int, meta: Mapping[str, Any]):
        self.config, self.setup, self.first = config, setup, first
        self.before: float = meta.get("seconds", 0.0)
        # Of a single run all of the meta is about its one member.
        of_members = meta.get("members")
        self.memories = {
            name: Memory.resumed(config, meta if of_members is None else of_members.get(name, {}))
            for program in setup.programs
            for name in program.members
        }
        self.started = time.perf_counter()
        self.pending: collections.deque[tuple[int, list[dict[str, jax.Array]], Mapping[str, np.ndarray]]] = (
            collections.deque()
        )
        self.told: dict[tuple[str, ...], tuple[list[bool] | None, Mapping[str, Any]]] = {}
        self.saved = first
        self.waited = 0.0
        self.validate_every = config.validation_interval(setup.batches.epoch_rows) if setup.validate else 0

    def going(self, step: int) -> bool:
        """There is another step to take."""
        return step < self.config.steps and any(memory.going for memory in self.memories.values())

    def run(self, states: Sequence[TrainState]) -> Outcome:
        config, setup, total, states = self.config, self.setup, self.config.steps, list(states)
        step, going = self.first, self.going(self.first)
        if going:
            self.validate_first(states)
            self.judge(self.first, states)  # compiles it: the first checkpoint need not wait for that
        self.started, self.phases = time.perf_counter(), Phases()
        with contextlib.ExitStack() as stack:
            preemption = stack.enter_context(Preemption(setup.mesh))
            size = config.batch_size
            progress = stack.enter_context(Progress(setup.stage, total * size, step * size, setup.shown, setup.unit))
            batches = stack.enter_context(contextlib.closing(setup.batches.iterate(step)))
            for watch in setup.watches if going else ():
                stack.enter_context(watch.over(setup.programs, step, total, self.phases))
            # DO NOT CHANGE THE ORDER: batch, step, metrics of the step before, validation, checkpoint. A batch
            # is a function of its step's number, and a checkpoint of step n holds everything up to n.
            while going and not preemption.agreed():
                for watch in setup.watches:
                    watch.before_step(step, states)
                waiting_since = time.perf_counter()
                with self.phases.within("data"):
                    batch = next(batches)
                self.waited += time.perf_counter() - waiting_since
                metrics = []
                with self.phases.within("start"):
                    for i, (program, arrays) in enumerate(zip(setup.programs, setup.put(batch), strict=True)):
                        states[i], metrics_of_program = program.step(states[i], arrays, self.hyper(program))
                        metrics.append(metrics_of_program)
                step += 1
                self.pending.append((step, metrics, batch))
                with self.phases.within("metrics"):
                    progress.advance(size, **self.read_metrics(keep=1))
                with self.phases.within("validation"):
                    best = self.validate_if_due(step, states)
                going = self.going(step)
                if not going:
                    # Before the checkpoint that makes the run complete: nothing is written after that one.
                    self.read_metrics(keep=0)
                    self.write(step, {name: {"time/seconds": self.seconds()} for name in self.memories})
                    self.compare_l0(step, states, batch)
                # Members first: where a program's last checkpoint is, theirs are.
                with self.phases.within("checkpoint"):
                    self.save_own(step, states, best, last=not going)
                    if step % config.checkpoint_every == 0 or not going or (best and not setup.own):
                        self.save(step, states)
            if step > self.saved:
                self.save(step, states)
            for checkpoints in self.folders():
                checkpoints.wait()
            session = (progress.tokens, progress.seconds, self.seconds() if step > self.first else self.before)
            return Outcome(step, not going, *session, states, self.memories, preemption.signal)

    def hyper(self, program: Program) -> Mapping[str, Any]:
        """Inputs of the step; of several members also which of them still train."""
        if not program.stacked:
            return program.hyper
        going = [self.memories[name].going for name in program.members]
        before, told = self.told.get(program.members, (None, program.hyper))
        if going != before:  # else nothing goes to the device
            told = {**program.hyper, "going": jax.device_put(np.array(going), program.hyper["lr"].sharding)}
            self.told[program.members] = (going, told)
        return told

    def folders(self) -> list[Checkpoints]:
        return [program.checkpoints for program in self.setup.programs if program.checkpoints]

    def seconds(self) -> float:
        """Seconds of training so far, over all sessions, without compilation."""
        return self.before + time.perf_counter() - self.started

    # --- metrics ----------------------------------------------------------------------------------------------

    def read_metrics(self, keep: int) -> dict[str, str]:
        """Read all but the newest `keep` pending steps (waiting for the oldest bounds the steps in flight)."""
        shown: dict[str, str] = {}
        while len(self.pending) > keep:
            step, metrics, batch = self.pending.popleft()
            with self.phases.within("device"):
                jax.block_until_ready(metrics)
            logged = step % self.config.log_every == 0 or step in (1, self.config.steps)
            rows = self.rows(metrics, logged)
            rows = {name: row for name, row in rows.items() if not self.count_skipped(name, step, row, batch)}
            if logged:
                shown = self.log(step, rows) or shown
        return shown

    def rows(self, metrics_of_programs: Sequence[dict[str, jax.Array]], logged: bool) -> dict[str, dict[str, float]]:
        """{member: its metrics} of one step, of the members that still train; `skipped` alone where no more is used.

        Each number is a copy of its own from the device, and a small coder's step is as short as all of them.
        """
        rows = {}
        host = jax.device_get([{"skipped": metrics["skipped"]} for metrics in metrics_of_programs])
        if logged or any(np.any(metrics["skipped"]) for metrics in host):
            host = jax.device_get(list(metrics_of_programs))
        for program, metrics in zip(self.setup.programs, host, strict=True):
            for i, name in enumerate(program.members):
                if self.memories[name].going:
                    rows[name] = {
                        key: float(values[i] if program.stacked else values) for key, values in metrics.items()
                    }
        return rows

    def log(self, step: int, rows: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
        """Write the rows; returns what the progress bar shows."""
        passed = max(1e-9, time.perf_counter() - self.started)
        timing = {
            "tokens": step * self.config.batch_size,
            "time": self.seconds(),
            "train/tokens_per_second": (step - self.first) * self.config.batch_size / passed,
            "train/data_wait": self.waited / passed,
        }
        for watch in self.setup.watches:
            timing |= watch.row(step)
        self.write(
            step, {name: {f"train/{key}": value for key, value in row.items()} | timing for name, row in rows.items()}
        )
        figures = self.setup.figures
        if len(self.memories) == 1:
            return {key: format(row[key], form) for row in rows.values() for key, form in figures.items()}
        first, form = next(iter(figures.items()))
        values = [row[first] for row in rows.values()]
        return {first: f"{min(values):{form}}-{max(values):{form}}" if values else "none"}

    def count_skipped(self, name: str, step: int, row: dict[str, float], batch: Mapping[str, np.ndarray]) -> bool:
        """True for a step that was not taken: it is counted and written; once too often, and the member has failed."""
        taken = not row["skipped"]
        self.memories[name] = memory = self.memories[name].stepped(taken)
        row["skipped"] = float(memory.skipped)
        if taken:
            return False
        self.write(step, {name: {"train/skipped": row["skipped"]}})
        if memory.in_a_row >= self.config.max_skipped_steps:
            what = (
                f"The loss of step {step} is {row['loss']}, its gradient norm {row['grad_norm']}: it is the last of "
                f"{memory.in_a_row} in a row that could not be taken (train.max_skipped_steps)."
            )
            self.fail(name, step, what, row, batch)
        return True

    def fail(
        self, name: str, step: int, what: str, row: Mapping[str, float], batch: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Give up a member. The others go on; a member that trains alone ends the training.

        Raises:
            DataError: it trains alone.
        """
        memory = self.memories[name]
        if len(self.memories) > 1:
            self.memories[name] = dataclasses.replace(memory, failed=step)
            self.setup.tell(f"{self.setup.stage}: {name} has failed, the others go on. {what}")
            return
        known = {"step": step, "loss": row["loss"], "grad_norm": row["grad_norm"]} | memory.counts() if row else {}
        where = ""
        if self.setup.blame and batch is not None:
            where = f" {self.setup.blame(step - 1, batch, known)} says where its rows came from."
        raise DataError(
            f"{what} Checkpoints before that are good (last: step {self.saved}).{where} Lower train.lr, or look for "
            f"extreme {self.setup.rows}."
        )

    # --- validation -------------------------------------------------------------------------------------------

    def validate_first(self, states: Sequence[TrainState]) -> None:
        """The curve's first point. The clock starts after it: it compiles the validation."""
        if self.setup.validate and self.validate_every and not self.first:
            self.write(self.first, _prefixed("val", self.setup.validate(states)))

    def validate_if_due(self, step: int, states: Sequence[TrainState]) -> list[str]:
        """Validate where it is time; returns the members that are the best so far."""
        every = self.validate_every
        if not (self.setup.validate and every and (step % every == 0 or step == self.config.steps)):
            return []
        metrics = {name: row for name, row in self.setup.validate(states).items() if self.memories[name].going}
        self.write(step, _prefixed("val", metrics))
        for name, row in metrics.items():
            self.memories[name] = self.memories[name].validated(step, row)
        return [name for name in metrics if self.memories[name].best_step == step]

    def compare_l0(self, step: int, states: Sequence[TrainState], batch: Mapping[str, np.ndarray]) -> None:
        """Note the L0 of the coders for after training beside the training's, and say where they are far apart."""
        for program, state, arrays in zip(self.setup.programs, states, self.setup.put(batch), strict=True):
            for name, l0s in program.l0_after(state, arrays).items():
                self.memories[name] = dataclasses.replace(self.memories[name], after=l0s)
                self.write(step, _prefixed("after", {name: l0s}))
                if note := l0_note(**l0s):
                    self.setup.tell(f"{self.setup.stage}: {f'{name}: ' if name else ''}{note}")

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save(self, step: int, states: Sequence[TrainState]) -> None:
        """Save every program's state, with all that is counted up to this step."""
        self.read_metrics(keep=0)  # it may say that it is enough
        self.judge(step, states)
        meta = {"step": step, "seconds": self.seconds()}
        # No program is a checkpoint ahead of another: the older one of this step may go only when all have it.
        for checkpoints in self.folders():
            checkpoints.wait()
        for program, state in zip(self.setup.programs, states, strict=True):
            if program.checkpoints is None:
                continue
            if program.stacked:
                about: dict[str, Any] = {"members": {name: m.to_meta() for name, m in self.memories.items()}}
            else:
                about = self.memories[program.members[0]].to_meta()
            best = None if program.stacked else self.memories[program.members[0]].best_step
            keep = [] if best is None else [best]
            program.checkpoints.save(step, state.to_items(), meta | about | dict(program.meta), keep=keep)
        self.saved = step

    def judge(self, step: int, states: Sequence[TrainState]) -> None:
        """Give up the members whose state is not finite."""
        for program, state in zip(self.setup.programs, states, strict=True):
            arrays = (state.params, state.averaged, state.opt_state, state.stats)
            sound = are_sound(arrays) if program.stacked else [is_sound(arrays)]
            for name, good in zip(program.members, sound, strict=True):
                if not good and self.memories[name].going:
                    self.fail(name, step, f"The state after step {step} is not finite, though its loss was.", {})

    def save_own(self, step: int, states: Sequence[TrainState], best: Sequence[str], last: bool) -> None:
        """Save members that share a program in checkpoints of their own: the best, every so many steps, the last."""
        every = self.config.keep_every
        if not (self.setup.own and (last or best or (every and step % every == 0))):
            return
        self.read_metrics(keep=0)
        self.judge(step, states)
        for program, state in zip(self.setup.programs, states, strict=True):
            for i, name in enumerate(program.members):
                memory, checkpoints = self.memories[name], self.setup.own.get(name)
                if checkpoints is None or memory.failed is not None:
                    continue
                at = memory.stopped or step
                if not (last or name in best or (every and step % every == 0 and memory.going)):
                    continue
                alone = dataclasses.replace(program.member(state, i), step=jnp.int32(at))
                meta = {"step": at, "seconds": self.seconds()}
                keep = [] if memory.best_step is None else [memory.best_step]
                checkpoints.save(at, alone.to_items(), meta | memory.to_meta() | dict(program.meta), keep=keep)
                checkpoints.close()  # members are many: none holds threads between its saves

    def write(self, step: int, rows: Mapping[str, Mapping[str, float]]) -> None:
        """Rows of members that have not failed."""
        for name, row in rows.items():
            if self.memories[name].failed is None:
                for writer in self.setup.writers.get(name, ()):
                    writer.write(step, row)


def _prefixed(kind: str, rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {f"{kind}/{key}": value for key, value in row.items()} for name, row in rows.items()}
