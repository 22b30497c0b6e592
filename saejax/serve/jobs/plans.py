"""Predictions of `saejax plan`, each in a process of its own, kept by what was asked and what they are made from.

    python -P -m saejax.serve.jobs.plans <folder>

reads experiment.py and asked.json of the folder, and leaves plan.json there.
"""

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app import experiments
from saejax.app.experiment import Experiment, experiment
from saejax.app.new_experiment import as_file
from saejax.core.compiled import keep_programs
from saejax.core.errors import BusyError, ConfigError, SaejaxError
from saejax.core.files import finite, read_json, stamp, write_bytes, write_json
from saejax.plan.devices import device as known_device
from saejax.plan.devices import own_file
from saejax.runs.made import digest
from saejax.serve.jobs.experiments import as_settings
from saejax.serve.problems import Problem
from saejax.store.manifest import MANIFEST

_MOST_PLANS = 200
_MOST_WAITING = 8
_PLAN_SECONDS = 300.0
_SPLITS = ("train", "heldout")
_RESULT, _ASKED, _EXPERIMENT, _LOG = "plan.json", "asked.json", "experiment.py", "log.txt"


class Plans:
    """Plans of experiments, made one at a time.

    Args:
        folder: where they are kept.
        environment: of the processes that make them.
        seconds: after which one is given up.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, seconds: float = _PLAN_SECONDS):
        self._folder, self._seconds = folder, seconds
        self._environment = dict(os.environ if environment is None else environment)
        self._one = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes] | None] = {}
        self._closed = False

    def ask(self, e: Experiment, device: str, devices: Sequence[int]) -> dict[str, Any]:
        """A plan that is there, or begin one.

        Raises:
            ConfigError: settings that no file can hold, or an unknown device.
            BusyError: too many wait already.
        """
        if device:
            known_device(device)
        try:
            text = as_file(as_settings(e), "What a plan of saejax serve is about.", "saejax plan").encode()
        except UnicodeEncodeError:
            raise ConfigError("A setting holds half of a letter (a lone surrogate); send UTF-8.") from None
        request = {"device": device, "devices": list(devices)}
        name = digest(text, request, *made_from(e))[:32]
        state = self.state(name) if (self._folder / name / _RESULT).is_file() else None
        if state is not None and state["state"] == "done":
            return state
        if name not in self._running:
            if len(self._running) >= _MOST_WAITING:
                raise BusyError(f"{_MOST_WAITING} plans are being made already; ask again in a minute.")
            self._running[name] = None
            self._forget()
            write_bytes(self._folder / name / _EXPERIMENT, text)
            write_json(self._folder / name / _ASKED, request)
            (self._folder / name / _RESULT).unlink(missing_ok=True)
            threading.Thread(target=self._make, args=(name,), name=f"plan {name}", daemon=True).start()
        return self.state(name)

    def state(self, name: str) -> dict[str, Any]:
        """{id, state: running, done or failed, estimates, text, error} of a plan.

        Raises:
            Problem: 404: there is none.
        """
        if not re.fullmatch(r"[0-9a-f]{32}", name) or not (self._folder / name).is_dir():
            raise Problem(404, f"There is no plan {name[:80]!r}.")
        nothing = {"id": name, "estimates": [], "text": "", "error": ""}
        if name in self._running:
            return nothing | {"state": "running"}
        try:
            return nothing | read_json(self._folder / name / _RESULT)
        except SaejaxError:
            return nothing | {"state": "failed", "error": "The plan was not finished; ask again."}

    def close(self) -> None:
        """End what is being made."""
        self._closed = True
        for process in list(self._running.values()):
            if process is not None:
                process.kill()

    def _make(self, name: str) -> None:
        folder = self._folder / name
        try:
            with self._one, (folder / _LOG).open("wb") as log:
                if self._closed:
                    return
                with subprocess.Popen(
                    [sys.executable, "-P", "-m", "saejax.serve.jobs.plans", str(folder)],
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                ) as process:
                    self._running[name] = process
                    try:
                        process.wait(self._seconds)
                    except subprocess.TimeoutExpired:
                        process.kill()
                        error = f"It took more than {self._seconds:g} seconds; run `saejax plan` in a shell."
                        write_json(folder / _RESULT, {"state": "failed", "error": error})
            if not (folder / _RESULT).is_file() and not self._closed:
                output = (folder / _LOG).read_text(errors="replace").strip()[-2000:]
                code = process.returncode
                why = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                write_json(folder / _RESULT, {"state": "failed", "error": f"It ended with {why}. {output}"})
        except (OSError, SaejaxError):  # the disk is full, or the folder was deleted: it counts as not finished
            pass
        finally:
            self._running.pop(name, None)

    def _forget(self) -> None:
        """Delete the oldest of many."""
        self._folder.mkdir(parents=True, exist_ok=True)
        folders = sorted(
            (folder for folder in self._folder.iterdir() if folder.name not in self._running),
            key=lambda folder: folder.stat().st_mtime,
        )
        for old in folders[: max(0, len(folders) - _MOST_PLANS)]:
            shutil.rmtree(old, ignore_errors=True)


def made_from(e: Experiment) -> Iterator[Any]:
    """All that a plan depends on beside the request: this version, the user's devices, the model and the stores."""
    yield importlib.metadata.version("saejax")
    yield own_file().read_bytes() if own_file().is_file() else b""
    for path in (f"{e.lm.model}/config.json", *(f"{e.store_dir(split)}/{MANIFEST}" for split in _SPLITS)):
        yield stamp(path)


def make_plan(folder: Path) -> int:
    """Plan the experiment of a folder, and write both forms of the plan into plan.json."""
    from saejax.plan.command import content, plan

    keep_programs()
    request = read_json(folder / _ASKED)
    e = experiment(experiments.settings(experiments.load(folder / _EXPERIMENT)))
    try:
        made = plan(e, request["device"], request["devices"])
    except SaejaxError as error:
        write_json(folder / _RESULT, {"state": "failed", "error": str(error)})
        return error.exit_code
    result = {"state": "done", "fits": made.fits, "estimates": finite(content(made.estimates))}
    write_json(folder / _RESULT, result | {"text": "\n".join(made.lines)})
    return 0


if __name__ == "__main__":
    sys.exit(make_plan(Path(sys.argv[1])))
