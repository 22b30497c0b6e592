"""The stage: capture what is missing, train all members together, evaluate them, and leave each as a run of its own.

sweep -> runs/<name>/{sweep_config.json, provenance.json, groups/<i>/checkpoints, <member>/...}
         runs/<name>/sweep.{json,md,png,html}
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from saejax.app import init_from
from saejax.app.console import say
from saejax.app.devices import training_devices
from saejax.app.experiment import Experiment, deciding, from_json, to_run_json
from saejax.app.fit import run_writers
from saejax.app.loading import load
from saejax.app.provenance import Provenance, agreed, of_stores, write_down
from saejax.app.stages import run_capture
from saejax.app.sweep.members import GROUPS, Group, Member, groups, members
from saejax.app.sweep.programs import GroupProgram, evaluate_heldout, make_program, place
from saejax.app.workspace import Workspace
from saejax.checkpoints import Checkpoints
from saejax.core import environment
from saejax.core.config import differences
from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.core.files import read_json, write_json
from saejax.core.lease import lease
from saejax.evals.heldout import VALIDATED
from saejax.parallel import refuse_many
from saejax.report.sweep_page import render_sweep, table
from saejax.store import BatchSource, RowSource
from saejax.trained import make_sites
from saejax.training import EXIT_PREEMPTED, Outcome, Setup, train

# Seconds that a program waits while others of the sweep begin.
_PATIENCE = 600.0


def run_sweep(work: Workspace, group: int | None = None) -> int:
    """Run the experiment's sweep. Returns 0, EXIT_PREEMPTED after a signal (all is saved), 1 if all members failed.

    With `group` one of its programs alone, of which several may run at once, on a store that is complete. When all have
    ended, the sweep without `group` finds them at their end and makes the table.

    Raises:
        ConfigError, DataError: what cannot be run is refused before anything is captured or written.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax sweep")
    _refuse_settings(e)
    plan = as_begun(e, members(e))
    lm = work.lm if e.lm.model else None
    works = [dataclasses.replace(work, experiment=group.experiment, _lm=lm) for group in groups(plan)]
    agreed(e, of_stores(e))
    source = functools.cache(lambda: load(e.train.init_from))
    done = (e.run_dir / "sweep.json").is_file()
    begun = done or init_from.is_begun(_checkpoints(e, len(works)))
    for own in works:
        coder = own.build()
        if not begun:
            init_from.check(own.experiment, coder, own.sites, source)
    _refuse_no_heldout(work)
    if group is not None:
        _refuse_group(e, group, len(works))
    if done:
        content = read_json(e.run_dir / "sweep.json")
        say(f"sweep: already done, {e.run_dir / 'sweep.json'}")
    elif group is not None:
        return _run_group(work, plan, works, source, group)
    else:
        run_capture(work)
        with lease(e.run_dir):
            found = _sweep(work, plan, works, source)
        if found is None:
            return EXIT_PREEMPTED
        content = found
    say(table(content))
    return 0 if any(row["status"] == "ok" for row in content["members"]) else 1


def _checkpoints(e: Experiment, count: int) -> list[Checkpoints]:
    """Of each group."""
    # Two at least: a kill may come when one group has its newest checkpoint and another has not.
    last = max(2, e.train.keep_checkpoints)
    return [Checkpoints(e.run_dir / GROUPS / str(i) / "checkpoints", keep_last=last) for i in range(count)]


def _sweep(
    work: Workspace, plan: tuple[Member, ...], works: list[Workspace], source: init_from.Source
) -> dict[str, Any] | None:
    """All of it; the content of sweep.json, or None when a signal stopped the training."""
    e = work.experiment
    with contextlib.ExitStack() as stack:
        t = _begun(work, plan, works, groups(plan), range(len(works)), source, stack)
        outcome = train(e.train, t.setup)
    if not outcome.finished:
        say(f"sweep: stopped by a signal after step {outcome.step:,}, saved; the same command continues")
        return None
    return _finish(e, t.programs, outcome, evaluate_heldout(t.programs, outcome.states, t.heldout), t.described)


def _run_group(
    work: Workspace, plan: tuple[Member, ...], works: list[Workspace], source: init_from.Source, group: int
) -> int:
    """One program to its end, with its members' runs: the exit code."""
    own, e = groups(plan)[group], work.experiment
    with lease(e.run_dir / GROUPS / str(group)), contextlib.ExitStack() as stack:
        with _turn(e.run_dir):
            t = _begun(work, plan, [works[group]], (own,), (group,), source, stack)
        outcome = train(e.train, t.setup)
    if not outcome.finished:
        say(f"sweep: program {group} stopped by a signal after step {outcome.step:,}, saved")
        return EXIT_PREEMPTED
    failed = [member.name for member in own.members if outcome.memories[member.name].failed is not None]
    said = f"; {', '.join(failed)} did not stay finite" if failed else ""
    say(f"sweep: program {group} is done, {outcome.step:,} steps through {len(own.members)} coders{said}")
    return 1 if len(failed) == len(own.members) else 0


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Hold the lease of a folder that several processes begin in, one after the other."""
    deadline = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(lease(folder))
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)
        yield


@dataclasses.dataclass(frozen=True)
class _Training:
    """A training that can begin, and what its end is made from."""

    setup: Setup
    programs: list[GroupProgram]
    heldout: RowSource
    described: dict[str, Any]


def _begun(
    work: Workspace,
    plan: tuple[Member, ...],
    works: list[Workspace],
    own: Sequence[Group],
    numbers: Sequence[int],
    source: init_from.Source,
    stack: contextlib.ExitStack,
) -> _Training:
    """The programs `numbers` of the sweep, ready to train; their members' folders are runs by then."""
    e, every = work.experiment, _checkpoints(work.experiment, len(groups(plan)))
    trained = [member for group in own for member in group.members]
    hook_points = list(dict.fromkeys(name for one in works for side in one.sites for name in side))
    batches, heldout = work.training(hook_points), work.reader("heldout", hook_points)
    made_from, begun = work.made_from(), (e.run_dir / "sweep_config.json").is_file()
    checkpoints = [stack.enter_context(every[i]) for i in numbers]
    programs, starts = _programs(works, own, batches, checkpoints, source)
    made_from = starts[0].recorded(e, made_from)
    write_json(e.run_dir / "sweep_config.json", decided(plan))
    write_down(e, made_from, say if begun else None)
    _say_size(e, programs)
    keep = e.train.keep_every or None
    folders = {member.name: member.experiment.run_dir / "checkpoints" for member in trained}
    alone = {
        name: stack.enter_context(Checkpoints(folder, keep_last=1, keep_every=keep)) for name, folder in folders.items()
    }
    writers = {
        member.name: [stack.enter_context(contextlib.closing(w)) for w in run_writers(member.experiment)]
        for member in trained
    }
    described = environment.describe()
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
    )
    return _Training(setup, programs, heldout, described)


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
        sites = make_sites(e.coder, coder.topology, *own.sites, batches.statistics)
        start = init_from.begin(e, coder, sites, batches, source, checkpoints, say, stage="sweep", at=i)
        device = devices[i % len(devices)]
        found.append(make_program(group, coder, start, batches.statistics, device, checkpoints[i]))
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
            f"  {i} on {_name(program.device)}: {program.group.experiment.coder.preset}, "
            f"{' '.join(program.sites.reads)} ({topology.d_in}) -> {topology.d_sae:,} latents, "
            f"{_megabytes(program.bytes()[1])}: {', '.join(program.program.members)}"
        )


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB"


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _validated(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: row[key] for key in VALIDATED} for name, row in metrics.items()}


# --- the end ---------------------------------------------------------------------------------------------------


def _finish(
    e: Experiment,
    programs: list[GroupProgram],
    outcome: Outcome,
    metrics: dict[str, dict[str, float]],
    described: dict[str, Any],
) -> dict[str, Any]:
    """The table and the picture; every member is a run of its own by now. Returns the content of sweep.json."""
    tokens = outcome.step * e.train.batch_size
    rate = tokens / max(outcome.all_seconds, 1e-9)
    rows = [
        _row(member, program, metrics[member.name], outcome) | {"tokens_per_second": rate}
        for program in programs
        for member in program.group.members
    ]
    content = {
        "name": e.name,
        "steps": outcome.step,
        "tokens": tokens,
        "seconds": outcome.all_seconds,
        "tokens_per_second": rate,
        "programs": [
            {
                "members": list(p.program.members),
                "device": _name(p.device),
                "parameter_bytes": p.bytes()[0],
                "state_bytes": p.bytes()[1],
            }
            for p in programs
        ],
        "environment": described,
        "members": rows,
    }
    render_sweep(e.run_dir, content)
    # Last: with this file the sweep is done.
    write_json(e.run_dir / "sweep.json", content)
    say(f"sweep: {outcome.step:,} steps, {rate:,.0f} tokens/s through {len(rows)} coders, {e.run_dir / 'sweep.html'}")
    return content


def _begin(member: Member, described: dict[str, Any], made_from: Provenance) -> None:
    """The files that make a member's folder a run; its checkpoints come from the loop."""
    write_json(member.experiment.run_dir / "config.json", to_run_json(member.experiment))
    write_json(member.experiment.run_dir / "environment.json", described)
    write_down(member.experiment, made_from)


def _row(member: Member, program: GroupProgram, metrics: dict[str, float], outcome: Outcome) -> dict[str, Any]:
    own, memory = member.experiment, outcome.memories[member.name]
    names = {"l0": "l0", "fve": "fve", "r2": "r2", "dead": "dead_fraction", "relative_error": "relative_error"}
    return {
        "member": member.name,
        "preset": own.coder.preset,
        "reads": list(program.sites.reads),
        "d_sae": program.coder.topology.d_sae,
        "k": member.k,
        "lr": own.train.lr,
        "seed": own.start_seed,
        "sparsity_scale": member.sparsity_scale,
        **{name: metrics[key] if memory.failed is None else None for name, key in names.items()},
        "steps": memory.failed or memory.stopped or outcome.step,
        "status": "ok" if memory.failed is None else f"not finite at step {memory.failed}",
        "run": str(own.run_dir),
    }


# --- what is refused -------------------------------------------------------------------------------------------


def _refuse_group(e: Experiment, group: int, count: int) -> None:
    if group >= count:
        raise ConfigError(f"--group is {group}, and the sweep has the programs 0 to {count - 1}.")
    if e.train.early_stop_patience:
        raise ConfigError(
            "With train.early_stop_patience a sweep's programs end at different steps, and train together alone. "
            "Leave --group away, or set train.early_stop_patience=0."
        )
    if e.capture.into != "store":
        raise ConfigError("With capture.into=training all programs share one stream. Leave --group away.")


def _refuse_settings(e: Experiment) -> None:
    if math.prod(e.parallel.mesh) > 1:
        raise ConfigError(
            f"parallel.mesh is {e.parallel.mesh}, but a sweep puts whole programs on single devices. Leave it empty."
        )
    if e.parallel.mode != "jit":
        raise ConfigError(
            f"parallel.mode is {e.parallel.mode!r}, but a sweep puts whole programs on single devices. Set jit."
        )
    if not e.train.batch_size:
        raise ConfigError("train.batch_size=0 is for a training of one coder: a sweep's coders share a batch. Set it.")
    if e.train.profile:
        raise ConfigError("train.profile is for a training of one coder: profile one of the members by `saejax train`.")
    if jax.process_count() > 1:
        raise ConfigError(f"A sweep runs in one process; there are {jax.process_count()}. Start it on one machine.")


def _refuse_no_heldout(work: Workspace) -> None:
    """Without a model nothing is captured, and the members are compared on held-out activations."""
    path = work.experiment.store_dir("heldout")
    if not work.experiment.lm.model and work.origin("heldout") is None:
        raise ConfigError(
            f"A sweep compares its members on held-out activations, and there is no store of them at {path}. Make one: "
            f"saejax store import {path} <files>."
        )


def as_begun(e: Experiment, plan: tuple[Member, ...]) -> tuple[Member, ...]:
    """The plan in the order in which the folder's sweep was begun, whatever order its axes are listed in now.

    By this order members have their places in the stacked state, and programs their folders and the learning rate that
    they are built from.

    Raises:
        DataError: the folder holds a single run, or a sweep of other members.
    """
    if (e.run_dir / "config.json").is_file():
        raise DataError(f"{e.run_dir} holds a single run. Choose another --config.name for the sweep.")
    path = e.run_dir / "sweep_config.json"
    if not path.is_file():
        return plan
    begun = {name: deciding(to_run_json(from_json(config))) for name, config in read_json(path).items()}
    named = {member.name: member for member in plan}
    if changed := differences(begun, decided(plan)):
        raise DataError(
            f"{e.run_dir} holds a sweep with another configuration:\n  " + "\n  ".join(changed[:20]) + "\n"
            "Choose another --config.name, restore these settings, or delete the folder."
        )
    return tuple(named[name] for name in begun)


def decided(plan: tuple[Member, ...]) -> dict[str, Any]:
    """What decides the numbers of a sweep, and the order of its members."""
    return {member.name: deciding(to_run_json(member.experiment)) for member in plan}
