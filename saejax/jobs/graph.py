"""The stages of an experiment as jobs: commands of saejax, and what each waits for.

capture (an array of parts) -> train -> evaluate -> report -> study
capture -> sweep (an array of programs) -> table -> study
capture -> train, evaluate, report (an array each, of hook points) -> study
capture -> train (the pipeline, which trains again where gates.retries says so) -> study
prefix (a latent prefix, with its evaluation)
"""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment, experiment
from saejax.app.hook_list import of_experiment
from saejax.app.new_experiment import as_file, command_of
from saejax.app.sweep.members import groups, members
from saejax.coders import TOPOLOGIES
from saejax.core.config import differences, to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json, write_bytes
from saejax.jobs.job import EXPERIMENT, JOB, Job, Stage, Words
from saejax.jobs.site import Site

# Of every path and name that goes into a script: Slurm gives % and spaces meanings of their own.
_PLAIN = r"[A-Za-z0-9._/+=@,-]+"


def write_job(config: Any, out: str, site: Site, layers: bool) -> Job:
    """Write the experiment and its job into the folder `out`; runs and stores lie where they would from here.

    Raises:
        ConfigError: settings that cannot be run as jobs, or a folder that a script cannot name.
        DataError: the folder holds a job of another experiment that was begun.
    """
    path, here = Path(out).absolute(), os.getcwd()
    config = config.copy_and_resolve_references()
    with config.unlocked():
        for key in ("runs_dir", "stores_dir"):
            if "://" not in config[key]:
                config[key] = str(Path(config[key]).absolute())
    e, python = experiment(config), (*site.container.split(), site.python or sys.executable)
    for what in (str(path), here, e.name, *python):
        if not re.fullmatch(_PLAIN, what):
            raise ConfigError(f"{what!r} cannot stand in a job's script: use letters, digits and . _ / + = @ , - only.")
    command, file = command_of(config), path / EXPERIMENT
    text = as_file(config, f"{e.name}, as its jobs run it.", f"saejax {command} --config={file}")
    stages = stages_of(e, command, str(file), layers, site.of("train").nodes)
    job = Job(path, e.name, command, stages, here, python, site.requeues, time.time(), to_json(e))
    if job.begun() and (path / JOB).is_file():
        before, now = read_json(path / JOB), job.to_json()
        if changed := differences(before.get("settings"), now["settings"], "experiment") + differences(
            before.get("stages"), now["stages"], "stages"
        ):
            raise DataError(
                f"{path} holds jobs that were begun, of another experiment ({'; '.join(changed[:3])}). Choose another "
                "--out, or remove the folder."
            )
    write_bytes(file, text.encode())
    (path / "logs").mkdir(exist_ok=True)
    job.write()
    return job


def stages_of(e: Experiment, command: str, file: str, layers: bool = False, processes: int = 1) -> tuple[Stage, ...]:
    """The stages of an experiment as a job has them, each after all that it waits for.

    Args:
        command: what runs the whole of it: pipeline, sweep, study or prefix.
        file: the experiment's file, as --config names it.
        layers: train a coder for each hook point that is captured, as an array, where the experiment trains one.
        processes: so many tasks of Slurm train one coder together.

    Raises:
        ConfigError: parallel.processes is set, or `layers` and `processes` of an experiment that is not of one coder.
    """
    if e.parallel.processes:
        raise ConfigError(
            f"parallel.processes is {e.parallel.processes!r}, and each job decides that for itself. Leave it empty: "
            "capture.parts makes the capture an array, and the site file's `nodes` of the stage train several tasks."
        )
    if e.swept and (layers or processes > 1):
        raise ConfigError(
            "The experiment is a sweep: its programs are an array, each on one node. Leave --layers away, and `nodes` "
            "of the site file at 1; sweep.reads makes a program for each hook point."
        )
    base = (f"--config={file}",)
    if command == "prefix":
        if layers or processes > 1:
            raise ConfigError(
                "A prefix is trained by one process. Leave --layers away, and `nodes` of the site file at 1."
            )
        return (Stage("prefix", (("prefix", *base),)),)
    stages: list[Stage] = []
    if command != "study" or not e.study.dictionaries:
        if e.lm.model:
            n = e.capture.parts
            parts = [(f"--config.parallel.processes={i}/{n}",) for i in range(n)] if n > 1 else [()]
            stages.append(Stage("capture", tuple(("capture", *base, *part) for part in parts)))
        after = tuple(stage.name for stage in stages)
        if e.swept:
            stages += _sweep(e, base, after)
        else:
            names = layer_names(e) if layers else {}
            stored = f"--config.store={e.store or e.name}"
            each = [(f"--config.name={run}", stored, f"--config.hook_point={point}") for point, run in names.items()]
            stages += _training(e, base, after, each or [()], processes)
    if command == "study":
        trained: Words = ()
        if layers and stages:
            runs = ",".join(str(e.run_dir.with_name(name)) for name in layer_names(e).values())
            trained = (f"--config.study.dictionaries={runs}",)
        stages.append(Stage("study", (("study", *base, *trained),), tuple(stage.name for stage in stages[-1:])))
    return tuple(stages)


def _sweep(e: Experiment, base: Words, after: Words) -> list[Stage]:
    n = len(groups(members(e)))
    # What one group alone cannot do: stop early together with the others, or read a stream that all share.
    if n == 1 or e.train.early_stop_patience or e.capture.into != "store":
        return [Stage("sweep", (("sweep", *base),), after)]
    tasks = tuple(("sweep", *base, f"--group={i}") for i in range(n))
    return [Stage("sweep", tasks, after), Stage("table", (("sweep", *base),), ("sweep",))]


def _training(e: Experiment, base: Words, after: Words, layers: Sequence[Words], processes: int) -> list[Stage]:
    if e.gates.retries:
        if processes > 1:
            raise ConfigError(
                "gates.retries trains again after an evaluation, which several tasks cannot do together: set "
                "--config.gates.retries=0, or the site file's `nodes` of train to 1."
            )
        # Training, evaluation and what follows from failed gates are one task.
        return [Stage("train", tuple(("pipeline", *base, *words) for words in layers), after)]
    together = ("--config.parallel.processes=slurm",) if processes > 1 else ()
    train = Stage("train", tuple(("train", *base, *words, *together) for words in layers), after)
    if not e.lm.model:
        return [train]  # evaluation and report ask the language model
    evaluate, report = (
        Stage(name, tuple((name, *base, *words) for words in layers), (before,), train.array)
        for name, before in (("evaluate", "train"), ("report", "evaluate"))
    )
    return [train, evaluate, report]


def layer_names(e: Experiment) -> dict[str, str]:
    """{hook point: name of the run that `layers` trains on it}, of the hook points that a coder of one site reads.

    Raises:
        ConfigError: the experiment chooses its hook point, or its coder reads several or writes another one.
    """
    topology = TOPOLOGIES[e.coder.resolved().topology]
    if chosen := e.hook_point or ", ".join((*e.reads, *e.writes)):
        raise ConfigError(
            f"--layers trains on each captured hook point, and the experiment chooses {chosen}: leave "
            "hook_point, reads and writes empty."
        )
    if topology.stacked or not topology.tied:
        raise ConfigError(
            f"--layers is for coders that read and write one hook point; {e.coder.preset} does not. "
            "Make it a sweep: sweep.reads, or sweep.points with reads and writes."
        )
    points = [p.name for _, listed, captured in of_experiment(e) for p in listed if p.name in captured]
    if len(points) < 2:
        raise ConfigError(f"--layers wants several hook points, and capture.hook_points names {', '.join(points)}.")
    return {name: f"{e.name}-{re.sub(r'[^A-Za-z0-9._-]', '-', name)}" for name in points}
