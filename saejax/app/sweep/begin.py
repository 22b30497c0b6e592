"""A sweep that can begin: its programs with their starts and checkpoints, and the folders of their members."""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from saejax.app import init_from
from saejax.app.console import say
from saejax.app.devices import training_devices
from saejax.app.experiment import Experiment, to_run_json
from saejax.app.fit import SLOW_STORE, run_writers
from saejax.app.sweep.members import Group, Member, decided, groups
from saejax.app.sweep.programs import GroupProgram, evaluate_heldout, make_program, place
from saejax.app.workspace import Workspace
from saejax.checkpoints import Checkpoints
from saejax.core import environment
from saejax.core.config import to_json
from saejax.core.files import write_json
from saejax.evals.heldout import VALIDATED
from saejax.runs import Provenance, Run, Sweep
from saejax.runs.provenance import record_provenance
from saejax.store import BatchSource, RowSource
from saejax.training import Setup
from saejax.training.monitor import Monitor
from saejax.training.watch import Watch


def checkpoints_of(e: Experiment, count: int) -> list[Checkpoints]:
    """Of each group."""
    # Two at least: a kill may come when one group has its newest checkpoint and another has not.
    last = max(2, e.train.keep_checkpoints)
    return [Checkpoints(Run(Sweep(e.run_dir).groups / str(i)).checkpoints, keep_last=last) for i in range(count)]


@dataclasses.dataclass(frozen=True)
class Training:
    """A training that can begin, and what its end is made from."""

    setup: Setup
    programs: list[GroupProgram]
    heldout: RowSource
    described: dict[str, Any]


def begin_training(
    work: Workspace,
    plan: tuple[Member, ...],
    works: list[Workspace],
    own: Sequence[Group],
    numbers: Sequence[int],
    source: init_from.Source,
    stack: contextlib.ExitStack,
) -> Training:
    """The programs `numbers` of the sweep, ready to train; their members' folders are runs by then."""
    e, every = work.experiment, checkpoints_of(work.experiment, len(groups(plan)))
    trained = [member for group in own for member in group.members]
    hook_points = list(dict.fromkeys(name for one in works for side in one.sites for name in side))
    batches, heldout = work.training(hook_points), work.reader("heldout", hook_points)
    made_from, begun = work.made_from(), Sweep(e.run_dir).exists
    checkpoints = [stack.enter_context(every[i]) for i in numbers]
    programs, starts = _programs(works, own, batches, checkpoints, source)
    made_from = starts[0].recorded(e, made_from)
    write_json(Sweep(e.run_dir).members, decided(plan))
    write_json(Sweep(e.run_dir).experiment, to_json(e))
    record_provenance(e.run, made_from, say if begun else None)
    _say_size(e, programs)
    keep = e.train.keep_every or None
    folders = {member.name: member.experiment.run.checkpoints for member in trained}
    alone = {
        name: stack.enter_context(Checkpoints(folder, keep_last=1, keep_every=keep)) for name, folder in folders.items()
    }
    writers = {
        member.name: [stack.enter_context(contextlib.closing(w)) for w in run_writers(member.experiment)]
        for member in trained
    }
    described = environment.session_record()
    for member in trained:
        _begin(member, described, made_from)
    setup = Setup(
        programs=[program.program for program in programs],
        batches=batches,
        put=functools.partial(place, programs),
        validate=lambda states: _validated(evaluate_heldout(programs, states, heldout)),
        writers=writers,
        own=alone,
        stage="sweep",
        tell=say,
        watch=Monitor(jax.local_devices(), say, "sweep", SLOW_STORE) if e.train.monitor else Watch(),
    )
    return Training(setup, programs, heldout, described)


def _programs(
    works: list[Workspace],
    plan: Sequence[Group],
    batches: BatchSource,
    checkpoints: list[Checkpoints],
    source: init_from.Source,
) -> tuple[list[GroupProgram], list[init_from.Beginning]]:
    """A program for each group, on the devices in turn, and what it begins with."""
    devices = training_devices(works[0].experiment)
    found, starts = [], []
    for i, (own, group) in enumerate(zip(works, plan, strict=True)):
        e, coder = group.experiment, own.build()
        start = init_from.begin(e, coder, own.sites, batches, source, checkpoints, say, stage="sweep", at=i)
        device = devices[i % len(devices)]
        found.append(make_program(group, coder, start, device, checkpoints[i]))
        starts.append(start)
    return found, starts


def _say_size(e: Experiment, programs: list[GroupProgram]) -> None:
    """How large it will be: members, programs, devices, bytes."""
    count = sum(len(program.group.members) for program in programs)
    devices = list(dict.fromkeys(program.device for program in programs))
    on = {device: sum(p.bytes()[1] for p in programs if p.device == device) for device in devices}
    parameters = sum(program.bytes()[0] for program in programs)
    say(
        f"sweep: {count} coders in {len(programs)} programs on {len(devices)} of {jax.device_count()} devices, "
        f"{e.train.steps:,} steps of {e.train.batch_size:,} activations; parameters {_megabytes(parameters)}, state "
        f"with the optimizer's at most {_megabytes(max(on.values()))} on a device"
    )
    for i, program in enumerate(programs):
        topology = program.coder.topology
        say(
            f"  {i} on {name_of(program.device)}: {program.group.experiment.coder.preset}, "
            f"{' '.join(program.sites.reads)} ({topology.d_in}) -> {topology.d_sae:,} latents, "
            f"{_megabytes(program.bytes()[1])}: {', '.join(program.program.members)}"
        )


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB"


def name_of(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _validated(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: row[key] for key in VALIDATED} for name, row in metrics.items()}


def _begin(member: Member, described: dict[str, Any], made_from: Provenance) -> None:
    """The files that make a member's folder a run; its checkpoints come from the loop."""
    write_json(member.experiment.run.config, to_run_json(member.experiment))
    write_json(member.experiment.run.environment, described)
    record_provenance(member.experiment.run, made_from)
