"""Wishes of a cluster, from a small YAML file."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml

from saejax.core.config import from_config_dict, nearest
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_bounded

STAGES = ("capture", "train", "sweep", "table", "evaluate", "report", "study", "prefix", "figures")
_LARGEST = 1 << 20
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_UNITS = {"m": 60, "h": 3600, "d": 86_400}


@dataclasses.dataclass(frozen=True)
class Site:
    """Options by which jobs are asked for at a site.

    Attributes:
        partition, account, qos: as sbatch takes them; empty leaves them to the site.
        time: of a job that no plan knows, as "90m", "12h" or "1-12:00:00".
        time_limit: no job asks for more; a training that needs more goes on after each limit.
        margin: a job asks for so many times what the plan says, and for ten minutes at least.
        warning: seconds before its limit at which a job is told to save.
        requeues: times that one job may be put back into the queue.
        at_once: tasks of an array that run at a time; 0 for all.
        nodes: of each job; a training on several nodes is one task a node, joined.
        cpus: of each task; 0 leaves it to the site.
        memory: of each node, as "32G"; empty takes the plan's, or the site's default where there is none.
        gpus: the option that asks for `{devices}` accelerators on a node; without --device=cpu alone.
        modules: loaded before anything else.
        setup: shell lines that run after that.
        container: words before the command, as "apptainer exec --nv saejax.sif".
        python: the interpreter; empty means the one that wrote the scripts.
        sbatch: further options of sbatch, one each, as "--constraint=a100".
        stages: {stage: other values of these keys}, of capture, train, sweep, table, evaluate, report, study, prefix,
            figures.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = "1h"
    time_limit: str = ""
    margin: float = 1.5
    warning: int = 120
    requeues: int = 20
    at_once: int = 0
    nodes: int = 1
    cpus: int = 0
    memory: str = ""
    gpus: str = "--gpus-per-node={devices}"
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: str = ""
    python: str = ""
    sbatch: tuple[str, ...] = ()
    stages: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            for text in value if isinstance(value, tuple) else (value,):
                # A line break would be a line of its own in a script.
                if isinstance(text, str) and re.search(r"[\x00-\x1f\x7f]", text):
                    raise ConfigError(f"site: {field.name} is {text!r}; it must be one line.")
        for name in ("partition", "account", "qos", "memory"):
            if not re.fullmatch(r"[\w.,:@+-]*", getattr(self, name)):
                raise ConfigError(f"site: {name} is {getattr(self, name)!r}; it must be one word.")
        for option in (*self.sbatch, *filter(None, [self.gpus])):
            if not option.startswith("-"):
                raise ConfigError(f"site: {option!r} is no option of sbatch; write it as --constraint=a100.")
        for name, low in (("margin", 1), ("warning", 1), ("requeues", 0), ("at_once", 0), ("nodes", 1), ("cpus", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"site: {name} is {getattr(self, name)}; it must be at least {low}.")
        seconds_of(self.time, "time")
        if self.time_limit:
            seconds_of(self.time_limit, "time_limit")

    def of(self, stage: str) -> "Site":
        """The values for one stage."""
        changes = self.stages.get(stage, {})
        here = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "stages"}
        return from_config_dict(Site, here | changes, f"site: stages.{stage}")


def read_site(path: str) -> Site:
    """The site of a file; the defaults where the path is empty.

    Raises:
        ConfigError: an unknown key or stage, with the nearest, or a value that cannot be meant.
        DataError: the file is missing or no YAML.
    """
    if not path:
        return Site()
    try:
        content = yaml.safe_load(read_bounded(path, _LARGEST))
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not YAML: {' '.join(str(error).split())[:200]}") from None
    return site_of({} if content is None else content, path)


def site_of(content: Any, where: str) -> Site:
    """The site of what a file holds; raises as `read_site`."""
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{where} must hold keys with values, as partition: gpu.")
    site = from_config_dict(Site, content, "site")
    for stage, changes in site.stages.items():
        if stage not in STAGES:
            raise ConfigError(f"Unknown key site.stages.{stage}.{nearest(str(stage), STAGES)}")
        if not isinstance(changes, Mapping) or "stages" in changes:
            raise ConfigError(f"site: stages.{stage} must hold keys of the site, as partition: gpu.")
        site.of(stage)
    return site


def seconds_of(text: str, what: str) -> int:
    """Seconds of "90m", "12h", "2d", "1:30:00" or "2-00:00:00".

    Raises:
        ConfigError: it is none of them, or less than a minute, which Slurm cannot tell apart.
    """
    if match := re.fullmatch(r"(\d{1,9})([mhd])", text):
        seconds_meant = int(match[1]) * _UNITS[match[2]]
    elif match := _TIME.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        seconds_meant = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    else:
        raise ConfigError(f"site: {what} is {text!r}; write it as 90m, 12h, 2d or '1-12:00:00'.")
    if seconds_meant < 60:
        raise ConfigError(f"site: {what} is {text!r}; Slurm counts in minutes, and one is the least.")
    return seconds_meant


def slurm_time(seconds: float) -> str:
    """As sbatch takes it, D-HH:MM:SS, in whole minutes upwards."""
    minutes = -(-int(seconds) // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"
