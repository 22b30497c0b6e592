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
import numpy as np
from jax.sharding import SingleDeviceSharding

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, Sites
from saejax.evals import Reconstruction
from saejax.evals.heldout import heldout_rows, in_order, make_sums
from saejax.fit.beginning import Beginning
from saejax.fit.trainable import Group
from saejax.store import RowSource
from saejax.training import Program, TrainState
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.program import L0s, can_differ, compare
from saejax.training.state import make_init
from saejax.training.step import Arrays, Step, make_step

# Members share the number of steps, so that a condition on it (resampling is due) stays a branch that is not taken.
_STACKED = TrainState(step=None, params=0, opt_state=0, stats=0, averaged=0, recent=0)  # type: ignore[arg-type]

# Platforms on which the members take turns.
_IN_TURN = frozenset({"cpu"})


@dataclasses.dataclass(frozen=True)
class GroupProgram:
    """A group of members as one program.

    Attributes:
        program: what the loop runs.
        sums: (params, stats, {hook point: [B, D]}, keep [B]) -> sums for `Reconstruction`, [M, ...] each.
    """

    group: Group[Any]
    coder: Coder
    sites: Sites
    device: jax.Device
    program: Program
    sums: Callable[..., Any]

    def bytes(self) -> tuple[int, int]:
        """(of the parameters, of the whole state), of all members."""
        of_params, of_all = (
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
            for tree in (self.program.abstract.params, self.program.abstract)
        )
        return of_params, of_all


def make_program(
    group: Group[Any], coder: Coder, start: Beginning, device: jax.Device, checkpoints: Checkpoints
) -> GroupProgram:
    """The program of a group; nothing is compiled yet."""
    train, on, sites = group.experiment.train, SingleDeviceSharding(device), start.sites
    optimizer, schedule = make_optimizer(train, coder.sparsity.bias_rate, start.spread), make_schedule(train)
    kinds = {"lr": np.float32, "sparsity": np.float32, "seed": np.uint32}
    hyper = {name: jax.device_put(np.asarray(v, kinds[name]), on) for name, v in group.hyper().items()}
    # All members start from the same coder, where they start from one.
    init = jax.vmap(make_init(coder, optimizer, train, start.prepare), in_axes=(0, None), out_axes=_STACKED)
    shapes = jax.eval_shape(init, hyper["seed"], None)
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=on), shapes)
    step = jax.jit(for_all(make_step(coder, optimizer, schedule, sites, train), device.platform), donate_argnums=0)
    after = l0_for_all(compare(coder, sites, train.batch_size // train.accumulate), device.platform)
    topology = coder.topology

    def compiled(dtype: np.dtype) -> Program:
        widths = sites.widths(topology.in_shape[-1], topology.out_shape[-1])
        arrays = {
            name: jax.ShapeDtypeStruct((train.batch_size, width), dtype, sharding=on) for name, width in widths.items()
        }
        told = {**hyper, "going": jax.device_put(np.ones(len(group.members), bool), on)}
        return dataclasses.replace(program, step=step.lower(abstract, arrays, told).compile())

    program = Program(
        members=tuple(member.name for member in group.members),
        stacked=True,
        abstract=abstract,
        hyper=hyper,
        start=lambda: jax.jit(init, out_shardings=on)(hyper["seed"], start.warm),
        step=step,
        compiled=compiled,
        checkpoints=checkpoints,
        meta=start.to_meta(coder),
        after=jax.jit(after) if can_differ(coder, abstract) else None,
    )
    sums = jax.jit(sums_for_all(make_sums(coder, sites), device.platform))
    return GroupProgram(group, coder, sites, device, program, sums)


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


def l0_for_all(after: Callable[[TrainState, Arrays], L0s], platform: str) -> Callable[[TrainState, Arrays], L0s]:
    """`program.compare` of one member as that of all, from a stacked state."""
    if platform not in _IN_TURN:
        return jax.vmap(after, in_axes=(_STACKED, None))
    return lambda state, arrays: jax.lax.map(
        lambda member: after(member.replace(step=state.step), arrays), _without_step(state)
    )


def sums_for_all(sums: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """The held-out sums of one member as those of all, from stacked parameters and statistics."""
    if platform not in _IN_TURN:
        return jax.vmap(sums, in_axes=(0, 0, None, None))
    return lambda params, stats, arrays, keep_B: jax.lax.map(
        lambda member: sums(*member, arrays, keep_B), (params, stats)
    )


def _without_step(state: TrainState) -> Any:
    return state.replace(step=None)  # type: ignore[attr-defined]


def place(programs: Iterable[GroupProgram], arrays: Mapping[str, np.ndarray]) -> list[Arrays]:
    """The activations of each program. Every device gets each array once, and only those that are looked at there."""
    wanted: dict[jax.Device, dict[str, None]] = {}
    for program in programs:
        wanted.setdefault(program.device, {}).update(dict.fromkeys(program.sites.hook_points))
    on = {device: jax.device_put({name: arrays[name] for name in names}, device) for device, names in wanted.items()}
    return [{name: on[program.device][name] for name in program.sites.hook_points} for program in programs]


def evaluate_heldout(
    programs: Sequence[GroupProgram], states: Sequence[TrainState], reader: RowSource
) -> dict[str, dict[str, float]]:
    """{member: metrics on the held-out store}, of the coders for after training; the store is read once."""
    totals = {name: Reconstruction() for program in programs for name in program.program.members}
    rows = min(heldout_rows(p.coder, p.group.experiment.train, members=len(p.group.members)) for p in programs)
    for arrays, keep_B in in_order(reader, list(reader.hook_points), rows):
        # All devices are given their work before the first result is waited for.
        sums_of_programs = [
            program.sums(state.evaluated(), state.stats, batch, keep_B)
            for program, state, batch in zip(programs, states, place(programs, arrays), strict=True)
        ]
        for program, sums in zip(programs, sums_of_programs, strict=True):
            host = jax.device_get(sums)
            for i, name in enumerate(program.program.members):
                totals[name].add({key: value[i] for key, value in host.items()})
    return {name: total.metrics() for name, total in totals.items()}
