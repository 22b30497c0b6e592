"""What the jobs took: figures.json beside them, and jobs.json in the folder of each run."""

import dataclasses
from typing import Any

from saejax.app.console import say
from saejax.core.files import write_json
from saejax.plan.jobs import queue
from saejax.plan.jobs.folder import Folder
from saejax.plan.jobs.status import rows, submitted
from saejax.plan.jobs.task import read_attempts


def gather(folder: Folder) -> dict[str, Any]:
    """Write what Slurm's accounts say of each task, beside the task's own record; where they are silent, why.

    Of each task: state, exit code, attempts with start, end, host, seconds and the largest process's memory (of
    `getrusage`), and from sacct its seconds and largest step's memory.
    """
    ids = submitted(folder)
    silent = queue.accounting() if ids else "no jobs of Slurm"
    tasks: dict[str, Any] = {}
    for row in rows(folder):
        attempts = [
            {key: value for key, value in one.items() if key != "command"}
            for one in read_attempts(folder.record(row.label))
        ]
        tasks[row.label] = {"id": row.id or None, "state": row.state, "code": row.code, "attempts": attempts}
    if ids and not silent:
        numbered = {
            label: (ids[job.name], i if job.array else -1)
            for job in folder.jobs
            if job.name in ids
            for i, label in enumerate(job.labels)
        }
        for label, known in queue.seen(numbered).items():
            tasks[label]["sacct"] = dataclasses.asdict(known)
    content = {"accounts": f"none: {silent}" if silent else "sacct", "tasks": tasks}
    places = [folder.path / "figures.json", *(run / "jobs.json" for run in folder.runs() if run.is_dir())]
    for path in places:
        write_json(path, content)
    if ids and silent:
        say(f"jobs: sacct does not answer ({silent}); figures are those of the tasks' own records")
    say(f"jobs: {places[0]}")
    return content
