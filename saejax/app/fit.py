"""Training one coder, whatever it is trained on: the one path of the stage `train` and of `saejax.train`.

What learns need not be a coder: `train_folder` is the part that every training of a run folder goes through.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from saejax.app.console import keep_quiet, say
from saejax.app.devices import training_mesh
from saejax.app.experiment import Experiment, refuse_other_run, to_run_json
from saejax.app.extras import refuse_missing
from saejax.app.init_from import Beginning, begin
from saejax.app.left_open import as_begun, with_rate
from saejax.checkpoints import Checkpoints
from saejax.coders import Coder
from saejax.core import environment
from saejax.core.files import write_json, writing
from saejax.core.lease import lease
from saejax.core.metrics import JsonlWriter, TensorBoardWriter, Writer
from saejax.evals.heldout import make_validation
from saejax.parallel import Process, check_divides, from_first, together
from saejax.runs.provenance import Provenance, record_provenance
from saejax.store import BatchSource, RowSource, StoreReader
from saejax.trained import TrainedCoder, sites_to_meta
from saejax.training import Outcome, Profiler, Setup, TrainState, program_of_one, put_on
from saejax.training import train as run_loop
from saejax.training.blame import make_blame
from saejax.training.monitor import Monitor
from saejax.training.watch import Together, Watch

Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Data:
    """What a coder is trained on.

    Attributes:
        batches: of several processes, the rows of this one.
        heldout: for validation; None for none.
        reads, writes: hook points, in the order of the coder's sites.
        open_reader: of the store that the batches come from; None where there is none.
        slow: what is said where the training waits for the batches; empty for what is usual.
    """

    batches: BatchSource
    heldout: RowSource | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    open_reader: Callable[[], StoreReader] | None = None
    slow: str = ""


class Materials(Protocol):
    """Where a run's coder and data come from."""

    def known(self) -> Provenance:
        """As much of it as can be said at once; a DataError where the run was made from something else."""
        ...

    def made_from(self) -> Provenance:
        """What the run is made from, agreed with its record."""
        ...

    def coder(self) -> Coder:
        """The coder to train."""
        ...

    def data(self, mesh: Mesh, tell: Tell) -> Data:
        """The data, opened."""
        ...

    def source_coder(self) -> TrainedCoder:
        """What train.init_from names, where it names something."""
        ...


# --- the one path ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Assembled:
    """A coder and what it is going to be trained on, before anything is compiled.

    Attributes:
        e: with the learning rate, where the settings left it open.
    """

    e: Experiment
    coder: Coder
    mesh: Mesh
    data: Data
    beginning: Beginning


def assembled(e: Experiment, materials: Materials, checkpoints: Sequence[Checkpoints], tell: Tell) -> Assembled:
    """Put together what trains a single coder, whoever asks.

    Args:
        checkpoints: of the run that goes on, if it has a folder.

    Raises:
        ConfigError, DataError: settings, devices, data or a source that do not fit each other.
    """
    coder, mesh = materials.coder(), training_mesh(e)
    e = with_rate(e, coder)
    check_divides(mesh, coder.topology.d_sae)
    data = materials.data(mesh, tell)
    names = data.reads, data.writes
    return Assembled(
        e, coder, mesh, data, begin(e, coder, names, data.batches, materials.source_coder, checkpoints, tell)
    )


def fit(a: Assembled, *, writers: Sequence[Writer] = (), tell: Tell = say, shown: bool = True) -> Outcome:
    """Train a single coder without a run folder: nothing is saved.

    Raises:
        DataError: as `training.train`.
    """
    setup = _setup(a, None, tell)
    return run_loop(a.e.train, dataclasses.replace(setup, writers={"": writers}, shown=shown and together().first))


def _setup(a: Assembled, checkpoints: Checkpoints | None, tell: Tell) -> Setup:
    """What the loop works with to train a coder; nothing is compiled yet."""
    e, coder, mesh, data, sites = a.e, a.coder, a.mesh, a.data, a.beginning.sites
    program = program_of_one(
        coder,
        e.train,
        sites,
        a.beginning.prepare,
        mesh,
        warm=a.beginning.warm,
        spread=a.beginning.spread,
        seed=e.start_seed,
        checkpoints=checkpoints,
        meta=sites_to_meta(sites, coder.topology)
        | {"dead_after_tokens": coder.dead_after_tokens}
        | a.beginning.to_meta(),
        fsdp=e.parallel.fsdp,
        mode=e.parallel.mode,
    )
    validate = None
    if data.heldout:
        of_state = make_validation(coder, data.heldout, sites, mesh, e.train)
        validate = functools.partial(_validated, of_state)
    return Setup(
        programs=[program],
        batches=data.batches,
        put=put_on(mesh, e.train.batch_size, sites.hook_points),
        validate=validate,
        mesh=mesh,
        blame=make_blame(e.run_dir, data.batches, data.open_reader) if checkpoints and together().first else None,
        tell=tell,
        watch=watch_of(e, mesh, data.slow or (SLOW_STORE if data.open_reader else _SLOW_SOURCE), tell),
    )


SLOW_STORE = (
    "Reading the store is slower than the step: put it on a local disk (stores_dir), or leave CPU cores to the reader."
)
_SLOW_SOURCE = (
    "What makes the activations is slower than the step: capture them into a store once (capture.into=store), or give "
    "it faster or more devices."
)


def watch_of(e: Experiment, mesh: Mesh, slow: str, tell: Tell) -> Watch:
    """Who measures memory and where the time goes; of several processes the first. `slow` is what is said where the
    training waits for its batches."""
    if e.train.profile:
        # A program compiled before its parts had names is not the same one.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if not together().first:
        return Watch()
    devices = [device for device in mesh.devices.flat if device in jax.local_devices()]
    watches: list[Watch] = []
    if e.train.monitor:
        watches.append(Monitor(devices, tell, data=slow))
    if e.train.profile:
        watches.append(Profiler(e.run_dir, devices, tell))
    return watches[0] if len(watches) == 1 else Together(watches)


def _validated(of_state: Callable[[Any, Any], dict[str, float]], states: Sequence[TrainState]) -> dict[str, Any]:
    """{the only member: its metrics}"""
    return {"": of_state(states[0].evaluated(), states[0].stats)}


def train_run(
    e: Experiment, materials: Materials, process: Process, tell: Tell = say, shown: bool = True
) -> Outcome | None:
    """Train a run folder's coder, or continue it; None where it is complete already.

    Raises:
        DataError: the folder holds another run, or the run was made from other data.
        BusyError: another process trains it.
    """
    tell = tell if process.first else keep_quiet

    def prepare(e: Experiment, checkpoints: Checkpoints) -> Prepared:
        a = assembled(e, materials, [checkpoints], tell)
        topology, reads = a.coder.topology, a.data.reads
        groups = f"{len(reads)} x " if len(topology.latent_shape) > 1 else ""
        line = (
            f"{e.coder.preset}, {' '.join(reads)} ({topology.d_in}) -> "
            f"{groups}{topology.d_sae:,} latents, {e.train.steps:,} steps"
        )
        setup = _setup(a, checkpoints, tell)
        return Prepared(a.e, lambda: a.beginning.recorded(a.e, materials.made_from()), setup, a.mesh, line)

    return train_folder(e, materials.known, prepare, process, tell, shown)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A training of a run folder, about to begin.

    Attributes:
        e: with every number that the settings had left open.
        made_from: what the run is made from, agreed with its record.
        line: what is said of it first.
    """

    e: Experiment
    made_from: Callable[[], Provenance]
    setup: Setup
    mesh: Mesh
    line: str


def train_folder(
    e: Experiment,
    known: Callable[[], Provenance],
    prepare: Callable[[Experiment, Checkpoints], Prepared],
    process: Process,
    tell: Tell,
    shown: bool = True,
) -> Outcome | None:
    """Train what `prepare` prepares in a run folder, or continue it; None where it is complete already.

    Args:
        known: what can be said at once of what the run is made from; a DataError where that is something else.

    Raises:
        DataError: the folder holds another run, or the run was made from other data.
        BusyError: another process trains it.
    """
    with contextlib.ExitStack() as held:
        with writing(e.run_dir):
            e.run_dir.mkdir(parents=True, exist_ok=True)
        # Process 0 holds the run for all of them.
        from_first(process, lambda: bool(held.enter_context(lease(e.run_dir))))
        e = as_begun(e)
        refuse_other_run(e)
        from_first(process, lambda: bool(known()))
        last, every = e.train.keep_checkpoints, e.train.keep_every or None
        checkpoints = held.enter_context(Checkpoints(e.run.checkpoints, keep_last=last, keep_every=every))
        if from_first(process, lambda: _complete(checkpoints, e.train.steps)):
            tell(f"train: already complete, step {e.train.steps:,} in {e.run_dir}")
            return None
        refuse_missing(e, "train")
        found = prepare(e, checkpoints)
        e = found.e
        # All that could be refused has been: only now the folder becomes this experiment's.
        begun = checkpoints.latest() or 0
        from_first(process, lambda: _describe_run(e, found.made_from(), found.mesh, begun, tell))
        tell(f"train: {found.line}")
        writers = [held.enter_context(contextlib.closing(w)) for w in run_writers(e) if process.first]
        setup = dataclasses.replace(found.setup, writers={"": writers}, shown=shown and together().first)
        outcome = run_loop(e.train, setup)
    if outcome.tokens and process.first:
        e.run.record_stage("train", outcome.tokens, outcome.seconds)
    if outcome.finished:
        rate = outcome.tokens / max(outcome.seconds, 1e-9)
        tell(f"train: {outcome.step:,} steps, {rate:,.0f} {found.setup.unit}/s")
    if outcome.stopped:
        tell(f"train: stopped by a signal after step {outcome.step:,}, saved; the same command continues")
    return outcome


def _complete(checkpoints: Checkpoints, steps: int) -> bool:
    return checkpoints.latest() == steps and not checkpoints.verify(steps)


def _describe_run(e: Experiment, made_from: Provenance, mesh: Mesh, from_step: int, tell: Tell) -> int:
    write_json(e.run.config, to_run_json(e))
    shape = list(mesh.devices.shape)
    session = environment.session_record(from_step=from_step, seed=e.seed, coder_seed=e.start_seed, mesh=shape)
    environment.append_session(e.run.environment, session)
    # After config.json: what stands here is said of a run that there is.
    record_provenance(e.run, made_from, tell if from_step else None)
    return 0


def run_writers(e: Experiment) -> list[Writer]:
    """Where rows of metrics go: metrics.jsonl, and TensorBoard where it is asked for."""
    writers: list[Writer] = [JsonlWriter(e.run.metrics)]
    return [*writers, TensorBoardWriter(e.run.tensorboard)] if e.train.tensorboard else writers
