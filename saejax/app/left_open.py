"""What settings leave open becomes a number: that with which the run was begun, or a new one.

train.batch_size=0 is found for the devices' memory, train.lr=0 follows from the number of steps, the batch and the
latents.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from saejax.app.console import say
from saejax.app.devices import training_mesh
from saejax.app.experiment import Experiment
from saejax.app.workspace import Workspace
from saejax.coders import Coder, Sites
from saejax.core.errors import ConfigError
from saejax.core.files import read_object
from saejax.parallel import DATA, check_divides
from saejax.store.files import StoreFiles
from saejax.store.manifest import read_manifest
from saejax.training import program_of_one
from saejax.training.batch_size import find, room_on
from saejax.training.optim import usual_rate
from saejax.training.profile import step_bytes

Tell = Callable[[str], None]


def as_begun(e: Experiment) -> Experiment:
    """The experiment with the batch size and the learning rate of its begun run, where it leaves them open."""
    path = e.run.config
    if (e.train.batch_size and e.train.lr) or not path.is_file():
        return e
    train = read_object(path).get("train")
    begun = train if isinstance(train, dict) else {}
    size, lr = begun.get("batch_size"), begun.get("lr")
    if not e.train.batch_size and isinstance(size, int) and size > 0:
        e = _with(e, size)
    if not e.train.lr and isinstance(lr, float) and lr > 0:
        e = dataclasses.replace(e, train=dataclasses.replace(e.train, lr=lr))
    return e


def with_rate(e: Experiment, coder: Coder) -> Experiment:
    """The experiment with a learning rate for this coder (`training.optim.usual_rate`), where it leaves that open."""
    if e.train.lr:
        return e
    return dataclasses.replace(
        e, train=dataclasses.replace(e.train, lr=usual_rate(e.train, coder.topology.d_in, coder.topology.d_sae))
    )


def with_batch_size(work: Workspace, tell: Tell = say) -> Workspace:
    """The workspace of an experiment whose batch size is a number."""
    if work.experiment.train.batch_size:
        return work
    e = as_begun(work.experiment)
    if not e.train.batch_size:

        def build(sized: Experiment) -> Coder:
            return dataclasses.replace(work, experiment=sized).build()

        manifest = read_manifest(StoreFiles(e.store_dir("train"))) if e.capture.into == "store" else None
        rows = rows_of(e, manifest.n_tokens if manifest else e.capture.tokens)
        e = found(e, build, work.sites, rows, tell)
    return dataclasses.replace(work, experiment=e)


def rows_of(e: Experiment, stored: int) -> int:
    """Rows among which a batch is drawn, of a store of so many."""
    if e.capture.into == "training":
        return e.capture.buffer_rows
    return min(stored, e.train.max_rows or stored)


def found(
    e: Experiment,
    build: Callable[[Experiment], Coder],
    names: tuple[tuple[str, ...], tuple[str, ...]],
    rows: int,
    tell: Tell,
) -> Experiment:
    """The experiment with the largest batch that fits (`training.batch_size.find`), which `tell` hears of.

    Args:
        build: an experiment with a batch size -> its coder.
        names: the hook points read, and those written.
        rows: of the store.

    Raises:
        ConfigError: no batch fits, or several processes, each of which would have to find the same one.
    """
    if e.parallel.processes or jax.process_count() > 1:
        raise ConfigError("train.batch_size=0 is found by one process alone. Set train.batch_size for several.")
    mesh = training_mesh(e)

    def needs(size: int) -> int:
        sized = _with(e, size)
        coder = build(sized)
        sized = with_rate(sized, coder)
        check_divides(mesh, coder.topology.d_sae)
        reads, writes = names
        sites = Sites(reads, writes, (1.0,) * len(reads), (1.0,) * len(writes), coder.topology.stacked)
        program = program_of_one(
            coder, sized.train, sites, lambda params: params, mesh, seed=0, fsdp=e.parallel.fsdp, mode=e.parallel.mode
        )
        try:
            step = program.compiled(np.dtype(np.float32)).step
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return 2**63
        return step_bytes(step.memory_analysis())  # type: ignore[attr-defined]

    t = e.train
    parts = mesh.shape[DATA] * t.accumulate * t.neighbours
    answer = find(t.tokens, rows, parts, t.shares, needs, room_on(list(mesh.devices.flat)))
    tell(f"train: batch size {answer.size:,}: {answer.why}")
    return _with(e, answer.size)


def _with(e: Experiment, size: int) -> Experiment:
    return dataclasses.replace(e, train=dataclasses.replace(e.train, batch_size=size))
