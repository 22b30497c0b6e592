"""A job: commands of saejax, in stages that wait for each other. Its folder holds all that is known of it.

    job.json          what to run, once and for all          experiment.py   the settings, as the commands read them
    asked.json        which start is asked for, or its end   records/        each start of every task, how it ended
    starts.json       each start of a runner, how it ended   log.txt, logs/  what a runner and its tasks print
    submitted.json    ids of Slurm

Its runner holds the folder's lease. A number in a file may by now be another process's, so it is asked for besides.
"""

import codecs
import dataclasses
import functools
import os
import platform
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.errors import EXIT_PREEMPTED, DataError
from saejax.core.files import finite, opened, read_bounded, read_object, stamp, value_of, write_json
from saejax.core.lease import held
from saejax.jobs.task import left_of, read_starts

if TYPE_CHECKING:
    from saejax.app.experiment import Experiment

# States of a job that nothing works at.
ENDED = ("done", "failed", "stopped")
JOB, EXPERIMENT, LOG = "job.json", "experiment.py", "log.txt"
_ASKED, _STARTS, _SUBMITTED = "asked.json", "starts.json", "submitted.json"
_LARGEST = 8 << 20
_PIECE = 1 << 18
_NUMBER, _NONE = (int, float), type(None)

Words = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command, or an array of them.

    Attributes:
        name: of its script, and of the stage in every table.
        tasks: words behind `saejax` of each element of the array; a stage that is no array has one.
        after: the stages that must have ended well before it starts.
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
        """Names of the tasks: train, or train.0, train.1, ..."""
        return tuple(f"{self.name}.{i}" for i in range(len(self.tasks))) if self.array else (self.name,)


def chain(commands: Sequence[Sequence[str]]) -> tuple[Stage, ...]:
    """Stages of one command each, which are given by their words behind `saejax`: each waits for the one before it."""
    names = [f"{at}-{words[0]}" for at, words in enumerate(commands)]
    return tuple(
        Stage(name, (tuple(words),), tuple(names[at - 1 : at]))
        for at, (name, words) in enumerate(zip(names, commands, strict=True))
    )


@dataclasses.dataclass(frozen=True)
class Job:
    """Commands that are to be run, and the folder that says how far they are.

    Attributes:
        path: the folder, absolute.
        name: of the run that it makes.
        command: of `saejax`, which the stages are the whole of.
        here: the folder from which the tasks run.
        python: words that start Python.
        requeues: times that a task that others stopped is started again.
        created: seconds since 1970.
        settings: the experiment's, as its JSON has them; empty where the job's commands alone know them.
    """

    path: Path
    name: str
    command: str
    stages: tuple[Stage, ...]
    here: str
    python: tuple[str, ...] = (sys.executable,)
    requeues: int = 0
    created: float = 0.0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    # --- what is asked for -----------------------------------------------------------------------------------------

    def write(self) -> None:
        """Make the folder a job that waits."""
        self.ask(1)
        # With this file it is a job.
        write_json(self.path / JOB, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Content of job.json."""
        return finite({key: value for key, value in dataclasses.asdict(self).items() if key != "path"})

    @functools.cached_property
    def experiment(self) -> "Experiment":
        """The experiment of `settings`."""
        # A runner needs none, and starts in the time that JAX would take to import.
        from saejax.app.experiment import from_json

        return from_json(dict(self.settings))

    @property
    def tasks(self) -> dict[str, Words]:
        """{label: words behind `saejax`}, each after those that it waits for."""
        return {label: words for stage in self.stages for label, words in zip(stage.labels, stage.tasks, strict=True)}

    def waits_for(self, label: str) -> list[str]:
        """Labels of the tasks that must have ended well before this one."""
        stage = next(stage for stage in self.stages if label in stage.labels)
        at = stage.labels.index(label)
        before = [other.labels for other in self.stages if other.name in stage.after]
        return [name for labels in before for name in ([labels[at]] if stage.each else labels)]

    def command_of(self, words: Sequence[str]) -> list[str]:
        """The command of a task: its words behind `saejax`, without what the current folder hides."""
        return [*self.python, "-P", "-m", "saejax", *words]

    def recorded(self, label: str, command: Sequence[str]) -> list[str]:
        """A command in the process that keeps the record of a task."""
        return [*self.python, "-P", "-m", "saejax.jobs.task", str(self.path), label, "--", *command]

    def asked(self) -> tuple[int, bool]:
        """(number of the start that is asked for, whether it was cancelled).

        Raises:
            DataError: the file is missing or damaged.
        """
        content = read_object(self.path / _ASKED, _LARGEST)
        if not _has(content, number=int):
            raise DataError(f"{self.path / _ASKED} is damaged; delete the folder.")
        return content["number"], bool(content.get("cancelled"))

    def ask(self, number: int, cancelled: bool = False) -> None:
        """Ask for start `number`, or for its end."""
        write_json(self.path / _ASKED, {"number": number, "cancelled": cancelled})

    # --- what became of it -----------------------------------------------------------------------------------------

    def starts(self) -> list[dict[str, Any]]:
        """{number, host, pid, started, ended, code} of each start of a runner; its end and code are null until then.

        Raises:
            DataError: the record is damaged.
        """
        path = self.path / _STARTS
        if not path.is_file():
            return []
        content = value_of(path, read_bounded(path, _LARGEST))
        ends: dict[str, Any] = {"ended": (*_NUMBER, _NONE), "code": (int, _NONE)}
        if not isinstance(content, list) or not all(
            _has(start, number=int, host=str, pid=int, started=_NUMBER, **ends) and 0 <= start["pid"] < 1 << 31
            for start in content
        ):
            raise DataError(f"{path} is damaged; delete it, and the job counts as not begun.")
        return content

    def record(self, starts: Sequence[Mapping[str, Any]]) -> None:
        write_json(self.path / _STARTS, list(starts))

    def record_of(self, label: str) -> Path:
        """The file with a task's starts."""
        return self.path / "records" / f"{label}.json"

    def submitted(self) -> dict[str, str]:
        """{stage: its id in Slurm}; empty where none was submitted.

        Raises:
            DataError: submitted.json is damaged.
        """
        path = self.path / _SUBMITTED
        if not path.is_file():
            return {}
        ids = read_object(path, _LARGEST).get("jobs")
        if not isinstance(ids, dict) or not all(isinstance(i, str) and i.isdecimal() for i in ids.values()):
            raise DataError(f'{path} does not hold ids of jobs; write {{"jobs": {{"train": "123"}}}} there.')
        return ids

    def begun(self) -> bool:
        """Anything of it was submitted or started."""
        return (self.path / _SUBMITTED).is_file() or any((self.path / "records").glob("*.json"))

    def runner(self) -> tuple[str, int] | None:
        """(machine, process) that runs it; None where none does. The lease says so, and the record by which process.

        Raises:
            DataError: the record is damaged.
        """
        starts = self.starts()
        running = held(self.path) is not None and bool(starts) and starts[-1]["code"] is None
        return (starts[-1]["host"], starts[-1]["pid"]) if running else None

    def left_running(self, label: str) -> int | None:
        """The process group of the task's last start, where it goes on here, whatever became of its runner.

        Raises:
            DataError: its record is damaged.
        """
        starts = read_starts(self.record_of(label))
        pid = starts[-1].get("pid") if starts else None
        if not isinstance(pid, int) or starts[-1].get("code") is not None or starts[-1].get("host") != platform.node():
            return None
        return pid if left_of(pid, self.path) else None

    def alive(self) -> bool:
        """A runner works at it, or what a killed runner had started goes on."""
        starts = self.starts()
        if held(self.path) is not None:
            return True
        return bool(starts) and starts[-1]["code"] is None and any(map(self.left_running, self.tasks))

    def tell_to_end(self) -> list[str]:
        """SIGTERM to the runner of this machine, or to what a killed runner has left; a line for each that was told.

        Raises:
            DataError: the job runs on another machine.
        """
        if (runner := self.runner()) is not None:
            host, pid = runner
            if host != platform.node():
                raise DataError(f"The jobs run on {host}; cancel them there, or end its process {pid} by SIGTERM.")
            os.kill(pid, signal.SIGTERM)
            return [f"process {pid}"]
        told = []
        for label in self.tasks:
            if group := self.left_running(label):
                os.killpg(group, signal.SIGTERM)
                told.append(f"{label}: process {group}")
        return told

    def signature(self) -> tuple[Any, ...]:
        """Equal as long as nothing that is written of the job has changed."""
        return tuple(stamp(self.path / name) for name in (_ASKED, _STARTS, LOG))

    # --- its log ---------------------------------------------------------------------------------------------------

    def log_bytes(self) -> int:
        known = stamp(self.path / LOG)
        return known.size if known else 0

    def log(self, at: int, most: int = _PIECE) -> tuple[str, int]:
        """(text of the log from byte `at` on, at most `most` bytes of it, where the next piece begins)."""
        try:
            with opened(self.path / LOG) as handle:
                handle.seek(at)
                raw = handle.read(most)
        except FileNotFoundError:
            raw = b""
        except OSError as error:
            raise DataError(f"{self.path / LOG} cannot be read: {error.strerror}.") from None
        # A letter of several bytes whose rest is still to come stays for the next piece.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(raw)
        return text, at + len(raw) - len(decoder.getstate()[0])


def read_job(path: str | Path) -> Job:
    """The job of a folder.

    Raises:
        DataError: there is none, or job.json is damaged.
    """
    folder = Path(path).absolute()
    where = folder / JOB
    if not where.is_file():
        raise DataError(f"There are no jobs in {folder}. Make them: saejax jobs slurm --config=... --out={path}")
    content = read_object(where, _LARGEST)
    try:
        stages = _read_stages(content["stages"])
        kinds: dict[str, Any] = {"requeues": int, "created": _NUMBER, "settings": dict}
        if not _has(content, name=str, command=str, here=str, python=list, **kinds) or not _texts(content["python"]):
            raise ValueError("name, command, here, python, requeues, created or settings")
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"{where} does not hold jobs ({error!r}). Make them again, or delete the folder.") from None
    python = tuple(content["python"])
    return Job(
        folder, content["name"], content["command"], stages, content["here"], python, **{k: content[k] for k in kinds}
    )


def state_of(start: Mapping[str, Any] | None, alive: bool | None) -> str:
    """The state of a job or a task: waiting, running, done, failed, stopped (saved; it can continue), killed, unknown.

    Args:
        start: the last one, as its record has it; None where it was not started.
        alive: something of it runs; None where nobody here can know.
    """
    if start is None:
        return "waiting"
    if (code := start.get("code")) is not None:
        return {0: "done", EXIT_PREEMPTED: "stopped"}.get(code, "failed")
    return "unknown" if alive is None else "running" if alive else "killed"


def _read_stages(rows: Sequence[Mapping[str, Any]]) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for row in rows:
        stage = Stage(row["name"], tuple(map(tuple, row["tasks"])), tuple(row["after"]), row["each"] is True)
        named = re.fullmatch(r"[a-z0-9-]+", stage.name) and {s.name for s in stages}.issuperset(stage.after)
        if not stage.tasks or not named or not all(map(_texts, stage.tasks)):
            raise ValueError(stage.name)
        stages.append(stage)
    return tuple(stages)


def _texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _has(content: Any, **kinds: type | tuple[type, ...]) -> bool:
    """The content is an object that has each of the keys, with values of these very types."""
    return isinstance(content, dict) and all(
        key in content and type(content[key]) in (kind if isinstance(kind, tuple) else (kind,))
        for key, kind in kinds.items()
    )
