"""The jobs as scripts of Slurm: one for each job, and submit.sh, which hands all of them over."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from typing import Protocol

from saejax.core.errors import EXIT_PREEMPTED
from saejax.core.files import write_bytes
from saejax.jobs.job import Job, Stage
from saejax.jobs.site import Site, seconds_of, slurm_time

_LEAST = 600.0  # seconds: a start, a compilation and a slow disk are in no plan
_GIB = 1 << 30
FIGURES = "figures"


class Estimate(Protocol):
    """Bytes and seconds that the planner expects of a stage."""

    @property
    def stage(self) -> str: ...
    @property
    def host_bytes(self) -> float: ...
    @property
    def seconds(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Request:
    """Seconds and bytes of a node's memory that a job asks Slurm for (0 bytes: the site's default)."""

    seconds: float
    host_bytes: float = 0.0


def request_of(stage: Stage, site: Site, estimates: Sequence[Estimate]) -> Request:
    """The estimate with the site's margin, below its limit; the site's `time` where nothing is estimated.

    Parts of a capture and programs of a sweep share what the whole stage takes; trainings of layers are each a whole.
    """
    known = {estimate.stage: estimate for estimate in estimates}.get({"table": "evaluate"}.get(stage.name, stage.name))
    seconds, host = float(seconds_of(site.time, "time")), 0.0
    if known is not None:
        share = len(stage.tasks) if stage.name in ("capture", "sweep") else 1
        seconds = max(_LEAST, known.seconds / share * site.margin)
        host = known.host_bytes * site.margin
    if site.time_limit:
        seconds = min(seconds, seconds_of(site.time_limit, "time_limit"))
    return Request(seconds, host)


def write_scripts(job: Job, site: Site, device: str, devices: int, estimates: Sequence[Estimate] = ()) -> None:
    """Write a script for each stage, figures.sh and submit.sh.

    Args:
        device: of the planner's table; none that begins with cpu asks for an accelerator.
        devices: of each node.
    """
    accelerators = 0 if device.startswith("cpu") else devices
    scripts = {"submit": _submit(job)}
    for stage in job.stages:
        stage_site = site.of(stage.name)
        scripts[stage.name] = _script(job, stage, stage_site, request_of(stage, stage_site, estimates), accelerators)
    stage_site = dataclasses.replace(site.of(FIGURES), nodes=1)
    scripts[FIGURES] = [
        *("#!/bin/bash", "# Figures of every task, from sacct where it answers."),
        *_directives(job, Stage(FIGURES, ((),)), stage_site, Request(_LEAST), 0),
        *_around(stage_site),
        shlex.join(job.command_of(["jobs", "figures", str(job.path)])),
    ]
    for name, lines in scripts.items():
        path = job.path / f"{name}.sh"
        write_bytes(path, ("\n".join(lines) + "\n").encode())
        path.chmod(0o755)


def _script(job: Job, stage: Stage, site: Site, request: Request, accelerators: int) -> list[str]:
    nodes = site.nodes if stage.name == "train" else 1
    cases = [f"  {i}) words=({shlex.join(task)}) ;;" for i, task in enumerate(stage.tasks)]
    label = f'{stage.name}."$task"' if stage.array else stage.name
    # Of the words before the label and behind it the shell takes none for its own.
    *wrapped, _, dashes = job.recorded("", ())
    return [
        *("#!/bin/bash", f"# {stage.name} of {job.name}: saejax {shlex.join(stage.tasks[0])}"),
        *_directives(job, stage, dataclasses.replace(site, nodes=nodes), request, accelerators),
        *_around(site),
        "task=${SLURM_ARRAY_TASK_ID:-0}",
        *("case $task in", *cases, "esac"),
        f"srun --nodes={nodes} --ntasks={nodes} {shlex.join(wrapped)} {label} {dashes} \\",
        f'  {shlex.join(job.command_of(()))} "${{words[@]}}"',
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


def _directives(job: Job, stage: Stage, site: Site, request: Request, accelerators: int) -> list[str]:
    log = "%A_%a" if stage.array else "%j"
    most = f"%{site.at_once}" if site.at_once else ""
    memory = site.memory or (f"{math.ceil(request.host_bytes / _GIB)}G" if request.host_bytes else "")
    options = {
        "job-name": f"{job.name}-{stage.name}",
        "chdir": job.here,
        "output": f"{job.path}/logs/{stage.name}-{log}.out",
        "open-mode": "append",
        "time": slurm_time(request.seconds),
        "signal": f"USR1@{site.warning}",
        "kill-on-invalid-dep": "yes",
        "nodes": site.nodes,
        "ntasks-per-node": 1,
        "array": f"0-{len(stage.tasks) - 1}{most}" if stage.array else "",
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


def _submit(job: Job) -> list[str]:
    lines = [_SUBMIT.format(name=job.name, folder=job.path)]
    for stage in job.stages:
        condition = ",".join(f"{'aftercorr' if stage.each else 'afterok'}:${name}" for name in stage.after)
        lines += [f'submit {stage.name} "{condition}"' if condition else f"submit {stage.name}", f"{stage.name}=$id"]
    every = ":".join(f"${stage.name}" for stage in job.stages)
    return [*lines, f'submit {FIGURES} "afterany:{every}"']
