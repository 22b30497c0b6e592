"""The folder of an experiment's jobs: the experiment as a file, the jobs, their scripts, logs and records.

jobs/experiment.py   the settings, flat          jobs/logs/<job>...out
jobs/jobs.json       the jobs                    jobs/records/<task>.json
jobs/submitted.json  ids of Slurm                jobs/figures.json    what they took
"""

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment, experiment, from_json
from saejax.app.new_experiment import as_file, command_of
from saejax.core.config import differences, to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json, write_bytes, write_json
from saejax.plan.jobs.graph import Job, from_rows, jobs_of, to_rows
from saejax.plan.jobs.site import Site, site_of

# Of every path and name that goes into a script: Slurm gives % and spaces meanings of their own.
_PLAIN = r"[A-Za-z0-9._/+=@,-]+"
_NAME = "--config.name="


@dataclasses.dataclass(frozen=True)
class Folder:
    """The jobs of one experiment, and where they lie.

    Attributes:
        path: the folder, absolute.
        here: the folder from which the jobs run: paths of the experiment mean what they meant when it was made.
        python: words that start Python.
    """

    path: Path
    here: str
    experiment: Experiment
    jobs: tuple[Job, ...]
    site: Site
    python: tuple[str, ...] = (sys.executable,)

    @property
    def submitted(self) -> Path:
        return self.path / "submitted.json"

    def record(self, label: str) -> Path:
        """Where a task's record is."""
        return self.path / "records" / f"{label}.json"

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs a task: its words behind `saejax`, without what the current folder hides."""
        return [*self.python, "-P", "-m", "saejax", *words]

    def run_of(self, words: Sequence[str]) -> Path:
        """The folder of the run that a task with these words works on."""
        named = [word.removeprefix(_NAME) for word in words if word.startswith(_NAME)]
        return self.experiment.run_dir.with_name([self.experiment.name, *named][-1])

    def runs(self) -> list[Path]:
        """The folders of the runs that the jobs make; of a sweep its own."""
        trained = [task for job in self.jobs if job.name == "train" for task in job.tasks]
        return list(dict.fromkeys(map(self.run_of, trained or [()])))

    def to_json(self) -> dict[str, Any]:
        """What jobs.json holds."""
        return {
            "here": self.here,
            "python": list(self.python),
            "experiment": to_json(self.experiment),
            "site": to_json(self.site),
            "jobs": to_rows(self.jobs),
        }


def make(config: Any, out: str, site: Site, layers: bool) -> Folder:
    """Write the experiment and its jobs into the folder `out`; runs and stores lie where they would from here.

    Raises:
        ConfigError: settings that cannot be run as jobs, or a folder that a script cannot name.
        DataError: the folder holds jobs of another experiment that were begun.
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
    text = as_file(
        config, f"{e.name}, as its jobs run it.", f"saejax {command_of(config)} --config={path}/experiment.py"
    )
    jobs = jobs_of(e, command_of(config), f"{path}/experiment.py", layers, site.of("train").nodes)
    made = Folder(path, here, e, jobs, site, python)
    _refuse_other(made)
    write_bytes(path / "experiment.py", text.encode())
    write_json(path / "jobs.json", made.to_json())
    (path / "logs").mkdir(exist_ok=True)
    return made


def _refuse_other(made: Folder) -> None:
    begun = made.submitted.is_file() or any((made.path / "records").glob("*.json"))
    if not (begun and (made.path / "jobs.json").is_file()):
        return
    before, now = read_json(made.path / "jobs.json"), made.to_json()
    if changed := [line for key in ("experiment", "jobs") for line in differences(before.get(key), now[key], key)]:
        raise DataError(
            f"{made.path} holds jobs that were begun, of another experiment ({'; '.join(changed[:3])}). Choose another "
            "--out, or remove the folder."
        )


def read(path: str) -> Folder:
    """The jobs of a folder that `make` wrote.

    Raises:
        DataError: there are none, or jobs.json is damaged.
    """
    folder = Path(path).absolute()
    where = folder / "jobs.json"
    if not where.is_file():
        raise DataError(f"There are no jobs in {folder}. Make them: saejax jobs slurm --config=... --out={path}")
    content = read_json(where)
    if not isinstance(content, Mapping) or not isinstance(content.get("experiment"), dict):
        raise DataError(f"{where} does not hold jobs. Make them again: saejax jobs slurm, or local.")
    python, here = content.get("python"), content.get("here")
    if not (isinstance(here, str) and isinstance(python, list) and all(isinstance(word, str) for word in python)):
        raise DataError(f"{where} does not say how Python starts. Make the jobs again: saejax jobs slurm, or local.")
    jobs = from_rows(content.get("jobs"), str(where))
    site = site_of(content.get("site"), str(where))
    return Folder(folder, here, from_json(content["experiment"]), jobs, site, tuple(python))
