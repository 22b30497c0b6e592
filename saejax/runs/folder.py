"""The names of everything in the folder of a run and of a sweep, each spelled here and nowhere else."""

import dataclasses
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from saejax.core.errors import DataError, SaejaxError
from saejax.core.files import read_if_there, read_object, value_of, write_json
from saejax.core.metrics import last_rows, read_metrics
from saejax.core.places import is_run_config
from saejax.runs.shape import Maybe, fault

T = TypeVar("T")


def attempt_name(number: int) -> str:
    return f"attempt-{number}"


# The run itself, among its attempts.
FIRST = attempt_name(0)
_ATTEMPT = re.compile(r"attempt-[1-9]\d*")
_LARGEST_ATTEMPTS = 1 << 20


class _Name:
    """A file or folder within a folder: `Run.config` is its name, `Run(path).config` its place."""

    def __init__(self, name: str):
        self._name = name

    @overload
    def __get__(self, folder: None, owner: type) -> str: ...

    @overload
    def __get__(self, folder: "Run | Sweep", owner: type) -> Path: ...

    def __get__(self, folder: "Run | Sweep | None", owner: type) -> str | Path:
        return self._name if folder is None else folder.path / self._name


@dataclasses.dataclass(frozen=True)
class Run:
    """The folder of one experiment's training and what is made from it; also that of a dictionary that was evaluated.

    Of a table, a picture and a page that lie beside an artifact the names are the artifact's with other endings.
    """

    path: Path

    # Of the training.
    config = _Name("config.json")
    environment = _Name("environment.json")
    provenance = _Name("provenance.json")
    metrics = _Name("metrics.jsonl")
    checkpoints = _Name("checkpoints")
    stages = _Name("stages.json")
    stream = _Name("stream.jsonl")
    text = _Name("text.jsonl")
    profile = _Name("profile.json")
    trace = _Name("profile")
    tensorboard = _Name("tensorboard")
    wandb = _Name("wandb.json")
    attempts = _Name("attempts.json")
    escalation = _Name("escalation.md")
    # Of evaluation.
    evaluation = _Name("eval.json")
    documents = _Name("documents.npz")
    probes = _Name("probes.json")
    truth = _Name("truth.json")
    prefix = _Name("prefix.json")
    # Of the report: what the page is made from, the page, and what people and models say of features.
    features = _Name("features.sqlite")
    norms = _Name("norms.json")
    report = _Name("report.json")
    page = _Name("report.html")
    explanations = _Name("explanations.jsonl")
    notes = _Name("notes.jsonl")
    # Folders of dictionaries from anywhere, one each, with their table beside them.
    evaluated = _Name("evaluated")
    scored = _Name("scored")
    table = _Name("table.md")

    @property
    def exists(self) -> bool:
        """It is the folder of a run: its config.json is an experiment's, or lies beside the record of a training."""
        try:
            trained = os.path.lexists(self.environment) or os.path.lexists(self.metrics)
            return os.path.lexists(self.config) and (trained or is_run_config(self.config))
        except OSError:  # what may not be looked into is nothing; whoever reads it says why
            return False

    @property
    def is_dictionary(self) -> bool:
        """It is the folder of a dictionary that was evaluated without its training."""
        return self.evaluation.is_file() and not self.exists

    @property
    def is_attempt(self) -> bool:
        """It is an attempt of the run above it."""
        return bool(_ATTEMPT.fullmatch(self.path.name)) and Run(self.path.parent).attempts.is_file()

    def dictionaries(self) -> list[str]:
        """Names of the dictionaries that were evaluated in this run's folder."""
        inner = self.evaluated.iterdir() if self.evaluated.is_dir() else ()
        return sorted(path.name for path in inner if Run(path).is_dictionary)

    def wandb_id(self) -> str:
        """The id of its run of Weights & Biases, drawn when it is first asked for.

        Raises:
            DataError: wandb.json is damaged.
        """
        if not self.wandb.is_file():
            write_json(self.wandb, {"id": secrets.token_hex(8)})
        content = read_object(self.wandb)
        if wrong := fault(content, {"id": str}):
            raise DataError(f"{self.wandb} is damaged: {wrong}; delete it, and a new run of wandb begins.")
        return str(content["id"])

    def rows(self) -> list[dict[str, Any]]:
        """One dict a step, ascending: the training's and the validation's row of a step in one; [] without a file."""
        by_step: dict[int, dict[str, Any]] = {}
        for row in read_metrics(self.metrics) if os.path.lexists(self.metrics) else ():
            by_step.setdefault(row["step"], {}).update(row)
        return list(by_step.values())

    def last_row(self) -> dict[str, float | None]:
        """The newest value of each key among the last rows (`core.metrics.last_rows`)."""
        return last_rows(self.metrics)

    def read_stages(self) -> dict[str, Any]:
        """{stage: its totals}; empty where no stage was run."""
        return read_object(self.stages) if self.stages.is_file() else {}

    def record_stage(self, stage: str, tokens: int, seconds: float, **last: float) -> None:
        """Add a session's tokens and seconds to a stage's totals; `last` replaces what is there."""
        stages = self.read_stages()
        before = stages.get(stage, {"tokens": 0, "seconds": 0.0})
        tokens, seconds = before["tokens"] + tokens, before["seconds"] + seconds
        total = {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}
        write_json(self.stages, stages | {stage: before | total | last})

    def attempt(self, name: str) -> "Run":
        """One of the trainings under gates.retries; the first is the run itself."""
        return self if name == FIRST else Run(self.path / name)

    def read_attempts(self) -> dict[str, Any] | None:
        """attempts.json: {"kept", "why", "attempts": [{"name", "begins_from", "changes", "gates", "metrics"}]}.

        None where the run was not tried again.

        Raises:
            DataError: it is damaged.
        """
        raw = read_if_there(self.attempts, _LARGEST_ATTEMPTS)
        if raw is None:
            return None
        remedy = f"delete it, and run `saejax pipeline` again: what is trained in {self.path} stays"
        content = value_of(self.attempts, raw, remedy)
        if wrong := fault(content, _ATTEMPTS):
            raise DataError(f"{self.attempts} is damaged: {wrong}; {remedy}.")
        return content

    def counted(self) -> "Run":
        """The attempt that counts; the run itself where it was not tried again.

        Raises:
            DataError: attempts.json is damaged, or the attempt's folder is gone.
        """
        record = self.read_attempts()
        run = self.attempt(record["kept"] if record else FIRST)
        if run is not self and not run.config.is_file():
            raise DataError(f"{self.attempts} keeps {run.path.name}, and {run.path} holds no run. Bring it back.")
        return run


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The folder of a sweep: what its members are and the experiment they were made from, and its result."""

    path: Path

    members = _Name("sweep_config.json")
    experiment = _Name("sweep_experiment.json")
    result = _Name("sweep.json")
    groups = _Name("groups")

    @property
    def exists(self) -> bool:
        """It is the folder of a sweep."""
        return self.members.is_file()


# What lies beside runs in the folder of a run or a sweep: a run of this name would be taken for it, and never listed.
RESERVED = (Run.checkpoints, Sweep.groups, Run.evaluated)


def _one_after_the_other(attempts: list[dict[str, Any]]) -> str:
    """Each has its number as a name, and begins from one before it."""
    for i, attempt in enumerate(attempts):
        if attempt["name"] != attempt_name(i) or (i and attempt["begins_from"] not in map(attempt_name, range(i))):
            return f"holds as number {i} {attempt['name'][:80]!r}, which begins from {attempt['begins_from'][:80]!r}"
    return ""


def _keeps_one(content: dict[str, Any]) -> str:
    kept = content["kept"] in [attempt["name"] for attempt in content["attempts"]]
    return "" if kept else f"keeps {content['kept'][:80]!r}, which is none of its attempts"


_ATTEMPT_SHAPE = {
    "name": str,
    "begins_from": str,
    "changes": [{"before": float, "after": float, "gates": [str]}],
    "metrics": {...: Maybe(float)},
    "gates": Maybe([{"name": str, "passed": bool}]),
}
_ATTEMPTS = ({"kept": str, "why": str, "attempts": ([_ATTEMPT_SHAPE], _one_after_the_other)}, _keeps_one)


class Reading:
    """Reads the files of one run: of one that is damaged the error is kept in `errors`, and the others are read."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def of(self, read: Callable[[], T], otherwise: T) -> T:
        """The result of `read`, or `otherwise` where a file is damaged or may not be read."""
        try:
            return read()
        except (SaejaxError, OSError) as error:
            self.errors.append(str(error))
            return otherwise

    def error(self, before: str | None = None) -> str | None:
        """The errors in one line; None without any."""
        return " ".join(dict.fromkeys(filter(None, (before, *self.errors)))) or None
