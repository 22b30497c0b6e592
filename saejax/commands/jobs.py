"""Run an experiment as jobs: scripts for Slurm, or one job after another on this machine.

    saejax jobs slurm --config=gpt2_small --out=jobs [--site=site.yaml] [--device=h100] [--devices=2]
    jobs/submit.sh                                    hands them over and prints their ids
    saejax jobs status jobs                           state, progress, time left, exit codes
    saejax jobs cancel jobs
    saejax jobs local --config=quickstart:tiny --out=jobs [--at_once=2]
    saejax jobs figures jobs                          what each job took, from sacct where it answers

One job a stage, each waiting for those before it to end well: a failed gate stops what depends on it. Parts of a
capture, programs of a sweep and (--layers) hook points are arrays. A job that is told to stop saves, exits with 75 and
goes on by itself. The site file names partition, account, modules, container and the like: docs/jobs.md.
"""

import dataclasses

from saejax.app.command import Command, Line
from saejax.core.settings import setting


@dataclasses.dataclass(frozen=True)
class Jobs(Command, takes="either"):
    out: str = setting("jobs", "The folder of scripts, logs and records.", words=("slurm", "local"))
    site: str = setting("", "The cluster's YAML file.", words=("slurm",))
    device: str = setting(
        "",
        "The device that limits of time and memory are planned for, of `saejax plan`; cpu asks for no "
        "accelerator. Empty: an accelerator, and the site file's time.",
        words=("slurm",),
    )
    devices: int = setting(1, "Accelerators of each node.", words=("slurm",), low=1)
    layers: bool = setting(False, "A training for each captured hook point.", words=("slurm", "local"))
    at_once: int = setting(1, "Tasks that run at a time.", words=("local",), low=1)

    def run(self, line: Line) -> int:
        from saejax.jobs.command import WORDS, run_jobs
        from saejax.plan.command import of_jobs

        word = line.words[0] if line.words else ""
        if word in WORDS:
            self.refuse_idle(line, word)
        planned = line.config is not None and word == "slurm" and self.device
        estimates = of_jobs(line.experiment, self.device, self.devices) if planned else ()
        return run_jobs(line.words, line.config, dataclasses.asdict(self), estimates)
