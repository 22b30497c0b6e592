"""Which jobs an experiment is: commands of saejax, and what each waits for.

capture (an array of parts) -> train -> evaluate -> report -> study
capture -> sweep (an array of programs) -> table -> study
capture -> train, evaluate, report (an array each, of hook points) -> study
capture -> train (the pipeline, which trains again where gates.retries says so) -> study
prefix (a latent prefix, with its evaluation)
"""

import dataclasses
import re
from collections.abc import Sequence

from saejax.app.experiment import Experiment
from saejax.app.hook_list import of_experiment
from saejax.app.sweep.members import groups, members
from saejax.coders import TOPOLOGIES
from saejax.core.config import to_json
from saejax.core.errors import ConfigError, DataError

Words = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """One job: a command, or an array of them.

    Attributes:
        name: of its script, and of the job in every table.
        tasks: words behind `saejax` of each element of the array; a job that is no array has one.
        after: the jobs that must have ended well before it starts.
        each: a task waits for the task of the same number of `after`, not for all of them.
    """

    name: str
    tasks: tuple[Words, ...]
    after: tuple[str, ...] = ()
    each: bool = False

    @property
    def array(self) -> bool:
        return len(self.tasks) > 1

    @property
    def labels(self) -> tuple[str, ...]:
        """What each task is called: train, or train.0, train.1, ..."""
        return tuple(f"{self.name}.{i}" for i in range(len(self.tasks))) if self.array else (self.name,)


def jobs_of(e: Experiment, command: str, file: str, layers: bool = False, processes: int = 1) -> tuple[Job, ...]:
    """The jobs of an experiment, in an order in which each comes after all that it waits for.

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
    swept = any(to_json(e.sweep).values())
    if swept and (layers or processes > 1):
        raise ConfigError(
            "The experiment is a sweep: its programs are an array, each on one node. Leave --layers away, and `nodes` "
            "of the site file at 1; sweep.reads makes a program for each hook point."
        )
    base, found = (f"--config={file}",), []
    if command == "prefix":
        if layers or processes > 1:
            raise ConfigError(
                "A prefix is trained by one process. Leave --layers away, and `nodes` of the site file at 1."
            )
        return (Job("prefix", (("prefix", *base),)),)
    study = command == "study"
    if not (study and e.study.dictionaries):
        found += _capture(e, base)
        after = tuple(job.name for job in found)
        if swept:
            found += _sweep(e, base, after)
        else:
            found += _training(e, base, after, _layers(e) if layers else ((),), processes)
    if study:
        own = () if swept or not layers or not found else _dictionaries(e)
        found.append(Job("study", (("study", *base, *own),), tuple(job.name for job in found[-1:])))
    return tuple(found)


def _capture(e: Experiment, base: Words) -> list[Job]:
    if not e.lm.model:
        return []
    n = e.capture.parts
    shares = [(f"--config.parallel.processes={i}/{n}",) for i in range(n)] if n > 1 else [()]
    return [Job("capture", tuple(("capture", *base, *share) for share in shares))]


def _sweep(e: Experiment, base: Words, after: Words) -> list[Job]:
    n = len(groups(members(e)))
    # What one group alone cannot do: stop early together with the others, or read a stream that all share.
    if n == 1 or e.train.early_stop_patience or e.capture.into != "store":
        return [Job("sweep", (("sweep", *base),), after)]
    tasks = tuple(("sweep", *base, f"--group={i}") for i in range(n))
    return [Job("sweep", tasks, after), Job("table", (("sweep", *base),), ("sweep",))]


def _training(e: Experiment, base: Words, after: Words, own: Sequence[Words], processes: int) -> list[Job]:
    if e.gates.retries:
        if processes > 1:
            raise ConfigError(
                "gates.retries trains again after an evaluation, which several tasks cannot do together: set "
                "--config.gates.retries=0, or the site file's `nodes` of train to 1."
            )
        # Training, evaluation and what follows from failed gates are one job.
        return [Job("train", tuple(("pipeline", *base, *words) for words in own), after)]
    together = ("--config.parallel.processes=slurm",) if processes > 1 else ()
    train = Job("train", tuple(("train", *base, *words, *together) for words in own), after)
    if not e.lm.model:
        return [train]  # evaluation and report ask the language model
    each, before = train.array, ("train",)
    evaluate = Job("evaluate", tuple(("evaluate", *base, *words) for words in own), before, each)
    return [train, evaluate, Job("report", tuple(("report", *base, *words) for words in own), ("evaluate",), each)]


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


def _layers(e: Experiment) -> tuple[Words, ...]:
    return tuple(
        (f"--config.name={run}", f"--config.store={e.store or e.name}", f"--config.hook_point={point}")
        for point, run in layer_names(e).items()
    )


def _dictionaries(e: Experiment) -> Words:
    runs = ",".join(str(e.run_dir.with_name(name)) for name in layer_names(e).values())
    return (f"--config.study.dictionaries={runs}",)


# --- as a file -------------------------------------------------------------------------------------------------


def to_rows(jobs: Sequence[Job]) -> list[dict[str, object]]:
    """What jobs.json holds."""
    return [to_json(job) for job in jobs]


def from_rows(rows: object, where: str) -> tuple[Job, ...]:
    """The jobs of a jobs.json.

    Raises:
        DataError: it does not hold jobs, each after those that it waits for; names the file.
    """
    jobs: list[Job] = []
    try:
        # It is whatever the file holds: what cannot be iterated raises the TypeError below.
        for row in rows:  # type: ignore[attr-defined]
            tasks = tuple(tuple(map(_text, task)) for task in row["tasks"])
            job = Job(_text(row["name"]), tasks, tuple(map(_text, row["after"])), row["each"] is True)
            if not tasks or not re.fullmatch(r"[a-z]+", job.name) or not {j.name for j in jobs}.issuperset(job.after):
                raise ValueError(job.name)
            jobs.append(job)
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{where} does not hold jobs ({error!r}). Make them again: saejax jobs slurm, or local."
        ) from None
    return tuple(jobs)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value
