"""Figures of a job's tasks: figures.json in its folder, and jobs.json in the folder of each run."""

import dataclasses
from typing import Any

from saejax.app.console import say
from saejax.core.files import write_json
from saejax.jobs import slurm_queue
from saejax.jobs.job import Job
from saejax.jobs.progress import run_of
from saejax.jobs.table import in_slurm, rows
from saejax.jobs.task import read_starts


def gather(job: Job) -> dict[str, Any]:
    """Write what Slurm's accounts say of each task, beside the task's own record; where they are silent, why.

    Of each task: state, exit code, starts with their end, host, seconds and the largest process's memory (of
    `getrusage`), and from sacct its seconds and largest step's memory.
    """
    ids = in_slurm(job)
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
