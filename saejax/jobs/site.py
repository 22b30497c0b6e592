"""Wishes of a cluster, from a small YAML file."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml

from saejax.core.config import from_config_dict, nearest
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_bounded
from saejax.core.settings import Settings, section, setting

STAGES = ("capture", "train", "sweep", "table", "evaluate", "report", "study", "prefix", "figures")
_LARGEST = 1 << 20
_UNITS = {"m": 60, "h": 3600, "d": 86_400}


_WORD = "As sbatch takes it; empty leaves it to the site."


@dataclasses.dataclass(frozen=True)
class Site(Settings, section="site"):
    """Options by which jobs are asked for at a site."""

    partition: str = setting("", _WORD)
    account: str = setting("", _WORD)
    qos: str = setting("", _WORD)
    time: str = setting("1h", "Of a job that no plan knows, as 90m, 12h or 1-12:00:00.")
    time_limit: str = setting("", "No job asks for more; a training that needs more goes on after each limit.")
    margin: float = setting(1.5, "So many times what the plan says is asked for, and ten minutes at least.", low=1)
    warning: int = setting(120, "Seconds before its limit at which a job is told to save.", low=1)
    requeues: int = setting(20, "Times that one job may be put back into the queue.", low=0)
    at_once: int = setting(0, "Tasks of an array that run at a time; 0 for all.", low=0)
    nodes: int = setting(1, "Of each job; a training on several nodes is one task a node, joined.", low=1)
    cpus: int = setting(0, "Of each task; 0 leaves it to the site.", low=0)
    memory: str = setting("", "Of each node, as 32G; empty takes the plan's, else the site's default.")
    gpus: str = setting(
        "--gpus-per-node={devices}", "The option that asks for {devices} accelerators on a node; none for --device=cpu."
    )
    modules: tuple[str, ...] = setting((), "Loaded before anything else.")
    setup: tuple[str, ...] = setting((), "Shell lines that run after that.")
    container: str = setting("", "Words before the command, as apptainer exec --nv saejax.sif.")
    python: str = setting("", "The interpreter; empty means the one that wrote the scripts.")
    sbatch: tuple[str, ...] = setting((), "Further options of sbatch, one each, as --constraint=a100.")
    stages: dict = section(dict, f"Other values of these keys for a stage: {', '.join(STAGES)}.")

    def __post_init__(self) -> None:
        super().__post_init__()
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
        seconds_of(self.time, "time")
        if self.time_limit:
            seconds_of(self.time_limit, "time_limit")

    def of(self, stage: str) -> "Site":
        """The values for one stage."""
        here = {key: value for key, value in vars(self).items() if key != "stages"}
        return from_config_dict(Site, here | self.stages.get(stage, {}), f"site: stages.{stage}")


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
    in_units = re.fullmatch(r"(\d{1,9})([mhd])", text)
    seconds = int(in_units[1]) * _UNITS[in_units[2]] if in_units else clock_seconds(text)
    if seconds is None:
        raise ConfigError(f"site: {what} is {text!r}; write it as 90m, 12h, 2d or '1-12:00:00'.")
    if seconds < 60:
        raise ConfigError(f"site: {what} is {text!r}; Slurm counts in minutes, and one is the least.")
    return int(seconds)


def clock_seconds(text: str) -> float | None:
    """Seconds of [[D-]HH:]MM:SS; None of anything else."""
    if (match := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)) is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def slurm_time(seconds: float) -> str:
    """As sbatch takes it, D-HH:MM:SS, in whole minutes upwards."""
    minutes = -(-int(seconds) // 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"
