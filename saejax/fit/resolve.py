"""Settings that are left open become numbers: those with which the run was begun, or new ones.

train.batch_size=0 is found for the devices' memory, train.lr=0 follows from the number of steps, the batch and the
latents.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, Sites
from saejax.core.errors import ConfigError
from saejax.fit.beginning import is_begun, refuse_start, unscaled_sites
from saejax.fit.devices import training_mesh
from saejax.fit.learner import Materials, Sides, Tell
from saejax.fit.trainable import Trainable
from saejax.parallel import DATA, check_divides, own_rows
from saejax.training import Program, TrainConfig, program_of_one
from saejax.training.batch_size import find, room_on
from saejax.training.beside import Beside
from saejax.training.optim import usual_rate
from saejax.training.profile import step_bytes

M = TypeVar("M", bound=Materials)


@dataclasses.dataclass(frozen=True)
class Resolved(Generic[M]):
    """A training whose settings are all numbers, with the coder and the devices that follow from them."""

    materials: M
    coder: Coder
    mesh: Mesh


def resolve(materials: M, numbers: Mapping[str, Any], tell: Tell) -> Resolved[M]:
    """Close what the settings of `materials` leave open.

    Args:
        numbers: {"batch_size", "lr"} with which the run was begun, as far as there is one.

    Raises:
        ConfigError: no batch fits; settings that do not fit each other, the hook points or the devices; several
            processes, each of which would have to find the same batch size.
    """
    e = materials.experiment
    train = with_numbers(e.train, numbers)
    mesh = training_mesh(e)
    if not train.batch_size:
        if e.parallel.processes or jax.process_count() > 1:
            raise ConfigError("train.batch_size=0 is found by one process alone. Set train.batch_size for several.")

        def needs(size: int) -> int:
            sized = materials.with_train(dataclasses.replace(train, batch_size=size))
            coder = sized.build()
            check_divides(mesh, coder.topology.d_sae)
            try:
                step = step_program(sized.experiment, coder, sized.sites, mesh, np.dtype(np.float32), sized.beside).step
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                return 2**63
            return step_bytes(step.memory_analysis())  # type: ignore[attr-defined]

        size, why = batch_size(train, materials.rows(), mesh, needs, room_on(list(mesh.devices.flat)))
        tell(f"train: batch size {size:,}: {why}")
        train = dataclasses.replace(train, batch_size=size)
    materials = materials.with_train(train)
    coder = materials.build()
    check_divides(mesh, coder.topology.d_sae)
    return Resolved(materials.with_train(with_rate(train, coder)), coder, mesh)


def check(materials: M, numbers: Mapping[str, Any], checkpoints: Sequence[Checkpoints], tell: Tell) -> Resolved[M]:
    """As `resolve`, with all that training itself would refuse before its activations are there.

    Args:
        checkpoints: of the run: one that is begun asks for no source any more.
    """
    resolved = resolve(materials, numbers, tell)
    e, coder, sides = resolved.materials.experiment, resolved.coder, resolved.materials.sites
    if not is_begun(checkpoints):
        refuse_start(e, coder, sides, resolved.materials.source_coder)
    resolved.materials.beside(coder, unscaled_sites(coder, sides), resolved.mesh)  # which refuses by itself
    own_rows(resolved.mesh, e.train.batch_size, e.train.accumulate, e.train.neighbours)
    return resolved


def with_numbers(train: TrainConfig, numbers: Mapping[str, Any]) -> TrainConfig:
    """`train` with the batch size and the learning rate of a begun run, where it leaves them open."""
    size, lr = numbers.get("batch_size"), numbers.get("lr")
    if not train.batch_size and isinstance(size, int) and size > 0:
        train = dataclasses.replace(train, batch_size=size)
    if not train.lr and isinstance(lr, float) and lr > 0:
        train = dataclasses.replace(train, lr=lr)
    return train


def with_rate(train: TrainConfig, coder: Coder) -> TrainConfig:
    """`train` with a learning rate for this coder (`training.optim.usual_rate`), where it leaves that open."""
    rate = train.lr or usual_rate(train, coder.topology.d_in, coder.topology.d_sae)
    return dataclasses.replace(train, lr=rate)


def batch_size(train: TrainConfig, rows: int, mesh: Mesh, needs: Callable[[int], int], room: int) -> tuple[int, str]:
    """(the largest batch that fits, why) (`training.batch_size.find`), drawn from `rows` activations."""
    parts = mesh.shape[DATA] * train.accumulate * train.neighbours
    return find(train.tokens, rows, parts, train.shares, needs, room)


def step_program(
    e: Trainable,
    coder: Coder,
    sides: Sides,
    mesh: Mesh,
    dtype: np.dtype,
    beside: Callable[[Coder, Sites, Mesh], Beside | None],
) -> Program:
    """The compiled step of a coder without its data: activations of `dtype` count as they are.

    Args:
        beside: as `Materials.beside`.
    """
    train, sites = with_rate(e.train, coder), unscaled_sites(coder, sides)
    return program_of_one(
        coder,
        train,
        sites,
        lambda params: params,
        mesh,
        beside=beside(coder, sites, mesh),
        seed=0,
        fsdp=e.parallel.fsdp,
        mode=e.parallel.mode,
    ).compiled(dtype)
