"""Run one attempt of a job, whatever becomes of the server that started it.

    python -P -m saejax.serve.jobs.runner <folder>

Returns as soon as a process of its own, in a session of its own, holds the folder's lease and has written its attempt;
that one then runs the commands one after the other, until one does not end with 0. Of several that are started for the
same attempt one runs it, and the others do nothing.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from saejax.core.errors import EXIT_PREEMPTED, BusyError, SaejaxError
from saejax.core.lease import lease
from saejax.core.stopping import SIGNALS
from saejax.plan.jobs.task import run_task
from saejax.serve.jobs.folder import Job


def start(folder: Path) -> int:
    """Leave a runner behind. Returns 0 when the attempt that is asked for has begun, whoever began it."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with open(reader, "rb") as said:
            return said.read(1) != b"b"
    os.close(reader)
    os.setsid()
    code = 1
    try:
        code = _attempt(Job(folder), writer)
    except SaejaxError as error:
        print(f"error: {error}", flush=True)
    except Exception:  # nobody above prints it: the process ends here
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _attempt(job: Job, begun: int) -> int:
    told: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        told.append(number)

    # Whoever stops the job sends the signal to the commands too: theirs is the work that is to be saved.
    for one in SIGNALS:
        signal.signal(one, tell)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lease(job.path))
        except BusyError:
            os.write(begun, b"b")
            return 0
        number, _ = job.asked()
        attempts = job.attempts()
        if attempts and attempts[-1]["number"] >= number:
            os.write(begun, b"b")
            return 0
        own = {"number": number, "pid": os.getpid(), "started": time.time(), "ended": None, "code": None}
        job.record([*attempts, own])
        os.write(begun, b"b")
        os.close(begun)
        code = _run(job, told)
        job.record([*attempts, own | {"ended": time.time(), "code": code}])
    return code


def _run(job: Job, told: Sequence[int]) -> int:
    """The first exit code that is not 0, else 0."""
    content = job.content
    os.chdir(content["here"])
    for at, words in enumerate(content["commands"]):
        # What was cancelled between two commands begins no other.
        if told or job.asked()[1]:
            return EXIT_PREEMPTED
        print(f"$ {' '.join(words)}", flush=True)
        command = [sys.executable, "-P", "-m", *words]
        if code := run_task(job.path, f"{at}-{words[1]}", command):
            print(f"exit code {code}", flush=True)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(start(Path(sys.argv[1])))
