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

from saejax.app.command import Command, Line
from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.core.settings import setting

_MAKING, _READING = ("slurm", "local"), ("status", "cancel", "figures")


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
        word = line.words[0] if line.words else ""
        if word not in (*_MAKING, *_READING):
            raise ConfigError(f"`saejax jobs` has no word {word!r}.{nearest(word, (*_MAKING, *_READING))}")
        self.refuse_idle(line, word)
        if word in _READING:
            from saejax.jobs import table
            from saejax.jobs.job import read_job

            if line.config is not None or len(line.words) != 2:
                raise ConfigError(f"Give the folder of the jobs alone, as in: saejax jobs {word} jobs")
            ways = {"status": table.print_table, "cancel": table.cancel, "figures": table.gather}
            ways[word](read_job(line.words[1]))
            return 0
        if len(line.words) > 1:
            raise ConfigError(f"Unexpected argument {line.words[1]!r}; the folder is --out=jobs.")
        if line.config is None:
            raise ConfigError(f"Name the experiment, as in: saejax jobs {word} --config=quickstart --out=jobs")
        return self._make(word, line)

    def _make(self, word: str, line: Line) -> int:
        from saejax.app.console import say
        from saejax.jobs.graph import write_job
        from saejax.jobs.runner import run_job
        from saejax.jobs.site import read_site
        from saejax.jobs.slurm import write_scripts
        from saejax.jobs.table import gather
        from saejax.plans.command import of_jobs

        site = read_site(self.site)
        planned = word == "slurm" and self.device
        estimates = of_jobs(line.experiment, self.device, self.devices) if planned else ()
        job = write_job(line.config, self.out, site, self.layers)
        if word == "local":
            code = run_job(job, self.at_once)
            gather(job)
            return code
        write_scripts(job, site, self.device, self.devices, estimates)
        for stage in job.stages:
            many = f", an array of {len(stage.tasks)}" if stage.array else ""
            say(f"jobs: {stage.name}{many}: {job.path / stage.name}.sh")
        say(f"jobs: hand them over with {job.path}/submit.sh, then: saejax jobs status {self.out}")
        return 0
