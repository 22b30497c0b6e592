"""Run a job: its tasks one after another, or n at once, as soon as what each waits for has ended well.

    python -P -m saejax.jobs.runner <folder>

leaves a runner behind, in a session of its own, and returns as soon as that holds the folder's lease and has recorded
its start. Of several that are started for the same start one runs the job, and the others do nothing.
"""

import contextlib
import functools
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from saejax.core.errors import EXIT_PREEMPTED, BusyError, SaejaxError
from saejax.core.lease import lease
from saejax.core.stopping import SIGNALS
from saejax.jobs.job import Job, read_job
from saejax.jobs.task import read_starts

_POLL_SECONDS = 0.1  # seconds


class _Runner:
    """Codes of the tasks that ended, and those that run now.

    Args:
        logs: each task has a log of its own, and somebody reads what the runner says; else all print into one log.
    """

    def __init__(self, job: Job, logs: bool) -> None:
        self._job, self._logs = job, logs
        self.codes: dict[str, int] = {}
        # {label: (its process group, what gives its exit code)}, of tasks of ours and of a killed runner's.
        self._running: dict[str, tuple[int, Callable[[], int | None]]] = {}
        self._started: dict[str, int] = {}
        self.stopping = False

    def run(self, at_once: int) -> int:
        """0; EXIT_PREEMPTED after a signal; else the first code of a task that failed."""
        job = self._job
        for label, words in job.tasks.items():
            starts = read_starts(job.record_of(label))
            if starts and starts[-1].get("code") == 0 and starts[-1].get("command") == job.command_of(words):
                self.codes[label] = 0
                self._say(f"{label}: already done")
            elif group := job.left_running(label):
                self._running[label] = group, functools.partial(self._code_of_left, label)
                self._say(f"{label}: runs already, as process {group}; taken over")
        if self.stopping:  # before there was anything to tell
            self._tell_all()
        while True:
            self._collect()
            for label in job.tasks:
                if not self.stopping and len(self._running) < at_once and self._ready(label):
                    self._start(label)
            if not self._running:
                break
            time.sleep(_POLL_SECONDS)
        if self.stopping:
            self._say("stopped by a signal; the same command continues")
            return EXIT_PREEMPTED
        for label in job.tasks:
            if label not in self.codes:
                failed = [before for before in job.waits_for(label) if self.codes.get(before) != 0]
                self._say(f"{label}: not run, because {', '.join(failed)} did not end well")
        return next((code for code in self.codes.values() if code), 0)

    def stop(self, *_: object) -> None:
        """Tell all that run to save and end."""
        if not self.stopping:
            self.stopping = True
            self._tell_all()

    def _tell_all(self) -> None:
        for group, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)

    def _code_of_left(self, label: str) -> int | None:
        """Exit code of a killed runner's task; that of a task to be started again, where it could not write one."""
        if self._job.left_running(label):
            return None
        code = read_starts(self._job.record_of(label))[-1].get("code")
        return code if isinstance(code, int) else EXIT_PREEMPTED

    def _say(self, text: str, line: str = "") -> None:
        """Say it in the terminal; of a job that prints into one log `line` alone."""
        if self._logs:
            print(f"jobs: {text}", flush=True)
        elif line:
            print(line, flush=True)

    def _ready(self, label: str) -> bool:
        begun = label in self.codes or label in self._running
        return not begun and all(self.codes.get(before) == 0 for before in self._job.waits_for(label))

    def _start(self, label: str) -> None:
        """Start a task in a process group of its own: Ctrl-C is passed on once, not sent by the terminal as well."""
        job = self._job
        if job.asked()[1]:  # cancelled while no signal could come
            return self.stop()
        self._started[label] = self._started.get(label, 0) + 1
        words = job.tasks[label]
        log = job.path / "logs" / f"{label}.out"
        self._say(f"{label}: saejax {words[0]}, {log}", f"$ saejax {' '.join(words)}")
        with contextlib.ExitStack() as opened:
            if self._logs:
                log.parent.mkdir(exist_ok=True)
            process = subprocess.Popen(
                job.recorded(label, job.command_of(words)),
                cwd=job.here,
                stdin=subprocess.DEVNULL,
                stdout=opened.enter_context(log.open("ab")) if self._logs else None,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running[label] = process.pid, process.poll
        if self.stopping:  # by a signal that came meanwhile
            self._tell_all()

    def _collect(self) -> None:
        """Take the codes of those that ended; one that others told to stop goes on."""
        for label, (_, poll) in list(self._running.items()):
            if (code := poll()) is None:
                continue
            del self._running[label]
            told = code in (EXIT_PREEMPTED, *(-number for number in SIGNALS))
            if told and (self.stopping or self._started.get(label, 0) <= self._job.requeues):
                self._say(f"{label}: stopped by a signal, saved")
                continue
            self.codes[label] = code
            self._say(f"{label}: exit code {code}" if code else f"{label}: done", f"exit code {code}" if code else "")


def run_job(
    job: Job, at_once: int = 1, number: int | None = None, begun: Callable[[], object] = lambda: None, logs: bool = True
) -> int:
    """Run a job, at most `at_once` tasks at a time. Tasks that ended well before are not run again, and what a runner
    that was killed has left running is waited for.

    Args:
        number: of the start that is asked for; without it one is asked for.
        begun: called when the start is recorded, or was by another runner.
        logs: of `_Runner`.

    Returns:
        0; EXIT_PREEMPTED after a signal, which is passed on: the same command continues; else the first code of a task
        that failed. Tasks that depend on it are not run, all others are.

    Raises:
        BusyError: another process runs it.
    """
    runner = _Runner(job, logs)
    handlers = {signum: signal.signal(signum, runner.stop) for signum in SIGNALS}
    try:
        with lease(job.path):
            starts = job.starts()
            last = starts[-1]["number"] if starts else 0
            if number is None:
                number = last + 1
                job.ask(number)
            if last >= number:
                begun()
                return 0
            who = {"number": number, "host": platform.node(), "pid": os.getpid(), "started": time.time()}
            job.record([*starts, who | {"ended": None, "code": None}])
            begun()
            code = runner.run(at_once)
            job.record([*starts, who | {"ended": time.time(), "code": code}])
    except BaseException:
        runner.stop()
        raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    return code


def leave_behind(folder: Path) -> int:
    """Leave a runner behind. Returns 0 when the start that is asked for has begun, whoever began it."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, "rb") as answer:
            return answer.read(1) != b"b"
    os.close(reader)
    os.setsid()
    code = 1

    def begun() -> None:
        os.write(writer, b"b")
        os.close(writer)

    try:
        job = read_job(folder)
        code = run_job(job, 1, job.asked()[0], begun, logs=False)
    except BusyError:
        begun()
        code = 0
    except SaejaxError as error:
        print(f"error: {error}", flush=True)
    except Exception:  # nobody above prints it: the process ends here
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(leave_behind(Path(sys.argv[1])))
