"""The jobs on this machine: one after another, or n at once, as soon as what each waits for has ended well."""

import contextlib
import dataclasses
import os
import platform
import signal
import subprocess
import time
from collections.abc import Iterator

from saejax.app.console import say
from saejax.core.errors import EXIT_PREEMPTED, DataError
from saejax.core.files import read_json, write_json
from saejax.core.lease import held, lease
from saejax.core.stopping import SIGNALS
from saejax.plan.jobs.folder import Folder
from saejax.plan.jobs.graph import Job
from saejax.plan.jobs.processes import left_of
from saejax.plan.jobs.task import read_attempts

_LOOK = 0.1  # seconds
RUNNER = "local.json"


@dataclasses.dataclass(frozen=True)
class Task:
    """Number `at` of a job."""

    job: Job
    at: int

    @property
    def label(self) -> str:
        return self.job.labels[self.at]


@dataclasses.dataclass(frozen=True)
class Found:
    """A task that goes on although the runner that began it was killed: as a process that one has started oneself.

    Attributes:
        pid: of the process group.
    """

    folder: Folder
    label: str
    pid: int

    def poll(self) -> int | None:
        """The exit code that its record says; that of one to be started again, where it could not write it."""
        if left_of(self.pid, self.folder.path):
            return None
        code = read_attempts(self.folder.record(self.label))[-1].get("code")
        return code if isinstance(code, int) else EXIT_PREEMPTED


def found(folder: Folder, label: str) -> Found | None:
    """The task's last attempt, where it goes on here.

    Raises:
        DataError: its record is damaged.
    """
    attempts = read_attempts(folder.record(label))
    pid = attempts[-1].get("pid") if attempts else None
    if not isinstance(pid, int) or attempts[-1].get("code") is not None:
        return None
    here = attempts[-1].get("host") == platform.node()
    return Found(folder, label, pid) if here and left_of(pid, folder.path) else None


@dataclasses.dataclass
class _Run:
    """Which tasks ended how, and which run now."""

    folder: Folder
    codes: dict[str, int] = dataclasses.field(default_factory=dict)
    running: dict[str, "subprocess.Popen[bytes] | Found"] = dataclasses.field(default_factory=dict)
    starts: dict[str, int] = dataclasses.field(default_factory=dict)
    stopping: bool = False

    def waits_for(self, task: Task) -> list[str]:
        """Labels of the tasks that must have ended well before this one."""
        before = [job for job in self.folder.jobs if job.name in task.job.after]
        return [label for job in before for label in ([job.labels[task.at]] if task.job.each else job.labels)]

    def ready(self, task: Task) -> bool:
        begun = task.label in self.codes or task.label in self.running
        return not begun and all(self.codes.get(label) == 0 for label in self.waits_for(task))

    def start(self, task: Task) -> None:
        """Start a task in a process group of its own: Ctrl-C is passed on once, not sent by the terminal as well."""
        f, words = self.folder, task.job.tasks[task.at]
        self.starts[task.label] = self.starts.get(task.label, 0) + 1
        log = f.path / "logs" / f"{task.label}.out"
        say(f"jobs: {task.label}: saejax {words[0]}, {log}")
        command = [*f.python, "-P", "-m", "saejax.plan.jobs.task", str(f.path), task.label, "--", *f.command(words)]
        with log.open("ab") as out:
            self.running[task.label] = subprocess.Popen(
                command,
                cwd=f.here,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def collect(self) -> None:
        """Take the codes of those that ended; one that was told to stop by others than us goes on."""
        for label, process in list(self.running.items()):
            if (code := process.poll()) is None:
                continue
            del self.running[label]
            told = code in (EXIT_PREEMPTED, *(-number for number in SIGNALS))
            if told and (self.stopping or self.starts.get(label, 0) <= self.folder.site.requeues):
                say(f"jobs: {label}: stopped by a signal, saved")
                continue
            self.codes[label] = code
            say(f"jobs: {label}: exit code {code}" if code else f"jobs: {label}: done")

    def stop(self, *_: object) -> None:
        """Tell all that run to save and end."""
        if not self.stopping:
            self.stopping = True
            for process in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def run_local(folder: Folder, at_once: int) -> int:
    """Run the jobs, at most `at_once` tasks at a time. What ended well before is not run again, and what a runner that
    was killed has left running is waited for.

    Returns:
        0; EXIT_PREEMPTED after a signal, which is passed on: the same command continues; else the first code of a task
        that failed. What depends on it is not run, everything else is.

    Raises:
        BusyError: another process runs these jobs.
    """
    tasks = [Task(job, i) for job in folder.jobs for i in range(len(job.tasks))]
    with lease(folder.path):
        write_json(folder.path / RUNNER, {"host": platform.node(), "pid": os.getpid()})
        run = _Run(folder, {task.label: 0 for task in tasks if _is_done(folder, task)})
        for label in run.codes:
            say(f"jobs: {label}: already done")
        for task in tasks:
            if left := found(folder, task.label):
                run.running[task.label] = left
                say(f"jobs: {task.label}: runs already, as process {left.pid}; taken over")
        with _passing_on(run):
            while True:
                run.collect()
                for task in tasks:
                    if not run.stopping and len(run.running) < at_once and run.ready(task):
                        run.start(task)
                if not run.running:
                    break
                time.sleep(_LOOK)
        (folder.path / RUNNER).unlink(missing_ok=True)
    if run.stopping:
        say("jobs: stopped by a signal; the same command continues")
        return EXIT_PREEMPTED
    for task in tasks:
        if task.label not in run.codes:
            failed = [label for label in run.waits_for(task) if run.codes.get(label) != 0]
            say(f"jobs: {task.label}: not run, because {', '.join(failed)} did not end well")
    return next((code for code in run.codes.values() if code), 0)


def _is_done(folder: Folder, task: Task) -> bool:
    attempts = read_attempts(folder.record(task.label))
    command = folder.command(task.job.tasks[task.at])
    return bool(attempts) and attempts[-1].get("code") == 0 and attempts[-1].get("command") == command


@contextlib.contextmanager
def _passing_on(run: _Run) -> Iterator[None]:
    old = {number: signal.signal(number, run.stop) for number in SIGNALS}
    try:
        yield
    except BaseException:
        run.stop()
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def runner(folder: Folder) -> tuple[str, int] | None:
    """(machine, process) that runs these jobs; None where none does. The lease says so, not a file that was left.

    Raises:
        DataError: one does, and its file does not say which.
    """
    path = folder.path / RUNNER
    if not path.is_file() or held(folder.path) is None:
        return None
    content = read_json(path)
    host, pid = (content.get("host"), content.get("pid")) if isinstance(content, dict) else (None, None)
    if not isinstance(host, str) or not isinstance(pid, int) or pid < 2:
        raise DataError(f"{path} does not say which process runs the jobs; stop it by hand.")
    return host, pid
