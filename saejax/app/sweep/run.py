"""The stage: capture what is missing, train all members together, evaluate them, and leave each as a run of its own.

sweep -> runs/<name>/{sweep_config.json, provenance.json, groups/<i>/checkpoints, <member>/...}
         runs/<name>/sweep.{json,md,png,html}
"""

import contextlib
import dataclasses
import math
from typing import Any

import jax

from saejax.app.experiment import Experiment, deciding, from_json, to_run_json
from saejax.app.loading import make_sites, sites_to_meta
from saejax.app.provenance import Provenance, agreed, of_stores, write_down
from saejax.app.stages import run_capture, say
from saejax.app.sweep.loop import SweepOutcome, SweepSetup, train_together
from saejax.app.sweep.members import GROUPS, Group, Member, groups, members
from saejax.app.sweep.programs import Program, compiled, evaluate_heldout, make_program, member_state
from saejax.app.workspace import VALIDATED, Workspace, make_prepare
from saejax.capture import ActivationStream
from saejax.checkpoints import Checkpoints
from saejax.core import environment
from saejax.core.config import differences
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json, write_json
from saejax.core.lease import lease
from saejax.core.metrics import JsonlWriter
from saejax.parallel import make_mesh, refuse_many
from saejax.report.sweep_page import render_sweep, table
from saejax.store import Batches
from saejax.training import EXIT_PREEMPTED
from saejax.training.loop import items_of


def run_sweep(work: Workspace) -> int:
    """Run the experiment's sweep. Returns 0, EXIT_PREEMPTED after a signal (all is saved), 1 if all members failed.

    Raises:
        ConfigError, DataError: what cannot be run is refused before anything is captured or written.
    """
    e = work.experiment
    refuse_many(e.parallel, "launch.sweep")
    _refuse_settings(e)
    plan = as_begun(e, members(e))
    lm = work.lm if e.lm.model else None
    works = [dataclasses.replace(work, experiment=group.experiment, _lm=lm) for group in groups(plan)]
    agreed(e, of_stores(e))
    for own in works:
        own.build()
    _refuse_no_heldout(work)
    if (e.run_dir / "sweep.json").is_file():
        content = read_json(e.run_dir / "sweep.json")
        say(f"sweep: already done, {e.run_dir / 'sweep.json'}")
    else:
        run_capture(work)
        with lease(e.run_dir):
            found = _sweep(work, plan, works)
        if found is None:
            return EXIT_PREEMPTED
        content = found
    say(table(content))
    return 0 if any(row["status"] == "ok" for row in content["members"]) else 1


def _sweep(work: Workspace, plan: tuple[Member, ...], works: list[Workspace]) -> dict[str, Any] | None:
    """All of it; the content of sweep.json, or None when a signal stopped the training."""
    e = work.experiment
    hook_points = list(dict.fromkeys(name for own in works for side in own.sites for name in side))
    batches, heldout = work.training(make_mesh(e.parallel), hook_points), work.reader("heldout", hook_points)
    programs = _programs(works, groups(plan), batches)
    made_from, begun = work.made_from(), (e.run_dir / "sweep_config.json").is_file()
    write_json(e.run_dir / "sweep_config.json", decided(plan))
    write_down(e, made_from, say if begun else None)
    _say_size(e, programs)
    with contextlib.ExitStack() as stack:
        checkpoints = [
            # Two at least: a kill may come when one group has its newest checkpoint and another has not.
            stack.enter_context(Checkpoints(folder, keep_last=max(2, e.train.keep_checkpoints)))
            for folder in (e.run_dir / GROUPS / str(i) / "checkpoints" for i in range(len(programs)))
        ]
        writers = {m.name: stack.enter_context(contextlib.closing(_writer(m))) for m in plan}
        setup = SweepSetup(
            programs=[compiled(p, e.train.batch_size, batches.hook_points) for p in programs],
            batches=batches.iterate,
            validate=lambda states: _validated(evaluate_heldout(programs, states, heldout)),
            validate_every=e.train.validation_interval(batches.epoch_rows),
            writers=dict(writers),
            checkpoints=checkpoints,
            tell=say,
        )
        outcome = train_together(e.train, setup)
    if not outcome.finished:
        say(f"sweep: stopped by a signal after step {outcome.step:,}, saved; the same command continues")
        return None
    return _finish(e, programs, outcome, evaluate_heldout(programs, outcome.states, heldout))


def _programs(works: list[Workspace], plan: tuple[Group, ...], batches: Batches | ActivationStream) -> list[Program]:
    """A program for each group, on the devices in turn."""
    devices = jax.devices()
    found = []
    for i, (own, group) in enumerate(zip(works, plan, strict=True)):
        coder, config = own.build(), group.experiment.coder
        sites = make_sites(config, coder.topology, *own.sites, batches.statistics)
        prepare = make_prepare(config, coder, sites, batches)
        found.append(make_program(group, coder, sites, prepare, batches.statistics, devices[i % len(devices)]))
    return found


def _say_size(e: Experiment, programs: list[Program]) -> None:
    """How large it will be: members, programs, devices, bytes."""
    count = sum(len(program.names) for program in programs)
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
            f"{_megabytes(program.bytes()[1])}: {', '.join(program.names)}"
        )


def _megabytes(n: int) -> str:
    return f"{n / 1e6:,.1f} MB"


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _writer(member: Member) -> JsonlWriter:
    return JsonlWriter(member.experiment.run_dir / "metrics.jsonl")


def _validated(metrics: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: {key: row[key] for key in VALIDATED} for name, row in metrics.items()}


# --- the end ---------------------------------------------------------------------------------------------------


def _finish(
    e: Experiment, programs: list[Program], outcome: SweepOutcome, metrics: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Every member as a run of its own, the table and the picture; returns the content of sweep.json."""
    described, made_from = environment.describe(), agreed(e, {})
    rows = []
    tokens = outcome.step * e.train.batch_size
    rate = tokens / max(outcome.seconds, 1e-9)
    for program, state in zip(programs, outcome.states, strict=True):
        for i, member in enumerate(program.group.members):
            failed = outcome.failed.get(member.name)
            _leave(member, described, made_from)
            if failed is None:
                _save(member, program, member_state(state, i), outcome)
            rows.append(_row(member, program, metrics[member.name], failed) | {"tokens_per_second": rate})
    content = {
        "name": e.name,
        "steps": outcome.step,
        "tokens": tokens,
        "seconds": outcome.seconds,
        "tokens_per_second": rate,
        "programs": [
            {
                "members": p.names,
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


def _leave(member: Member, described: dict[str, Any], made_from: Provenance) -> None:
    write_json(member.experiment.run_dir / "config.json", to_run_json(member.experiment))
    write_json(member.experiment.run_dir / "environment.json", described)
    write_down(member.experiment, made_from)


def _save(member: Member, program: Program, state: Any, outcome: SweepOutcome) -> None:
    meta = {"step": outcome.step, "seconds": outcome.seconds, "predicted": False, "stopped_early": False}
    with Checkpoints(member.experiment.run_dir / "checkpoints") as checkpoints:
        checkpoints.save(outcome.step, items_of(state), meta | sites_to_meta(program.sites, program.coder.topology))


def _row(member: Member, program: Program, metrics: dict[str, float], failed: int | None) -> dict[str, Any]:
    own = member.experiment
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
        **{name: None if failed else metrics[key] for name, key in names.items()},
        "status": "ok" if failed is None else f"not finite at step {failed}",
        "run": str(own.run_dir),
    }


# --- what is refused -------------------------------------------------------------------------------------------


def _refuse_settings(e: Experiment) -> None:
    if math.prod(e.parallel.mesh) > 1:
        raise ConfigError(
            f"parallel.mesh is {e.parallel.mesh}, but each program of a sweep has one device. Leave it empty."
        )
    if e.parallel.mode != "jit":
        raise ConfigError(f"parallel.mode is {e.parallel.mode!r}, but each program of a sweep has one device. Set jit.")
    if jax.process_count() > 1:
        raise ConfigError(f"A sweep runs in one process; there are {jax.process_count()}. Start it on one machine.")
    if e.train.early_stop_patience:
        raise ConfigError("The members of a sweep take the same steps; set train.early_stop_patience=0.")
    if e.train.keep_best or e.train.keep_every:
        raise ConfigError("A sweep keeps its last checkpoints alone; leave train.keep_best and train.keep_every.")
    if e.train.spike_factor:
        raise ConfigError("A sweep does not count the steps that its members skip; set train.spike_factor=0.")
    if e.train.tensorboard:
        raise ConfigError("A sweep writes metrics.jsonl alone; set train.tensorboard=false.")


def _refuse_no_heldout(work: Workspace) -> None:
    """Without a model nothing is captured, and the members are compared on held-out activations."""
    path = work.experiment.store_dir("heldout")
    if not work.experiment.lm.model and work.origin("heldout") is None:
        raise ConfigError(
            f"A sweep compares its members on held-out activations, and there is no store of them at {path}. Make one: "
            f"python -m launch.store import {path} <files>."
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
