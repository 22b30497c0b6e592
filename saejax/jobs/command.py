"""`saejax jobs`: slurm, local, status, cancel, figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from saejax.app.console import say
from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.jobs import figures, table
from saejax.jobs.graph import write_job
from saejax.jobs.job import read_job
from saejax.jobs.runner import run_job
from saejax.jobs.site import read_site
from saejax.jobs.slurm import Estimate, write_scripts

_MAKING = ("slurm", "local")
_READING = ("status", "cancel", "figures")
WORDS = (*_MAKING, *_READING)


def run_jobs(
    words: Sequence[str],
    config: Any,
    flags: Mapping[str, Any],
    estimates: Sequence[Estimate] = (),
) -> int:
    """Make, run, show or end the jobs of an experiment, as the first word says; returns the exit code.

    Args:
        config: the experiment's settings; None where none were given.
        flags: by name.
        estimates: of the planner, for time limits and memory; without them the site's `time` counts.

    Raises:
        ConfigError: an unknown word, or what it does not take.
    """
    word = words[0] if words else ""
    if word not in WORDS:
        raise ConfigError(f"`saejax jobs` has no word {word!r}.{nearest(word, WORDS)}")
    if word in _READING:
        return _read(word, words[1:], config)
    if len(words) > 1:
        raise ConfigError(f"Unexpected argument {words[1]!r}; the folder is --out=jobs.")
    if config is None:
        raise ConfigError(f"Name the experiment, as in: saejax jobs {word} --config=quickstart --out=jobs")
    site = read_site(flags["site"])
    job = write_job(config, flags["out"], site, flags["layers"])
    if word == "local":
        code = run_job(job, flags["at_once"])
        figures.gather(job)
        return code
    write_scripts(job, site, flags["device"], flags["devices"], estimates)
    for stage in job.stages:
        many = f", an array of {len(stage.tasks)}" if stage.array else ""
        say(f"jobs: {stage.name}{many}: {job.path / stage.name}.sh")
    say(f"jobs: hand them over with {job.path}/submit.sh, then: saejax jobs status {flags['out']}")
    return 0


def _read(word: str, words: Sequence[str], config: Any) -> int:
    if config is not None or len(words) != 1:
        raise ConfigError(f"Give the folder of the jobs alone, as in: saejax jobs {word} jobs")
    {"status": table.print_table, "cancel": table.cancel, "figures": figures.gather}[word](read_job(words[0]))
    return 0
