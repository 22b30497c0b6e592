"""The stage: capture what is missing, train all members together, evaluate them, and leave each as a run of its own.

sweep -> runs/<name>/{sweep_config.json, sweep_experiment.json, provenance.json, groups/<i>/checkpoints, <member>/...}
         runs/<name>/sweep.{json,md,png,html,csv,tex,svg,pdf}
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import jax

from saejax.app.console import say
from saejax.app.experiment import Experiment, deciding, from_json, to_run_json
from saejax.app.extras import refuse_missing
from saejax.app.stages import run_capture
from saejax.app.sweep.members import decided, groups, members, sparsity_of
from saejax.app.training_folders import SweepFolder, sweep_checkpoints
from saejax.app.workspace import Workspace, verify_stores
from saejax.core.config import differences, to_json
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError
from saejax.core.files import read_json, write_json
from saejax.core.lease import lease
from saejax.evals.seeds import Trained, choices, over_seeds
from saejax.fit.beginning import is_begun, refuse_start
from saejax.fit.coders import Coders, name_of
from saejax.fit.resolve import resolve
from saejax.fit.stacked import GroupProgram
from saejax.fit.train import train
from saejax.fit.trainable import Member
from saejax.parallel import Process, refuse_many
from saejax.reports.sweep_page import render_sweep, sweep_table
from saejax.runs import Sweep
from saejax.runs.made import existing, other_settings
from saejax.training import Outcome

_FIGURES = ("l0", "fve", "r2", "dead_fraction", "relative_error")


def run_sweep(work: Workspace, group: int | None = None, most_l0: float | None = None) -> int:
    """Run the experiment's sweep. Returns 0, EXIT_PREEMPTED after a signal (all is saved), 1 if all members failed.

    With `group` one of its programs alone, of which several may run at once, on a store that is complete. When all have
    ended, the sweep without `group` finds them at their end and makes the table. `most_l0` is of `choices`.

    Raises:
        ConfigError, DataError: what cannot be run is refused before anything is captured or written.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax sweep")
    refuse_missing(e, "text", "lm", "train")
    _refuse_settings(e)
    plan = as_begun(e, with_rates(work, members(e)))
    programs = groups(plan)
    # All programs share one stream, which is the sweep's.
    stored = [dataclasses.replace(work.of(program.experiment), journal=e.run.stream) for program in programs]
    verify_stores(e)
    source = functools.cache(stored[0].source_coder)
    begun = Sweep(e.run_dir).result.is_file() or is_begun(sweep_checkpoints(e, len(programs)))
    for materials in stored:
        coder = materials.build()
        if not begun:
            refuse_start(materials.experiment, coder, materials.sites, source)
    _refuse_no_heldout(work)
    if group is not None:
        _refuse_group(e, group, len(programs))
    # The members, by which it is known, were compared above.
    content = existing(Sweep(e.run_dir).result, {}, stage="sweep", tell=say)
    if content is None:
        if group is None:
            run_capture(work)
        here = slice(None) if group is None else slice(group, group + 1)
        coders, folder = Coders(programs[here], stored[here]), SweepFolder(e, plan, programs, group, work.made_from)
        # The sweep's folder is held until its table is there; a program that trains alone holds its own folder.
        with lease(e.run_dir) if group is None else contextlib.nullcontext():
            outcome = train(coders, folder, Process(), say)
            assert outcome is not None
            if outcome.stopped:
                return EXIT_PREEMPTED
            if group is not None:
                names = [member.name for member in programs[group].members]
                failed = [name for name in names if outcome.memories[name].failed is not None]
                note = f"; {', '.join(failed)} did not stay finite" if failed else ""
                say(f"sweep: program {group} is done, {outcome.step:,} steps through {len(names)} coders{note}")
                return 1 if failed == names else 0
            content = _shown(e, plan, _content(e, coders, outcome, folder.environment), most_l0)
    else:
        content = _shown(e, plan, content, most_l0)
    say(sweep_table(content))
    return 0 if any(row["status"] == "ok" for row in content["members"]) else 1


# --- the end ---------------------------------------------------------------------------------------------------


def _content(e: Experiment, coders: Coders, outcome: Outcome, environment: dict[str, Any]) -> dict[str, Any]:
    """The content of sweep.json but for comparisons; every member is a run of its own by now."""
    programs, metrics = coders.programs, coders.evaluated(outcome.states)
    tokens = outcome.step * e.train.batch_size
    rate = tokens / max(outcome.all_seconds, 1e-9)
    rows = [
        _member_row(member, program, metrics[member.name], outcome) | {"tokens_per_second": rate}
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
                "device": name_of(p.device),
                "parameter_bytes": p.bytes()[0],
                "state_bytes": p.bytes()[1],
            }
            for p in programs
        ],
        "environment": environment,
        "members": rows,
    }
    say(f"sweep: {outcome.step:,} steps, {rate:,.0f} tokens/s through {len(rows)} coders")
    return content


def _shown(
    e: Experiment, plan: Sequence[Member[Experiment]], content: dict[str, Any], most_l0: float | None
) -> dict[str, Any]:
    """The content with figures over members that differ in their seed alone and the choice, written where it is new."""
    rows, coders = {row["member"]: row for row in content["members"]}, []
    for member in plan:
        row, alike = rows[member.name], dataclasses.replace(member.experiment, name="member", coder_seed=None)
        figures = {name: row[name] for name in _FIGURES}
        like = json.dumps(to_json(alike), sort_keys=True)
        coders.append(Trained(member.name, like, row["seed"], ", ".join(row["reads"]), figures))
    settings = over_seeds(coders)
    compared = content | {"settings": settings, "choice": choices(settings, most_l0)}
    if compared != content:
        render_sweep(e.run_dir, compared)
        # Last: with this file the sweep is done.
        write_json(Sweep(e.run_dir).result, compared)
        say(f"sweep: {Sweep(e.run_dir).result.with_suffix('.html')}")
    return compared


def _member_row(
    member: Member[Experiment], program: GroupProgram, metrics: dict[str, float], outcome: Outcome
) -> dict[str, Any]:
    own, memory = member.experiment, outcome.memories[member.name]
    return {
        "member": member.name,
        "preset": own.coder.preset,
        "reads": list(program.sites.reads),
        "d_sae": program.coder.topology.d_sae,
        "k": sparsity_of(own),
        "lr": own.train.lr,
        "seed": own.start_seed,
        "sparsity_scale": member.sparsity_scale,
        **{name: metrics[name] if memory.failed is None else None for name in _FIGURES},
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
    for key, usual in (("mode", "jit"), ("fsdp", False)):
        if (value := getattr(e.parallel, key)) != usual:
            raise ConfigError(
                f"parallel.{key} is {value!r}, but a sweep puts whole programs on single devices. Set {usual}."
            )
    if not e.train.batch_size:
        raise ConfigError("train.batch_size=0 is for a training of one coder: a sweep's coders share a batch. Set it.")
    if e.train.profile:
        raise ConfigError("train.profile is for a training of one coder: profile one of the members by `saejax train`.")
    if e.train.through:
        raise ConfigError(
            f"train.through={e.train.through} is for a training of one coder: let a member go on with it by `saejax "
            "train` and train.init_from."
        )
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


def with_rates(work: Workspace, plan: tuple[Member[Experiment], ...]) -> tuple[Member[Experiment], ...]:
    """The plan with a learning rate for each member that leaves it open: that with which the folder's sweep was begun,
    or the usual one of its coder."""
    path = Sweep(work.experiment.run_dir).members
    begun = {name: from_json(config).train.lr for name, config in read_json(path).items()} if path.is_file() else {}

    def rated(member: Member[Experiment]) -> Member[Experiment]:
        e = member.experiment
        if e.train.lr:
            return member
        lr = resolve(work.of(e), {"lr": begun.get(member.name)}, say).materials.experiment.train.lr
        own, unscaled = (
            dataclasses.replace(one, train=dataclasses.replace(one.train, lr=lr)) for one in (e, member.unscaled)
        )
        return dataclasses.replace(member, experiment=own, unscaled=unscaled)

    return tuple(rated(member) for member in plan)


def as_begun(e: Experiment, plan: tuple[Member[Experiment], ...]) -> tuple[Member[Experiment], ...]:
    """The plan in the order in which the folder's sweep was begun, whatever order its axes are listed in now.

    By this order members have their places in the stacked state, and programs their folders and the learning rate that
    they are built from.

    Raises:
        DataError: the folder holds a single run, or a sweep of other members.
    """
    if e.run.config.is_file():
        raise DataError(f"{e.run_dir} holds a single run. Choose another --config.name for the sweep.")
    path = Sweep(e.run_dir).members
    if not path.is_file():
        return plan
    begun = {name: deciding(to_run_json(from_json(config))) for name, config in read_json(path).items()}
    named = {member.name: member for member in plan}
    if changed := differences(begun, decided(plan)):
        raise other_settings(e.run_dir, "a sweep", changed[:20])
    return tuple(named[name] for name in begun)
