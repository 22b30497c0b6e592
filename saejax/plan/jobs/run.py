"""`saejax jobs`: what each of its words does."""

from collections.abc import Mapping, Sequence
from typing import Any

from saejax.app.console import say
from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.plan.jobs import figures, status
from saejax.plan.jobs.folder import make, read
from saejax.plan.jobs.local import run_local
from saejax.plan.jobs.site import read_site
from saejax.plan.jobs.slurm import Estimate, write_scripts

_MAKING = ("slurm", "local")
_READING = ("status", "cancel", "figures")
WORDS = (*_MAKING, *_READING)


def run_jobs(
    words: Sequence[str],
    config: Any,
    flags: Mapping[str, Any],
    estimates: Sequence[Estimate] = (),
) -> int:
    """Do what the first word says; returns the exit code.

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
    folder = make(config, flags["out"], site, flags["layers"])
    if word == "local":
        code = run_local(folder, flags["at_once"])
        figures.gather(folder)
        return code
    write_scripts(folder, flags["device"], flags["devices"], estimates)
    for job in folder.jobs:
        say(f"jobs: {job.name}{f', an array of {len(job.tasks)}' if job.array else ''}: {folder.path / job.name}.sh")
    say(f"jobs: hand them over with {folder.path}/submit.sh, then: saejax jobs status {flags['out']}")
    return 0


def _read(word: str, words: Sequence[str], config: Any) -> int:
    if config is not None or len(words) != 1:
        raise ConfigError(f"Give the folder of the jobs alone, as in: saejax jobs {word} jobs")
    folder = read(words[0])
    {"status": status.print_status, "cancel": status.cancel, "figures": figures.gather}[word](folder)
    return 0
