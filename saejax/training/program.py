"""A compiled train step with the members that it trains: one coder, or several stacked on a leading axis."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, Sites
from saejax.parallel import batch_sharding, on_mesh, replicated
from saejax.training.beside import Beside
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import Learnable, TrainState, abstract_state, init_state, make_init
from saejax.training.step import Arrays, Step, compile_step, default_hyper, make_step
from saejax.training.warm_start import WarmStart

L0s = dict[str, jax.Array]
# Tokens of which L0 is compared. Of 4,096 with an L0 of 4 or more the mean is known to 2 %.
_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class Program:
    """A step that the loop runs.

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
        after: `compare`, where the coder for after training can be another.
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
        l0s = {} if self.after is None else jax.device_get(self.after(state, arrays))
        return {
            name: {key: float(values[i] if self.stacked else values) for key, values in l0s.items()}
            for i, name in enumerate(self.members if l0s else ())
        }


def program_on(
    mesh: Mesh,
    learnable: Learnable,
    step: Step,
    init: Callable[..., TrainState],
    arrays: Callable[[np.dtype], Mapping[str, tuple[tuple[int, ...], Any]]],
    *,
    seed: int,
    warm: WarmStart | None = None,
    inputs: Mapping[str, Any] | None = None,
    after: Callable[[TrainState], Callable[[TrainState, Arrays], L0s] | None] | None = None,
    checkpoints: Checkpoints | None = None,
    meta: Mapping[str, Any] | None = None,
    fsdp: bool = False,
    mode: str = "jit",
) -> Program:
    """The program that trains one thing on all devices of a mesh, whatever learns.

    Args:
        step: pure, of a batch.
        init: as of `make_init`.
        arrays: dtype of the stored activations -> {name of an array of a batch: (shape, dtype)}.
        warm: what training begins with, where it starts from another coder.
        inputs: arrays on the mesh that every step is told besides, and none changes.
        after: shapes of the state -> `Program.after`.
        fsdp: the state is spread over "data" too.
        mode: how a step becomes a program for all devices, of `parallel.MODES`.
    """
    abstract, rows = abstract_state(learnable, init, mesh, fsdp), batch_sharding(mesh)
    hyper, placed = default_hyper(seed), None
    if inputs:
        hyper = jax.device_put(hyper, replicated(mesh)) | dict(inputs)
        placed = jax.tree.map(lambda a: a.sharding, hyper)
    jitted = compile_step(step, abstract, mesh, mode, placed)

    def compiled(dtype: np.dtype) -> Program:
        batch = {name: jax.ShapeDtypeStruct(*of, sharding=rows) for name, of in arrays(dtype).items()}
        return dataclasses.replace(program, step=jitted.lower(abstract, batch, hyper).compile())  # type: ignore[attr-defined]

    program = Program(
        members=("",),
        stacked=False,
        abstract=abstract,
        hyper=hyper,
        start=lambda: init_state(init, seed, abstract, warm),
        step=jitted,
        compiled=compiled,
        checkpoints=checkpoints,
        meta=meta or {},
        after=after(abstract) if after else None,
    )
    return program


def program_of_one(
    coder: Coder,
    config: TrainConfig,
    sites: Sites,
    prepare: Callable[[Any], Any],
    mesh: Mesh,
    *,
    spread: Sequence[float] = (),
    beside: Beside | None = None,
    **how: Any,
) -> Program:
    """The program that trains one coder on all devices of a mesh.

    Args:
        prepare: fresh parameters -> those that training begins with; pure.
        spread: of what the encoder reads (`make_optimizer`).
        beside: a second loss.
        how: seed, warm, checkpoints, meta, fsdp and mode, as of `program_on`.
    """
    optimizer, schedule = make_optimizer(config, coder.sparsity.bias_rate, spread), make_schedule(config)
    step = make_step(coder, optimizer, schedule, sites, config, beside)
    init = make_init(coder, optimizer, config, prepare)
    widths = sites.widths(coder.topology.in_shape[-1], coder.topology.out_shape[-1])

    def arrays(dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        stored = {name: ((config.batch_size, width), dtype) for name, width in widths.items()}
        return stored | dict(beside.arrays if beside else {})

    def after(abstract: TrainState) -> Callable[[TrainState, Arrays], L0s] | None:
        both = on_mesh(compare(coder, sites, config.batch_size // config.accumulate), mesh)
        return jax.jit(both, out_shardings=replicated(mesh)) if can_differ(coder, abstract) else None

    inputs = {"beside": beside.inputs} if beside else None
    return program_on(mesh, coder, step, init, arrays, after=after, inputs=inputs, **how)


def put_on(
    mesh: Mesh, batch_size: int, names: Sequence[str], beside: Mapping[str, tuple[tuple[int, ...], Any]] = {}
) -> Callable[[Mapping[str, np.ndarray]], list[Arrays]]:
    """(rows of this process's devices) -> these arrays of the batch on the mesh, for the one program there is.

    Args:
        beside: `Beside.arrays`, which have numbers of rows of their own.
    """
    sharding, rows_of = batch_sharding(mesh), dict.fromkeys(names, batch_size)
    rows_of |= {name: shape[0] for name, (shape, _) in beside.items()}

    def put(rows: Mapping[str, np.ndarray]) -> list[Arrays]:
        return [
            {
                name: jax.make_array_from_process_local_data(sharding, rows[name], (n, *rows[name].shape[1:]))
                for name, n in rows_of.items()
            }
        ]

    return put


def compare(coder: Coder, sites: Sites, tokens: int) -> Callable[[TrainState, Mapping[str, jax.Array]], L0s]:
    """(state, {hook point: [B, D] as stored}) -> {"l0_in_training", "l0"}: L0 of the coder as it trains and afterwards.

    They are two where a followed threshold stands for a selection over the batch, or averaged weights for those
    trained. Both of the same tokens: the first 4,096 of the batch, or `tokens`, those that training looks at together,
    where these are fewer. Pure.
    """
    rows = min(tokens, _TOKENS)

    def both(state: TrainState, arrays: Mapping[str, jax.Array]) -> L0s:
        x = sites.batch({name: value[:rows] for name, value in arrays.items()})["x"].astype(jnp.float32)
        afterwards, params = coder.inference(state.evaluated(), state.stats)
        return {"l0_in_training": coder.encode(state.params, x).l0(), "l0": afterwards.encode(params, x).l0()}

    return both


def can_differ(coder: Coder, state: TrainState) -> bool:
    """The coder for after training can be another than the one that is trained."""
    return bool(coder.sparsity.statistics()) or bool(state.averaged)
