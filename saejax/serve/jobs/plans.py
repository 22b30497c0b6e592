"""Predictions of `saejax plan`, which jobs of their own make; kept by what was asked and what they are made from."""

import contextlib
import importlib.metadata
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment
from saejax.app.new_experiment import file_of
from saejax.core.errors import BusyError, DataError
from saejax.core.files import read_object, stamp, write_bytes
from saejax.jobs.job import ENDED, EXPERIMENT, chain
from saejax.plans.devices import PlanSettings, own_file
from saejax.plans.devices import device as known_device
from saejax.runs.made import digest
from saejax.serve.jobs.queue import Queue
from saejax.serve.problems import Problem
from saejax.store.manifest import MANIFEST

_MOST_PLANS = 200
_MOST_WAITING = 8
_RESULT = "plan.json"


class Plans:
    """Plans of experiments, made one at a time while the `queue` turns.

    Args:
        runs: the runs folder; plans lie in its .serve/plans.
        environment: of the jobs that make them.
        seconds: after which one is given up.
    """

    def __init__(self, runs: Path, environment: Mapping[str, str] | None = None, seconds: float = 300.0):
        self.queue, self._seconds = Queue(runs, 1, environment, kind="plan"), seconds
        self._lock = threading.Lock()

    def ask(self, e: Experiment, wanted: PlanSettings) -> dict[str, Any]:
        """A plan that is there, or begin one.

        Raises:
            ConfigError: settings that no file can hold, or an unknown device.
            BusyError: too many wait already.
        """
        if wanted.device:
            known_device(wanted.device)
        text = file_of(e, "What a plan of saejax serve is about.", "saejax plan")
        name = digest(text, vars(wanted), *made_from(e))[:32]
        folder = self.queue.folder / name
        with self._lock:
            try:
                again = self.state(name)["state"] == "failed"
            except (Problem, DataError):
                again = True
            if again:
                if len(self.queue.open_views()) >= _MOST_WAITING:
                    raise BusyError(f"{_MOST_WAITING} plans are being made already; ask again in a minute.")
                shutil.rmtree(folder, ignore_errors=True)
                self._forget()
                write_bytes(folder / EXPERIMENT, text)
                flags = {"config": folder / EXPERIMENT, "device": wanted.device, "out": folder / _RESULT}
                flags["devices"] = ",".join(map(str, wanted.devices))
                words = ("plan", *(f"--{flag}={value}" for flag, value in flags.items()))
                self.queue.write(folder, "plan", e.name, chain([words]))
        return self.state(name)

    def state(self, name: str) -> dict[str, Any]:
        """{id, state: running, done or failed, estimates, text, error} of a plan.

        Raises:
            Problem: 404: there is none.
            DataError: its files are damaged.
        """
        for other in self.queue.open_views():
            if other.state == "running" and (other.seconds or 0) > self._seconds:
                self._end(other.id)
        view = self.queue.view(name)
        answer = {"id": name, "state": "running", "estimates": [], "text": "", "error": ""}
        if view.state not in ENDED:
            return answer
        try:
            return answer | {"state": "done"} | read_object(self.queue.folder / name / _RESULT)
        except DataError:
            log = self.queue.job(name).log(0)[0].strip()
        errors = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
        if view.state == "stopped":
            late = f"It took more than {self._seconds:g} seconds; run `saejax plan` in a shell."
            errors = [late if (view.seconds or 0) > self._seconds else "The plan was not finished; ask again."]
        unsaid = f"It ended with exit code {view.code}. {log[-2000:]}"
        return answer | {"state": "failed", "error": errors[-1] if errors else unsaid}

    def close(self) -> None:
        """End what is being made."""
        for view in self.queue.open_views():
            self._end(view.id)

    def _end(self, name: str) -> None:
        with contextlib.suppress(Problem, DataError):  # it has ended meanwhile
            self.queue.cancel(name)

    def _forget(self) -> None:
        """Delete the oldest of many."""
        self.queue.folder.mkdir(parents=True, exist_ok=True)
        being_made = {view.id for view in self.queue.open_views()}
        folders = [folder for folder in self.queue.folder.iterdir() if folder.name not in being_made]
        folders.sort(key=lambda folder: folder.stat().st_mtime)
        for old in folders[: max(0, len(folders) - _MOST_PLANS)]:
            shutil.rmtree(old, ignore_errors=True)


def made_from(e: Experiment) -> Iterator[Any]:
    """All that a plan depends on beside the request: this version, the user's devices, the model and the stores."""
    yield importlib.metadata.version("saejax")
    yield own_file().read_bytes() if own_file().is_file() else b""
    for path in (f"{e.lm.model}/config.json", *(f"{e.store_dir(split)}/{MANIFEST}" for split in ("train", "heldout"))):
        yield stamp(path)
