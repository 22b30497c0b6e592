"""The jobs of a runs folder: begun in order, at most so many at a time, found again by the next server.

Jobs lie in .serve/jobs/<id> of the folder and plans in .serve/plans/<id> (saejax.jobs.job). A runner outlives the
server that starts it.
"""

import contextlib
import dataclasses
import logging
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment
from saejax.app.new_experiment import file_of
from saejax.core.errors import EXIT_PREEMPTED, BusyError, DataError, SaejaxError
from saejax.core.files import write_bytes, writing
from saejax.core.lease import held
from saejax.jobs.job import ENDED, EXPERIMENT, JOB, LOG, Job, Stage, chain, read_job, state_of
from saejax.serve.problems import Problem
from saejax.serve.site import OWN

MOST_WAITING = 100
MOST_LISTED = 1000
_START_SECONDS = 120.0
_TURN_SECONDS = 0.25
_AFTER_MISTAKE = 5.0
# Commands that write the run's folder: two of them at a time would refuse each other.
_WRITING = ("train", "pipeline", "sweep")


# A training's own messages are short; of a log that is longer than this, the last line is not looked for further back.
_TAIL = 4096


@dataclasses.dataclass(frozen=True)
class View:
    """A job as it is now.

    Attributes:
        name, run: the run's name below the runs folder; `run` only once the run's folder is there.
        state: queued, starting, running, done, failed or stopped (saved; it can continue).
        code: of the last start, where it has ended.
        started, ended, seconds: of the last start, in seconds (since 1970).
        pid: of its runner, while it runs.
        words: of each command.
        last: the last line of the log.
    """

    id: str
    command: str
    name: str
    sweep: bool
    state: str
    code: int | None
    created: float
    started: float | None
    ended: float | None
    seconds: float | None
    pid: int | None
    words: list[list[str]]
    run: str | None
    log_bytes: int
    can_continue: bool
    last: str


def view_of(job: Job, runs: Path, starting: bool = False) -> View:
    """The job as it is now. `starting`: its runner is being started.

    Raises:
        DataError: a damaged file.
    """
    # Twice, where the first look finds a start that begins: it is written by a runner that holds the lease.
    for _ in range(2):
        # Before the files: a runner that ends in between has written its code.
        alive = job.alive()
        (number, cancelled), starts = job.asked(), job.starts()
        last = starts[-1] if starts and starts[-1]["number"] >= number else None
        code = None if last is None else last["code"]
        if last is None or code is not None or alive:
            break
    state = state_of(last, alive)
    if state == "waiting":
        state = "stopped" if cancelled else "starting" if starting or alive else "queued"
        code = EXIT_PREEMPTED if cancelled else None
    elif state == "killed":
        state = "failed"
    started, ended = (last or {}).get("started"), (last or {}).get("ended")
    tail, _ = job.log(max(0, job.log_bytes() - _TAIL), _TAIL)
    sweep = job.command == "sweep"
    return View(
        id=job.path.name,
        command=job.command,
        name=job.name,
        sweep=sweep,
        state=state,
        code=code,
        created=job.created,
        started=started,
        ended=ended,
        seconds=None if started is None else (ended or (time.time() if state == "running" else started)) - started,
        pid=last["pid"] if last and state == "running" else None,
        words=[["saejax", *words] for words in job.tasks.values()],
        run=job.name if (runs / job.name).is_dir() and not sweep else None,
        log_bytes=job.log_bytes(),
        can_continue=state in ("failed", "stopped"),
        last=next((line.strip()[:300] for line in reversed(re.split(r"[\r\n]+", tail)) if line.strip()), ""),
    )


def new_id() -> str:
    """Ids of later jobs sort after those of earlier ones."""
    now = time.time()
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{int(now % 1 * 1_000_000):06d}-{secrets.token_hex(3)}"


def _is_id(text: str) -> bool:
    return re.fullmatch(r"[0-9]{8}-[0-9]{6}-[0-9]{6}-[0-9a-f]{6}|[0-9a-f]{32}", text) is not None


class Queue:
    """All jobs of a runs folder.

    Args:
        runs: the runs folder; jobs lie in its .serve/<kind>s.
        at_once: jobs that run at a time.
        environment: of the jobs' processes.
        here: the folder in which they run.
    """

    def __init__(
        self,
        runs: Path,
        at_once: int = 1,
        environment: Mapping[str, str] | None = None,
        here: Path = Path(),
        kind: str = "job",
    ):
        self.runs, self._at_once, self._kind = runs, at_once, kind
        # What a command prints is in the log at once.
        self._environment = {**(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"}
        self._here = here.absolute()
        self.folder = runs / OWN / f"{kind}s"
        self._lock = threading.RLock()
        self._turn = threading.Lock()
        self._news = threading.Event()
        self._starting: set[str] = set()
        self._ended: dict[str, tuple[tuple[Any, ...], View]] = {}
        self._open = set(self._ids())

    # --- what there is -------------------------------------------------------------------------------------------

    def views(self, most: int = MOST_LISTED) -> list[View]:
        """The jobs, newest first; a job whose files are damaged is left out."""
        views = []
        for name in sorted(self._ids(), reverse=True)[:most]:
            with contextlib.suppress(SaejaxError):
                views.append(self.view(name))
        return views

    def view(self, name: str) -> View:
        """One job.

        Raises:
            Problem: 404: there is none.
            DataError: its files are damaged.
        """
        job = self.job(name)
        signature = job.signature()
        remembered = self._ended.get(name)
        if remembered is not None and remembered[0] == signature:
            return remembered[1]
        view = view_of(job, self.runs, name in self._starting)
        if view.state in ENDED:
            if len(self._ended) > 2 * MOST_LISTED:
                self._ended.clear()
            self._ended[name] = (signature, view)
        return view

    def job(self, name: str) -> Job:
        """A job by its id.

        Raises:
            Problem: 404: there is none.
            DataError: its file is damaged.
        """
        if not _is_id(name) or not (self.folder / name / JOB).is_file():
            raise Problem(404, f"There is no {self._kind} {name[:80]!r}.")
        return read_job(self.folder / name)

    def expects(self, run: str) -> bool:
        """A job that has not ended is to write a run."""
        return any(view.name == run for view in self.open_views())

    def open_views(self) -> list[View]:
        """The jobs that have not ended, oldest first."""
        views = []
        with self._lock:
            for name in tuple(self._open):
                try:
                    view = self.view(name)
                except SaejaxError:
                    self._open.discard(name)
                    continue
                if view.state in ENDED:
                    self._open.discard(name)
                else:
                    views.append(view)
        return sorted(views, key=lambda view: (view.created, view.id))

    # --- what can be done to them --------------------------------------------------------------------------------

    def add(self, command: str, e: Experiment, before: Sequence[Sequence[str]] = ()) -> View:
        """Write a new job: the `saejax` commands `before`, then `saejax <command>` of the experiment. `turn` starts it.

        Raises:
            ConfigError: settings that no file can hold.
            BusyError: the run is being written, by another job or by others; or too many jobs wait.
        """
        name = e.run_dir.relative_to(self.runs).as_posix()
        with self._lock:
            self._refuse_second(command, name, e.run_dir)
            path = self.folder / new_id()
            text = file_of(e, "What a job of saejax serve runs.", f"saejax {command} --config={EXPERIMENT}")
            write_bytes(path / EXPERIMENT, text)
            self.write(path, command, name, chain([*before, (command, f"--config={path / EXPERIMENT}")]))
        return self.view(path.name)

    def write(self, path: Path, command: str, name: str, stages: tuple[Stage, ...]) -> Job:
        """A new job in the folder `path`, which waits for its turn."""
        job = Job(path, name, command, stages, str(self._here), created=time.time())
        job.write()
        self._open.add(path.name)
        self._news.set()
        return job

    def cancel(self, name: str) -> View:
        """Take a job out of the queue, or tell it to save and end.

        Raises:
            Problem: 404: there is none; 409: it has ended.
        """
        with self._lock:
            job = self.job(name)
            view = self.view(name)
            if view.state in ENDED:
                raise Problem(409, f"The job has ended ({view.state}).")
            job.ask(job.asked()[0], cancelled=True)
            with contextlib.suppress(ProcessLookupError):
                job.tell_to_end()
        return self.view(name)

    def again(self, name: str) -> View:
        """Ask for one more start of a job that was stopped or failed: its command continues where it was.

        Raises:
            Problem: 404: there is none; 409: it runs, or is done.
            BusyError: as `add`.
        """
        with self._lock:
            job, view = self.job(name), self.view(name)
            if not view.can_continue:
                raise Problem(409, f"The job is {view.state}; only one that was stopped or failed continues.")
            self._refuse_second(view.command, view.name, self.runs / view.name)
            number = max([job.asked()[0], *(start["number"] for start in job.starts())])
            job.ask(number + 1)
            self._open.add(name)
        self._news.set()
        return self.view(name)

    def turn(self) -> None:
        """Start the jobs whose turn it is. Takes the seconds that their runners need to start."""
        with self._turn:
            while name := self._next():
                try:
                    self._start(name)
                finally:
                    self._starting.discard(name)

    @contextlib.contextmanager
    def turning(self, seconds: float = _TURN_SECONDS) -> Iterator[None]:
        """For the duration of the block jobs start when their turn has come; those that run go on after it."""
        ended = threading.Event()

        def loop() -> None:
            while not ended.is_set():
                self._news.clear()
                try:
                    self.turn()
                except Exception:  # a full disk, say: the others wait until it has room
                    logging.getLogger(__name__).exception("A job could not be started")
                    ended.wait(_AFTER_MISTAKE)
                self._news.wait(seconds)

        thread = threading.Thread(target=loop, name="jobs", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self._news.set()
            thread.join(_AFTER_MISTAKE)

    def stop_run(self, name: str, folder: Path) -> int:
        """SIGTERM to the process of this machine that writes a run's folder: it saves and ends. Returns its pid.

        Raises:
            Problem: 409: nobody writes it, or a process of another machine; 403: the process is another user's.
        """
        holder = held(folder)
        if holder is None:
            raise Problem(409, f"Nobody trains {name}.")
        pid, _, machine = holder.removeprefix("pid ").partition(" on ")
        if machine != socket.gethostname() or not pid.isdigit() or int(pid) in (0, 1, os.getpid()):
            raise Problem(409, f"{name} is trained by {holder}, which cannot be told from here.")
        try:
            os.kill(int(pid), signal.SIGTERM)
        except ProcessLookupError:
            raise Problem(409, f"Nobody trains {name} any more.") from None
        except PermissionError:
            raise Problem(403, f"{name} is trained by another user's process ({holder}).") from None
        return int(pid)

    # --- inside --------------------------------------------------------------------------------------------------

    def _ids(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            yield from [entry.name for entry in entries if _is_id(entry.name)]

    def _next(self) -> str | None:
        """The job to start now."""
        with self._lock:
            there = self.open_views()
            waiting = [view.id for view in there if view.state == "queued"]
            if not waiting or len(there) - len(waiting) >= self._at_once:
                return None
            self._starting.add(waiting[0])
            return waiting[0]

    def _start(self, name: str) -> None:
        job = self.job(name)
        with writing(job.path), (job.path / LOG).open("ab") as log:
            try:
                code = subprocess.run(
                    [sys.executable, "-P", "-m", "saejax.jobs.runner", str(job.path)],
                    cwd=self._here,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=_START_SECONDS,
                    check=False,
                ).returncode
            except (OSError, subprocess.TimeoutExpired) as error:
                log.write(f"error: the job's process cannot be started: {error}\n".encode())
                code = 1
        if code and not job.alive():
            # Else it would be started again and again.
            starts, (number, _) = job.starts(), job.asked()
            if not starts or starts[-1]["number"] < number:
                end = {"started": job.created, "ended": job.created, "code": 127}
                job.record([*starts, {"number": number, "host": platform.node(), "pid": 0, **end}])

    def _refuse_second(self, command: str, name: str, folder: Path) -> None:
        there = self.open_views()
        if sum(view.state == "queued" for view in there) >= MOST_WAITING:
            raise BusyError(f"{MOST_WAITING} jobs wait already; cancel some, or wait for them.")
        if command not in _WRITING:
            return
        for view in there:
            if view.name == name and view.command in _WRITING:
                raise BusyError(
                    f"The job {view.id} is to {view.command} {name} ({view.state}); wait for it or cancel it."
                )
        try:
            holder = held(folder)
        except DataError:
            holder = None
        if holder:
            raise BusyError(
                f"{name} is being written by another process ({holder}). Wait for it, stop it, or choose another name."
            )
