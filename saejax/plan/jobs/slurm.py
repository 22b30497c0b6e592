"""The jobs as scripts of Slurm: one for each job, and submit.sh, which hands all of them over."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from saejax.core.errors import EXIT_PREEMPTED
from saejax.core.files import write_bytes
from saejax.plan.jobs.folder import Folder
from saejax.plan.jobs.graph import Job
from saejax.plan.jobs.site import Site, seconds_of, slurm_time

_LEAST = 600.0  # seconds: a start, a compilation and a slow disk are in no plan
_GIB = 1 << 30
FIGURES = "figures"


class Estimate(Protocol):
    """What the planner says of a stage."""

    @property
    def stage(self) -> str: ...
    @property
    def host_bytes(self) -> float: ...
    @property
    def seconds(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a job asks Slurm for: seconds, and bytes of a node's memory (0: the site's default)."""

    seconds: float
    host_bytes: float = 0.0


def asked(job: Job, site: Site, estimates: Sequence[Estimate]) -> Asked:
    """The estimate with the site's margin, below its limit; the site's `time` where nothing is estimated.

    Parts of a capture and programs of a sweep share what the whole stage takes; trainings of layers are each a whole.
    """
    known = {one.stage: one for one in estimates}.get({"table": "evaluate"}.get(job.name, job.name))
    seconds, host = float(seconds_of(site.time, "time")), 0.0
    if known is not None:
        share = len(job.tasks) if job.name in ("capture", "sweep") else 1
        seconds = max(_LEAST, known.seconds / share * site.margin)
        host = known.host_bytes * site.margin
    if site.time_limit:
        seconds = min(seconds, seconds_of(site.time_limit, "time_limit"))
    return Asked(seconds, host)


def write_scripts(folder: Folder, device: str, devices: int, estimates: Sequence[Estimate] = ()) -> list[Path]:
    """Write a script for each job, figures.sh and submit.sh.

    Args:
        device: of the planner's table; none that begins with cpu asks for an accelerator.
        devices: of each node.
    """
    accelerators = 0 if device.startswith("cpu") else devices
    written = []
    for job in folder.jobs:
        need = asked(job, folder.site.of(job.name), estimates)
        written.append(_write(folder, job.name, _script(folder, job, need, accelerators)))
    site = folder.site.of(FIGURES)
    lines = [
        *("#!/bin/bash", "# What every job took, from sacct where it answers."),
        *_directives(folder, Job(FIGURES, ((),)), dataclasses.replace(site, nodes=1), Asked(_LEAST), 0),
        *_around(site),
        shlex.join(folder.command(["jobs", "figures", str(folder.path)])),
    ]
    written.append(_write(folder, FIGURES, lines))
    written.append(_write(folder, "submit", _submit(folder)))
    return written


def _write(folder: Folder, name: str, lines: Sequence[str]) -> Path:
    path = folder.path / f"{name}.sh"
    write_bytes(path, ("\n".join(lines) + "\n").encode())
    path.chmod(0o755)
    return path


def _script(folder: Folder, job: Job, need: Asked, accelerators: int) -> list[str]:
    site = folder.site.of(job.name)
    nodes = site.nodes if job.name == "train" else 1
    wrapped = [*folder.python, "-P", "-m", "saejax.plan.jobs.task", str(folder.path)]
    cases = [f"  {i}) words=({shlex.join(task)}) ;;" for i, task in enumerate(job.tasks)]
    label = f'{job.name}."$task"' if job.array else job.name
    return [
        *("#!/bin/bash", f"# {job.name} of {folder.experiment.name}: saejax {shlex.join(job.tasks[0])}"),
        *_directives(folder, job, dataclasses.replace(site, nodes=nodes), need, accelerators),
        *_around(site),
        "task=${SLURM_ARRAY_TASK_ID:-0}",
        *("case $task in", *cases, "esac"),
        f"srun --nodes={nodes} --ntasks={nodes} {shlex.join(wrapped)} {label} -- \\",
        f'  {shlex.join(folder.command(()))} "${{words[@]}}"',
        "code=$?",
        f"# {EXIT_PREEMPTED}: a signal stopped it and all is saved. The same job goes on, unless it was cancelled.",
        "me=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$task}; me=${me:-$SLURM_JOB_ID}",
        f'if [ $code = {EXIT_PREEMPTED} ] && [ "$(squeue -h -j "$me" -o %T)" = RUNNING ]; then',
        f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {site.requeues} ]; then',
        '    echo "saved; $me goes back into the queue"',
        '    scontrol requeue "$me" && sleep 300  # Slurm ends this script',
        "  else",
        f'    echo "not requeued: {site.requeues} times are enough (site file: requeues)" >&2',
        "  fi",
        "fi",
        "exit $code",
    ]


def _directives(folder: Folder, job: Job, site: Site, need: Asked, accelerators: int) -> list[str]:
    log = "%A_%a" if job.array else "%j"
    most = f"%{site.at_once}" if site.at_once else ""
    memory = site.memory or (f"{math.ceil(need.host_bytes / _GIB)}G" if need.host_bytes else "")
    options = {
        "job-name": f"{folder.experiment.name}-{job.name}",
        "chdir": folder.here,
        "output": f"{folder.path}/logs/{job.name}-{log}.out",
        "open-mode": "append",
        "time": slurm_time(need.seconds),
        "signal": f"USR1@{site.warning}",
        "kill-on-invalid-dep": "yes",
        "nodes": site.nodes,
        "ntasks-per-node": 1,
        "array": f"0-{len(job.tasks) - 1}{most}" if job.array else "",
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "cpus-per-task": site.cpus or "",
        "mem": memory,
    }
    lines = [f"--{key}={value}" for key, value in options.items() if value != ""]
    gpus = [site.gpus.replace("{devices}", str(accelerators))] if accelerators and site.gpus else []
    return [f"#SBATCH {line}" for line in [*lines, "--requeue", *gpus, *site.sbatch]]


def _around(site: Site) -> list[str]:
    # srun does not take over what sbatch was told of a task's cores.
    cores = ['export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'] if site.cpus else []
    return [*(f"module load {shlex.quote(name)} || exit 1" for name in site.modules), *site.setup, *cores]


_SUBMIT = """\
#!/bin/bash
# Hands the jobs of {name} to Slurm, prints their ids and keeps them in submitted.json.
set -euo pipefail
folder={folder}
if [ -e "$folder/submitted.json" ]; then
  old=$(grep -oE '"[0-9]+"' "$folder/submitted.json" | tr -d '"' | paste -sd, -)
  if [ -n "$old" ] && [ -n "$(squeue -h -j "$old" 2>/dev/null)" ]; then
    echo "error: jobs $old of this folder are in the queue: saejax jobs cancel $folder" >&2
    exit 1
  fi
fi
ids=
submit() {{  # submit NAME [DEPENDENCY]: sets $id
  id=$(sbatch --parsable ${{2:+"--dependency=$2"}} "$folder/$1.sh")
  id=${{id%%;*}}
  ids="${{ids:+$ids, }}\\"$1\\": \\"$id\\""
  printf '{{"jobs": {{%s}}}}\\n' "$ids" > "$folder/.submitted.tmp"
  mv "$folder/.submitted.tmp" "$folder/submitted.json"
  printf '%-10s %s\\n' "$1" "$id"
}}"""


def _submit(folder: Folder) -> list[str]:
    lines = [_SUBMIT.format(name=folder.experiment.name, folder=folder.path)]
    for job in folder.jobs:
        condition = ",".join(f"{'aftercorr' if job.each else 'afterok'}:${name}" for name in job.after)
        lines += [f'submit {job.name} "{condition}"' if condition else f"submit {job.name}", f"{job.name}=$id"]
    every = ":".join(f"${job.name}" for job in folder.jobs)
    return [*lines, f'submit {FIGURES} "afterany:{every}"']
