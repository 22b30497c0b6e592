"""A job's tasks: the table of their states and progress, their end where it is asked for, figures of what they took."""

import dataclasses
import platform
from typing import Any

from saejax.app.console import say
from saejax.core.errors import DataError
from saejax.core.files import write_json
from saejax.jobs import slurm_queue
from saejax.jobs.job import Job, state_of
from saejax.jobs.progress import progress, run_of
from saejax.jobs.task import read_starts

_TABLE_HEAD = ("job", "id", "state", "progress", "left", "tries", "exit", "elapsed", "memory", "where")
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "DEADLINE", "PREEMPTED"}


@dataclasses.dataclass(frozen=True)
class TaskRow:
    """One task as the table shows it.

    Attributes:
        state: of `state_of`; unknown is on another machine; or Slurm's word in small letters.
        share: of its work, from 0 to 1; None where no file says.
        seconds_left: at the last pace.
        starts: times that it was started.
    """

    label: str
    id: str = ""
    state: str = "waiting"
    share: float | None = None
    seconds_left: float | None = None
    starts: int = 0
    code: int | None = None
    seconds: float | None = None
    max_rss_bytes: int | None = None
    where: str = ""


def _in_slurm(job: Job) -> dict[str, tuple[str, int]]:
    """{label: (id of its job in Slurm, number in the array or -1)} of the tasks that were submitted."""
    ids = job.submitted()
    return {
        label: (ids[stage.name], i if stage.array else -1)
        for stage in job.stages
        if stage.name in ids
        for i, label in enumerate(stage.labels)
    }


def rows(job: Job) -> list[TaskRow]:
    """A row for each task. Slurm is asked where jobs were submitted.

    Raises:
        DataError: it does not answer.
    """
    ids = _in_slurm(job)
    known, (runner_host, _) = slurm_queue.seen(ids), job.runner() or ("", 0)
    table = []
    for stage in job.stages:
        for i, label in enumerate(stage.labels):
            row = _recorded(job, label, runner_host)
            if label in ids:
                number, at = ids[label]
                row = _with_slurm(dataclasses.replace(row, id=number if at < 0 else f"{number}_{at}"), known.get(label))
            share, left = progress(job, stage.name, i, stage.tasks[i])
            share, left = 1.0 if row.state == "done" else share, left if row.state == "running" else None
            table.append(dataclasses.replace(row, share=share, seconds_left=left))
    return table


def _recorded(job: Job, label: str, runner_host: str) -> TaskRow:
    """A row from the task's own record."""
    starts = read_starts(job.record_of(label))
    if not starts:
        return TaskRow(label)
    last = starts[-1]
    host = last.get("host")
    here = bool(job.left_running(label)) if host == platform.node() else True if host == runner_host else None
    return TaskRow(
        label,
        state=state_of(last, here),
        starts=len(starts),
        code=last.get("code"),
        seconds=last.get("seconds"),
        max_rss_bytes=last.get("max_rss_bytes"),
        where=str(last.get("nodes", last.get("host", ""))),
    )


def _with_slurm(row: TaskRow, seen: slurm_queue.Seen | None) -> TaskRow:
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


def print_table(job: Job) -> None:
    """Print the table."""
    lines = [_TABLE_HEAD]
    for row in rows(job):
        share = "-" if row.share is None else f"{row.share:.0%}"
        code = "-" if row.code is None else str(row.code)
        memory = "-" if row.max_rss_bytes is None else f"{row.max_rss_bytes / 2**20:,.0f} MiB"
        progressed = share, _duration(row.seconds_left), str(row.starts)
        lines.append(
            (row.label, row.id or "-", row.state, *progressed, code, _duration(row.seconds), memory, row.where or "-")
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        say("  ".join(map(str.ljust, line, widths)).rstrip())


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def cancel(job: Job) -> None:
    """Cancel all that was submitted, and tell the runner of this machine, or what it has left running, to stop.

    What is saved stays.

    Raises:
        DataError: nothing of this job was submitted or runs, it runs on another machine, or Slurm refuses.
    """
    ids = job.submitted()
    if ids:
        slurm_queue.cancel(list(ids.values()))
        say(f"jobs: cancelled {', '.join(f'{name} {number}' for name, number in ids.items())}")
    told = job.tell_to_end()
    if not ids and not told:
        raise DataError(f"Nothing of {job.path} was submitted or runs here.")
    for process in told:
        say(f"jobs: {process} saves and stops")


def gather(job: Job) -> dict[str, Any]:
    """Write what Slurm's accounts say of each task, beside the task's own record; where they are silent, why.

    Of each task: state, exit code, starts with their end, host, seconds and the largest process's memory (of
    `getrusage`), and from sacct its seconds and largest step's memory.
    """
    ids = _in_slurm(job)
    silent = slurm_queue.accounting() if ids else "no jobs of Slurm"
    tasks: dict[str, Any] = {}
    for row in rows(job):
        starts = [
            {key: value for key, value in start.items() if key != "command"}
            for start in read_starts(job.record_of(row.label))
        ]
        tasks[row.label] = {"id": row.id or None, "state": row.state, "code": row.code, "starts": starts}
    if ids and not silent:
        for label, account in slurm_queue.seen(ids).items():
            tasks[label]["sacct"] = dataclasses.asdict(account)
    content = {"accounts": f"none: {silent}" if silent else "sacct", "tasks": tasks}
    trained = [words for stage in job.stages if stage.name == "train" for words in stage.tasks]
    runs = dict.fromkeys(run_of(job.experiment, words) for words in trained or [()])
    for path in [figures := job.path / "figures.json", *(run / "jobs.json" for run in runs if run.is_dir())]:
        write_json(path, content)
    if ids and silent:
        say(f"jobs: sacct does not answer ({silent}); figures are those of the tasks' own records")
    say(f"jobs: {figures}")
    return content
