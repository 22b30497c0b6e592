"""The folders of trainings: a run's, and a sweep's with its members'; each is a `fit.Folder`."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app.console import keep_quiet, say
from saejax.app.experiment import Experiment, refuse_other_run, to_run_json
from saejax.app.extras import refuse_untrainable
from saejax.app.sweep.members import decided
from saejax.app.workspace import Workspace, refuse_prefix
from saejax.checkpoints import Checkpoints
from saejax.core import environment
from saejax.core.config import to_json
from saejax.core.errors import BusyError
from saejax.core.files import read_object, write_json, writing
from saejax.core.lease import lease
from saejax.core.metrics import JsonlWriter, TensorBoardWriter, Writer
from saejax.core.wandb_runs import WandbRuns
from saejax.fit.learner import Held, Ready
from saejax.fit.resolve import with_numbers
from saejax.fit.trainable import Group, Member
from saejax.parallel import Process, from_first
from saejax.runs import Provenance, Run, Sweep
from saejax.runs.made import already_done
from saejax.runs.provenance import record_provenance, verify_provenance
from saejax.training import Outcome, Setup

# Seconds that a program of a sweep waits while others begin.
_PATIENCE = 600.0


def open_numbers(run: Run) -> Mapping[str, Any]:
    """The batch size and the learning rate with which a run was begun; {} where it was not."""
    train = read_object(run.config).get("train") if run.config.is_file() else {}
    return train if isinstance(train, dict) else {}


def as_begun(e: Experiment) -> Experiment:
    """The experiment with the batch size and the learning rate of its begun run, where it leaves them open."""
    if e.train.batch_size and e.train.lr:
        return e
    return dataclasses.replace(e, train=with_numbers(e.train, open_numbers(e.run)))


def open_workspace(e: Experiment) -> Workspace:
    """The workspace of an experiment as its run was begun.

    Raises:
        ConfigError: it trains a prefix and no coder.
    """
    refuse_prefix(e)
    return Workspace(as_begun(e))


@dataclasses.dataclass
class RunFolder:
    """The folder of one experiment's training.

    Attributes:
        made_from: all origins of the run, agreed with its record.
        known: as many of them as can be said at once, where that is not all.
    """

    e: Experiment
    made_from: Callable[[], Provenance]
    tell: Callable[[str], None] = say
    known: Callable[[], Provenance] | None = None

    @contextlib.contextmanager
    def held(self, process: Process) -> Iterator[Held]:
        self.tell = self.tell if process.first else keep_quiet
        with contextlib.ExitStack() as stack:
            with writing(self.e.run_dir):
                self.e.run_dir.mkdir(parents=True, exist_ok=True)
            # Process 0 holds the run for all of them.
            from_first(process, lambda: bool(stack.enter_context(lease(self.e.run_dir))))
            self.e = as_begun(self.e)
            refuse_other_run(self.e)
            from_first(process, lambda: bool((self.known or self.made_from)()))
            t, run = self.e.train, self.e.run
            stored = Checkpoints(run.checkpoints, keep_last=t.keep_checkpoints, keep_every=t.keep_every or None)
            stack.enter_context(stored)

            def complete() -> bool:
                # Where the batch size is open no run was begun, and there is no number of steps yet.
                return stored.latest() is not None and stored.latest() == t.steps and not stored.verify(t.steps)

            if from_first(process, complete):
                self.tell(already_done("train", f"step {t.steps:,} in {run.path}"))
                yield [stored], None
            else:
                refuse_untrainable(self.e, process)
                yield [stored], open_numbers(run)

    @contextlib.contextmanager
    def recorded(self, ready: Ready, process: Process, checkpoints: Sequence[Checkpoints]) -> Iterator[Setup]:
        self.e = e = dataclasses.replace(self.e, train=ready.train)
        begun = checkpoints[0].latest() or 0

        def write() -> int:
            made_from = with_source(e, self.made_from(), ready)
            write_json(e.run.config, to_run_json(e))
            shape = list(ready.setup.mesh.devices.shape) if ready.setup.mesh else []
            session = environment.session_record(from_step=begun, seed=e.seed, coder_seed=e.start_seed, mesh=shape)
            environment.append_session(e.run.environment, session)
            # After config.json: what stands here is said of a run that there is.
            record_provenance(e.run, made_from, self.tell if begun else None)
            return 0

        from_first(process, write)
        group = e.run_dir.parent.name if e.run.is_attempt else ""
        with _writers({"": e} if process.first else {}, self.tell, group) as writers:
            yield dataclasses.replace(ready.setup, writers=writers)

    def ended(self, ready: Ready, outcome: Outcome, process: Process) -> None:
        if outcome.tokens and process.first:
            self.e.run.record_stage("train", outcome.tokens, outcome.seconds)
        if outcome.finished:
            rate = outcome.tokens / max(outcome.seconds, 1e-9)
            self.tell(f"train: {outcome.step:,} steps, {rate:,.0f} {ready.setup.unit}/s")
        if outcome.stopped:
            self.tell(f"train: stopped by a signal after step {outcome.step:,}, saved; the same command continues")


def with_source(e: Experiment, made_from: Provenance, ready: Ready) -> Provenance:
    """`made_from` with the dictionary that the run starts from, where it starts from one.

    Raises:
        DataError: it began with another one, and was stopped before its first checkpoint.
    """
    if not ready.identity:
        return made_from
    source = {"init": dict(ready.identity)}
    verify_provenance(e.run, source, lambda: made_from)
    return made_from | source


@contextlib.contextmanager
def _writers(
    experiments: Mapping[str, Experiment], tell: Callable[[str], None], group: str
) -> Iterator[dict[str, list[Writer]]]:
    """{member: metrics.jsonl, and what else is wanted}, open; `group` is what Weights & Biases puts together."""
    runs = WandbRuns(tell)
    writers: dict[str, list[Writer]] = {}
    with contextlib.ExitStack() as stack:
        for member, e in experiments.items():
            here = writers[member] = [stack.enter_context(contextlib.closing(JsonlWriter(e.run.metrics)))]
            if e.train.tensorboard:
                here.append(stack.enter_context(contextlib.closing(TensorBoardWriter(e.run.tensorboard))))
            if e.train.wandb:
                name, config = f"{group}/{e.name}".lstrip("/"), to_run_json(e)
                tracked = runs.open(e.run_dir, e.run.wandb_id(), name=name, group=group or None, config=config)
                here.append(stack.enter_context(contextlib.closing(tracked)))
        with runs:
            yield writers


# --- sweeps ----------------------------------------------------------------------------------------------------


def sweep_checkpoints(e: Experiment, count: int) -> list[Checkpoints]:
    """Those of each program of a sweep."""
    # Two at least: a kill may come when one group has its newest checkpoint and another has not.
    last = max(2, e.train.keep_checkpoints)
    return [Checkpoints(Run(Sweep(e.run_dir).groups / str(i)).checkpoints, keep_last=last) for i in range(count)]


@dataclasses.dataclass
class SweepFolder:
    """The folder of a sweep, and those of its members, which are runs.

    Attributes:
        plan: all members.
        groups: all programs.
        number: the one that is trained alone, of which several may be at once; None trains all.
        environment: as it is when the training begins.
    """

    e: Experiment
    plan: Sequence[Member[Experiment]]
    groups: Sequence[Group[Experiment]]
    number: int | None
    made_from: Callable[[], Provenance]
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    turn: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def trained(self) -> list[Member[Experiment]]:
        """The members that are trained here."""
        groups = self.groups if self.number is None else [self.groups[self.number]]
        return [member for group in groups for member in group.members]

    @contextlib.contextmanager
    def held(self, process: Process) -> Iterator[Held]:
        stored = sweep_checkpoints(self.e, len(self.groups))
        with contextlib.ExitStack() as stack:
            if self.number is not None:  # else `run_sweep` holds the sweep's folder, until its table is there
                stack.enter_context(lease(Sweep(self.e.run_dir).groups / str(self.number)))
                stack.enter_context(self.turn)
                _wait_for(self.turn, self.e.run_dir)
                stored = [stored[self.number]]
            yield [stack.enter_context(of_group) for of_group in stored], {}

    @contextlib.contextmanager
    def recorded(self, ready: Ready, process: Process, checkpoints: Sequence[Checkpoints]) -> Iterator[Setup]:
        e, begun = self.e, Sweep(self.e.run_dir).exists
        made_from = with_source(e, self.made_from(), ready)
        write_json(Sweep(e.run_dir).members, decided(self.plan))
        write_json(Sweep(e.run_dir).experiment, to_json(e))
        record_provenance(e.run, made_from, say if begun else None)
        self.environment = environment.session_record()
        with contextlib.ExitStack() as stack:
            trained = {member.name: member.experiment for member in self.trained}
            stored, writers = {}, stack.enter_context(_writers(trained, say, e.name))
            for member in self.trained:
                experiment, keep = member.experiment, e.train.keep_every or None
                folder = Checkpoints(experiment.run.checkpoints, keep_last=1, keep_every=keep)
                stored[member.name] = stack.enter_context(folder)
            for member in self.trained:
                write_json(member.experiment.run.config, to_run_json(member.experiment))
                write_json(member.experiment.run.environment, self.environment)
                record_provenance(member.experiment.run, made_from)
            self.turn.close()
            yield dataclasses.replace(ready.setup, writers=writers, own=stored)

    def ended(self, ready: Ready, outcome: Outcome, process: Process) -> None:
        if outcome.stopped:
            what, again = ("sweep:", "; the same command continues")
            if self.number is not None:
                what, again = f"sweep: program {self.number}", ""
            say(f"{what} stopped by a signal after step {outcome.step:,}, saved{again}")


def _wait_for(turn: contextlib.ExitStack, folder: Path) -> None:
    """Take the lease of a folder that several processes begin in, one after the other."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            turn.enter_context(lease(folder))
            return
        except BusyError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)
