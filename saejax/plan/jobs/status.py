"""The table of jobs: state, progress, time left, exit codes."""

import dataclasses
import os
import platform
import signal

from saejax.app.console import say
from saejax.core.errors import EXIT_PREEMPTED, DataError
from saejax.core.files import read_json
from saejax.plan.jobs import queue
from saejax.plan.jobs.folder import Folder
from saejax.plan.jobs.local import found, runner
from saejax.plan.jobs.progress import progress
from saejax.plan.jobs.task import read_attempts

_HEAD = ("job", "id", "state", "progress", "left", "tries", "exit", "elapsed", "memory", "where")
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "DEADLINE", "PREEMPTED"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One task as the table shows it.

    Attributes:
        state: waiting, running, done, failed, stopped, killed, unknown (on another machine), or Slurm's word in small
            letters.
        share: of its work, from 0 to 1; None where no file says.
        seconds_left: at the last pace.
        attempts: times that it was started.
    """

    label: str
    id: str = ""
    state: str = "waiting"
    share: float | None = None
    seconds_left: float | None = None
    attempts: int = 0
    code: int | None = None
    seconds: float | None = None
    max_rss_bytes: int | None = None
    where: str = ""


def submitted(folder: Folder) -> dict[str, str]:
    """{job: its id in Slurm}; empty where none was submitted.

    Raises:
        DataError: submitted.json is damaged.
    """
    if not folder.submitted.is_file():
        return {}
    content = read_json(folder.submitted)
    ids = content.get("jobs") if isinstance(content, dict) else None
    if not isinstance(ids, dict) or not all(isinstance(i, str) and i.isdecimal() for i in ids.values()):
        raise DataError(f'{folder.submitted} does not hold ids of jobs; write {{"jobs": {{"train": "123"}}}} there.')
    return ids


def rows(folder: Folder) -> list[Row]:
    """A row for each task. Slurm is asked where jobs were submitted.

    Raises:
        DataError: it does not answer.
    """
    ids = submitted(folder)
    numbered = {
        label: (ids[job.name], i if job.array else -1)
        for job in folder.jobs
        if job.name in ids
        for i, label in enumerate(job.labels)
    }
    known, (at_work, _) = queue.seen(numbered), runner(folder) or ("", 0)
    table = []
    for job in folder.jobs:
        for i, label in enumerate(job.labels):
            row = _recorded(folder, label, at_work)
            if label in numbered:
                number, at = numbered[label]
                row = _in_slurm(dataclasses.replace(row, id=number if at < 0 else f"{number}_{at}"), known.get(label))
            far = progress(folder, job, i)
            share = 1.0 if row.state == "done" else far.share
            left = far.seconds_left if row.state == "running" else None
            table.append(dataclasses.replace(row, share=share, seconds_left=left))
    return table


def _recorded(folder: Folder, label: str, at_work: str) -> Row:
    """What the task's own record says, and where it has no end, whether it runs; `at_work` is the runner's machine."""
    attempts = read_attempts(folder.record(label))
    if not attempts:
        return Row(label)
    last = attempts[-1]
    code = last.get("code")
    if code is not None:
        state = {0: "done", EXIT_PREEMPTED: "stopped"}.get(code, "failed")
    elif last.get("host") == platform.node():
        state = "running" if found(folder, label) else "killed"
    else:
        state = "running" if last.get("host") == at_work else "unknown"
    return Row(
        label,
        state=state,
        attempts=len(attempts),
        code=code,
        seconds=last.get("seconds"),
        max_rss_bytes=last.get("max_rss_bytes"),
        where=str(last.get("nodes", last.get("host", ""))),
    )


def _in_slurm(row: Row, seen: queue.Seen | None) -> Row:
    """With what Slurm says, which knows of jobs that never began."""
    if seen is None:
        return row if row.state != "killed" else dataclasses.replace(row, state="unknown")
    if seen.state in _ENDED:
        known = seen.code if row.code is None else row.code
        state = "done" if seen.state == "COMPLETED" else seen.state.lower()
        return dataclasses.replace(row, state=state, code=known, seconds=row.seconds or seen.seconds)
    if seen.state == "PENDING":
        why = f" ({seen.reason})" if seen.reason else ""
        return dataclasses.replace(row, state=f"waiting{why}")
    return dataclasses.replace(row, state=seen.state.lower(), code=None, seconds=None, where=seen.nodes or row.where)


def print_status(folder: Folder) -> None:
    """Print the table."""
    lines = [_HEAD, *(_cells(row) for row in rows(folder))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.label,
        row.id or "-",
        row.state,
        "-" if row.share is None else f"{row.share:.0%}",
        _duration(row.seconds_left),
        str(row.attempts),
        "-" if row.code is None else str(row.code),
        _duration(row.seconds),
        "-" if row.max_rss_bytes is None else f"{row.max_rss_bytes / 2**20:,.0f} MiB",
        row.where or "-",
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def cancel(folder: Folder) -> None:
    """Cancel all that was submitted, and tell the runner of this machine, or what it has left running, to stop.

    What is saved stays.

    Raises:
        DataError: nothing of this folder was submitted or runs, it runs on another machine, or Slurm refuses.
    """
    ids, here = submitted(folder), runner(folder)
    left = [] if here else [one for job in folder.jobs for label in job.labels if (one := found(folder, label))]
    if not ids and here is None and not left:
        raise DataError(f"Nothing of {folder.path} was submitted or runs here.")
    if ids:
        queue.cancel(list(ids.values()))
        say(f"jobs: cancelled {', '.join(f'{name} {number}' for name, number in ids.items())}")
    if here is not None:
        host, pid = here
        if host != platform.node():
            raise DataError(f"The jobs run on {host}; cancel them there, or end its process {pid} by SIGTERM.")
        os.kill(pid, signal.SIGTERM)
        say(f"jobs: process {pid} saves and stops")
    for one in left:
        os.killpg(one.pid, signal.SIGTERM)
        say(f"jobs: {one.label}: process {one.pid} saves and stops")
