"""One process for each contestant: it is told what to do by a line of JSON, and answers with one.

The standard library alone, so that the peers' environment can run it too.
"""

import contextlib
import json
import os
import pathlib
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
# This checkout first, then what the caller named: on a borrowed machine the packages that were carried there.
PYTHON_PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class WorkerFailed(Exception):
    """The worker could not do what it was told; it is still there."""


class WorkerGone(Exception):
    """The worker's process ended, was killed (out of memory?), or took longer than its limit."""


class Worker:
    """A contestant's process. Only the one that was asked works; the others wait for their next line."""

    def __init__(
        self, name: str, command: Sequence[str], limit_s: float = 900, environment: Mapping[str, str] | None = None
    ):
        self.name, self.limit_s = name, limit_s
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - open as long as the process
        # A session of its own: Ctrl-C is the driver's, which ends its workers.
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def ask(self, what: str, **told: Any) -> dict[str, Any]:
        """What the worker answers.

        Raises:
            WorkerFailed, WorkerGone
        """
        assert self._process.stdin and self._process.stdout
        if self._errors.closed:
            raise WorkerGone(f"{self.name} was closed")
        try:
            self._process.stdin.write(json.dumps({"do": what, **told}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None
        try:
            answered = select.select([self._process.stdout], [], [], self.limit_s)[0]
            line = self._process.stdout.readline() if answered else ""
        except BaseException:  # Ctrl-C: what it would answer is nobody's
            self.close()
            raise
        if not answered:
            self.close()
            raise WorkerGone(f"{self.name} took more than {self.limit_s:.0f} s for {what}")
        if not line:
            raise self._gone()
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{self.name}: {answer['error']}")
        return answer

    def _gone(self) -> WorkerGone:
        code = self._process.wait()
        self._errors.seek(0)
        last = ([line.strip() for line in self._errors if line.strip()] or ["it said nothing"])[-1]
        why = "was killed (signal 9: out of memory?)" if code == -9 else f"ended with {code}: {last[:300]}"
        return WorkerGone(f"{self.name} {why}")

    def limit_memory(self, n_bytes: int) -> None:
        """From now on the process gets no more private memory than that, on Linux; what asks for more fails."""
        resource.prlimit(self._process.pid, resource.RLIMIT_DATA, (n_bytes, n_bytes))

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            # What a dead worker was never told is in the pipe still.
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(handlers: Mapping[str, Callable[..., Mapping[str, Any]]]) -> None:
    """The worker's side: answer lines until there are no more. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        told = json.loads(line)
        try:
            answer = handlers[told.pop("do")](**told)
        except Exception as e:  # the driver decides what it means
            traceback.print_exc()
            answer = {"error": " ".join(traceback.format_exception_only(e)[-1].split())[:500]}
        answers.write(json.dumps(answer) + "\n")


class Use:
    """What a piece of work took of the machine: seconds of the clock, and of all threads in user and system."""

    real = user = system = 0.0

    def to_json(self) -> dict[str, float]:
        return {"real": self.real, "user": self.user, "system": self.system}


@contextlib.contextmanager
def used() -> Iterator[Use]:
    """Fills the Use that it gives when the block ends."""
    use, before, started = Use(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    yield use
    use.real = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    use.user, use.system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime


def peak_bytes() -> int:
    """The most memory that this process had at once, since `forget_peak` where Linux can forget."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Count `peak_bytes` from now on, for a process that outlives one row."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")


def free_bytes() -> int | None:
    """Memory that new processes can have without swapping; None where nobody says."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def timed_steps(
    steps: int, before: Callable[[], Any], step: Callable[[Any], None], wait: Callable[[], None], *, each: bool
) -> list[float]:
    """Seconds of each step, by one clock for every contestant; `before` gives a step's batch, off the clock.

    With `each` every step is waited for. Without, steps are sent off one after the other, as a training on an
    accelerator does, and the last is waited for; their mean stands for each.
    """
    if each:
        seconds = []
        for _ in range(steps):
            batch = before()
            started = time.perf_counter()
            step(batch)
            wait()
            seconds.append(time.perf_counter() - started)
        return seconds
    batches = [before() for _ in range(min(steps, 4))]
    wait()
    started = time.perf_counter()
    for i in range(steps):
        step(batches[i % len(batches)])
    wait()
    return [(time.perf_counter() - started) / steps] * steps
