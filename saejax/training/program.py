"""A compiled train step with the members that it trains: one coder, or several stacked on a leading axis."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, Sites
from saejax.parallel import batch_sharding, on_mesh, replicated
from saejax.training.after import L0s, can_differ, compare
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import TrainState, abstract_state, init_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step
from saejax.training.warm_start import WarmStart

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """What the loop runs.

    Attributes:
        members: names; one of them, or as many as the state has on its leading axis.
        stacked: the state, the metrics and `hyper` have that axis.
        abstract: shapes, dtypes and shardings of the state.
        hyper: what the step is told of each member.
        start: () -> the state at step 0.
        step: (state, {hook point: [B, D]}, hyper) -> (state, metrics); takes the old state's memory.
        compiled: {hook point: dtype} -> the same with its step compiled for batches of such arrays.
        checkpoints: where the state is saved; None saves nothing.
        meta: goes into every checkpoint, for those who load it.
        after: `after.compare`, where the coder for after training can be another.
    """

    members: tuple[str, ...]
    stacked: bool
    abstract: TrainState
    hyper: Mapping[str, jax.Array]
    start: Callable[[], TrainState]
    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    compiled: Callable[[np.dtype], "Program"]
    checkpoints: Checkpoints | None
    meta: Mapping[str, Any]
    after: Callable[[TrainState, Arrays], L0s] | None = None

    def member(self, state: TrainState, i: int) -> TrainState:
        """The state of member `i` alone, as a single run has it."""
        if not self.stacked:
            return state
        # The members share the step, so it has no leading axis to take one from.
        rest: Any = jax.tree.map(lambda leaf: leaf[i], dataclasses.replace(state, step=None))  # type: ignore[arg-type]
        return dataclasses.replace(rest, step=state.step)

    def l0_after(self, state: TrainState, arrays: Arrays) -> dict[str, dict[str, float]]:
        """{member: what `after` says of it}; empty where no coder can be another after training."""
        found = {} if self.after is None else jax.device_get(self.after(state, arrays))
        return {
            name: {key: float(values[i] if self.stacked else values) for key, values in found.items()}
            for i, name in enumerate(self.members if found else ())
        }


def program_of_one(
    coder: Coder,
    config: TrainConfig,
    sites: Sites,
    prepare: Callable[[Any], Any],
    mesh: Mesh,
    *,
    seed: int,
    warm: WarmStart | None = None,
    spread: Sequence[float] = (),
    checkpoints: Checkpoints | None = None,
    meta: Mapping[str, Any] | None = None,
    fsdp: bool = False,
    mode: str = "jit",
) -> Program:
    """The program that trains one coder on all devices of a mesh.

    Args:
        prepare: fresh parameters -> those that training begins with; pure.
        warm: what it begins with instead, where it starts from another coder.
        spread: of what the encoder reads (`make_optimizer`).
        fsdp: the state is spread over "data" too.
        mode: how a step becomes a program for all devices, of `parallel.MODES`.
    """
    optimizer, schedule = make_optimizer(config, coder.sparsity.bias_rate, spread), make_schedule(config)
    init = make_init(coder, optimizer, config, prepare)
    abstract = abstract_state(coder, init, mesh, fsdp)
    step, hyper = (
        compile_step(make_step(coder, optimizer, schedule, sites, config), abstract, mesh, mode),
        default_hyper(seed),
    )
    looked_at = config.batch_size // config.accumulate
    after = jax.jit(on_mesh(compare(coder, sites, looked_at), mesh), out_shardings=replicated(mesh))

    def compiled(dtype: np.dtype) -> Program:
        widths = sites.widths(coder.topology.in_shape[-1], coder.topology.out_shape[-1])
        arrays = {
            name: jax.ShapeDtypeStruct((config.batch_size, width), dtype, sharding=batch_sharding(mesh))
            for name, width in widths.items()
        }
        return dataclasses.replace(program, step=step.lower(abstract, arrays, hyper).compile())  # type: ignore[attr-defined]

    program = Program(
        members=("",),
        stacked=False,
        abstract=abstract,
        hyper=hyper,
        start=lambda: init_state(init, seed, abstract, warm),
        step=step,
        compiled=compiled,
        checkpoints=checkpoints,
        meta=meta or {},
        after=after if can_differ(coder, abstract) else None,
    )
    return program


def put_on(mesh: Mesh, batch_size: int, names: Sequence[str]) -> Callable[[Mapping[str, np.ndarray]], list[Arrays]]:
    """(rows of this process's devices) -> the batch of these hook points on the mesh, for the one program there is."""
    sharding = batch_sharding(mesh)

    def put(rows: Mapping[str, np.ndarray]) -> list[Arrays]:
        return [
            {
                name: jax.make_array_from_process_local_data(sharding, rows[name], (batch_size, rows[name].shape[1]))
                for name in names
            }
        ]

    return put
