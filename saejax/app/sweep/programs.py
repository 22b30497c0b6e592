"""One program of a sweep: the members of a group stacked on a leading axis M, on one device.

On an accelerator the members are one batch (vmap). On a CPU they take turns within the program: nothing idles there
that a batch could use, and batched gathers and scatters are slow. A step of 4 members at B 2,048, D 128, F 1,024,
k 32, milliseconds a member on 2 CPU cores, alone / in turn / as a batch (2026-11-21):

    topk  44 / 53 / 131      standard  37 / 43 / 57      batchtopk  115 / 107 / 248
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from saejax.app.sweep.members import Group
from saejax.app.workspace import heldout_rows, in_order, make_sums
from saejax.coders import Coder, Sites
from saejax.evals import Reconstruction
from saejax.store import Statistics, StoreReader
from saejax.training import TrainState
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import make_init
from saejax.training.step import Step, make_step

# Members share the number of steps, so that a condition on it (resampling is due) stays a branch that is not taken.
_STACKED = TrainState(step=None, params=0, opt_state=0, stats=0, averaged=0, recent=0)  # type: ignore[arg-type]

# Platforms on which the members take turns.
_IN_TURN = frozenset({"cpu"})

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """A group of members as one compiled function.

    Attributes:
        abstract: shapes of the stacked state, on `device`.
        hyper: {"lr", "sparsity", "seed": [M]}.
        start: () -> the state at step 0.
        step: (state, {hook point: [B, D]}, hyper) -> (state, {metric: [M]}); takes the old state's memory.
        sums: (params, stats, {hook point: [B, D]}, keep [B]) -> sums for `Reconstruction`, [M, ...] each.
    """

    group: Group
    coder: Coder
    sites: Sites
    device: jax.Device
    abstract: TrainState
    hyper: dict[str, jax.Array]
    start: Callable[[], TrainState]
    step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    sums: Callable[..., Any]

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.group.members]

    def put(self, arrays: Mapping[str, jax.Array]) -> Arrays:
        """Those of the arrays that the program looks at."""
        return {name: arrays[name] for name in self.sites.hook_points}

    def bytes(self) -> tuple[int, int]:
        """(of the parameters, of the whole state), of all members."""
        parameters, state = (
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
            for tree in (self.abstract.params, self.abstract)
        )
        return parameters, state


def make_program(
    group: Group,
    coder: Coder,
    sites: Sites,
    prepare: Callable[[Any], Any],
    statistics: Mapping[str, Statistics],
    device: jax.Device,
) -> Program:
    """The program of a group, for activations with these statistics; nothing is compiled yet."""
    train, place = group.experiment.train, SingleDeviceSharding(device)
    optimizer, schedule = make_optimizer(train), make_schedule(train)
    kinds = {"lr": np.float32, "sparsity": np.float32, "seed": np.uint32}
    hyper = {name: jax.device_put(np.asarray(v, kinds[name]), place) for name, v in group.hyper().items()}
    init = jax.vmap(make_init(coder, optimizer, train, prepare), out_axes=_STACKED)
    shapes = jax.eval_shape(init, hyper["seed"])
    step = for_all(make_step(coder, optimizer, schedule, sites, train), device.platform)
    sums = sums_for_all(make_sums(coder, sites, statistics), device.platform)
    return Program(
        group=group,
        coder=coder,
        sites=sites,
        device=device,
        abstract=jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes),
        hyper=hyper,
        start=lambda: jax.jit(init, out_shardings=place)(hyper["seed"]),
        step=jax.jit(step, donate_argnums=0),
        sums=jax.jit(sums),
    )


def for_all(step: Step, platform: str) -> Step:
    """`step` of one member as that of all, (stacked state, arrays, hyper [M]) -> (stacked state, metrics [M])."""
    if platform not in _IN_TURN:
        return jax.vmap(step, in_axes=(_STACKED, None, 0), out_axes=(_STACKED, 0))

    def in_turn(state: TrainState, arrays: Arrays, hyper: Arrays) -> tuple[TrainState, Arrays]:
        def one(member: tuple[Any, Arrays]) -> tuple[Any, Arrays]:
            after, metrics = step(member[0].replace(step=state.step), arrays, member[1])
            return after.replace(step=None), metrics  # type: ignore[attr-defined]

        after, metrics = jax.lax.map(one, (_without_step(state), hyper))
        return after.replace(step=state.step + 1), metrics

    return in_turn


def sums_for_all(sums: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """The held-out sums of one member as those of all, from stacked parameters and statistics."""
    if platform not in _IN_TURN:
        return jax.vmap(sums, in_axes=(0, 0, None, None))
    return lambda params, stats, arrays, keep_B: jax.lax.map(
        lambda member: sums(*member, arrays, keep_B), (params, stats)
    )


def _without_step(state: TrainState) -> Any:
    return state.replace(step=None)  # type: ignore[attr-defined]


def compiled(program: Program, batch_size: int, widths: Mapping[str, int]) -> Program:
    """The same with its step compiled for batches of so many activations."""
    place = SingleDeviceSharding(program.device)
    arrays = {
        name: jax.ShapeDtypeStruct((batch_size, widths[name]), jnp.bfloat16, sharding=place)
        for name in program.sites.hook_points
    }
    lowered = program.step.lower(program.abstract, arrays, program.hyper)  # type: ignore[attr-defined]
    return dataclasses.replace(program, step=lowered.compile())


def place(programs: Iterable[Program], arrays: Mapping[str, np.ndarray]) -> dict[jax.Device, Arrays]:
    """The activations on every device that has programs, each once and only those that are looked at there."""
    wanted: dict[jax.Device, dict[str, None]] = {}
    for program in programs:
        wanted.setdefault(program.device, {}).update(dict.fromkeys(program.sites.hook_points))
    return {device: jax.device_put({name: arrays[name] for name in names}, device) for device, names in wanted.items()}


def member_state(state: TrainState, i: int) -> TrainState:
    """The state of member `i` alone, as a single run has it."""
    alone: TrainState = jax.tree.map(lambda leaf: leaf[i], _without_step(state)).replace(step=state.step)
    return alone


def evaluate_heldout(
    programs: Sequence[Program], states: Sequence[TrainState], reader: StoreReader
) -> dict[str, dict[str, float]]:
    """{member: metrics on the held-out store}, of the coders for after training; the store is read once."""
    totals = {name: Reconstruction() for program in programs for name in program.names}
    rows = min(heldout_rows(p.coder, p.group.experiment.train, members=len(p.names)) for p in programs)
    for arrays, keep_B in in_order(reader, list(reader.hook_points), rows):
        on = place(programs, arrays)
        # All devices are given their work before the first result is waited for.
        found = [
            program.sums(state.evaluated(), state.stats, program.put(on[program.device]), keep_B)
            for program, state in zip(programs, states, strict=True)
        ]
        for program, sums in zip(programs, found, strict=True):
            host = jax.device_get(sums)
            for i, name in enumerate(program.names):
                totals[name].add({key: value[i] for key, value in host.items()})
    return {name: total.metrics() for name, total in totals.items()}
