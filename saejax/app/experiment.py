"""One experiment, whole: every stage's configuration, and where its stores and its run lie."""

import dataclasses
import functools
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from saejax.analysis import ReportConfig
from saejax.app import experiments
from saejax.app.study_config import StudyConfig
from saejax.app.sweep.config import SweepConfig
from saejax.attribution import AttributionConfig
from saejax.capture import CaptureConfig
from saejax.coders import CoderConfig
from saejax.coders.parts import to_record, unregistered
from saejax.core import settings
from saejax.core.config import OpenConfig, differences, from_config_dict, to_config_dict, to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_object
from saejax.core.settings import Settings, section, setting
from saejax.evals import EvalConfig, GateConfig
from saejax.evals.probing.config import ProbesConfig
from saejax.evals.truth.world import World
from saejax.lm import LMConfig
from saejax.parallel import ParallelConfig
from saejax.prefix import PrefixConfig
from saejax.runs.folder import RESERVED, Run, Sweep
from saejax.runs.made import other_settings
from saejax.text import TextConfig
from saejax.training import TrainConfig

# Of common file systems, in bytes.
_LONGEST_NAME = 255
# The live page calls other projects' dictionaries so: @label.
FOREIGN = "@"


# What things are called and where they lie decides no numbers.
_undecided = functools.partial(setting, decides=False)
_per_member = functools.partial(setting, per_member=True)


@dataclasses.dataclass(frozen=True)
class Experiment(Settings):
    """The whole way of one experiment, from text to report."""

    name: str = _undecided("run", "The run's folder below `runs_dir`.")
    store: str = _undecided(
        "",
        "The store's folder below `stores_dir`; empty means the run's name. Several runs may share one. A run that was "
        "begun on a store goes on with these activations alone, wherever they lie.",
    )
    runs_dir: str = _undecided("runs", "The folder of all runs.")
    stores_dir: str = _undecided(
        "stores", "The folder of all stores, or a URL that tensorstore knows, as gs://bucket/stores."
    )
    seed: int = setting(0, "Seed of everything random.", low=0)
    coder_seed: int | None = _per_member(
        None,
        "Seed of the coder's start and of resampling, where it is to be another one; the activations then still come "
        "in the order of `seed`.",
        low=0,
    )
    hook_point: str = _per_member("", "What a coder of one site reads; empty means the first of capture.hook_points.")
    reads: tuple[str, ...] = _per_member(
        (),
        "The hook points that a coder of several sites or a transcoder reads, in order, each one captured. Empty: "
        "hook_point, or all that is captured for a crosscoder.",
    )
    writes: tuple[str, ...] = _per_member(
        (),
        "The hook points that such a coder writes. Empty: what is read, for coders that reconstruct their input; else "
        "the mlp_out of each block read.",
    )
    lm: LMConfig = section(LMConfig, "The language model.")
    text: TextConfig = section(TextConfig, "The text, and how it is packed.")
    capture: CaptureConfig = section(CaptureConfig, "Which activations are stored.")
    coder: CoderConfig = section(CoderConfig, "The sparse dictionary.", per_member=True)
    train: TrainConfig = section(TrainConfig, "Its training.")
    parallel: ParallelConfig = section(ParallelConfig, "Devices and processes.", decides=False)
    eval: EvalConfig = section(EvalConfig, "Evaluation on held-out text.", decides=False)
    probes: ProbesConfig = section(ProbesConfig, "`saejax evaluate --probes`.", decides=False)
    gates: GateConfig = section(GateConfig, "What a run must reach.", decides=False)
    report: ReportConfig = section(ReportConfig, "The feature browser.", decides=False)
    sweep: SweepConfig = section(SweepConfig, "Many coders at once.", decides=False)
    attribution: AttributionConfig = section(AttributionConfig, "The graphs of a study.", decides=False)
    study: StudyConfig = section(
        StudyConfig, "`saejax study`: which behaviours, and how they are examined.", decides=False
    )

    truth: World = section(World, "`saejax truth`: the features that are planted.")
    prefix: PrefixConfig = section(PrefixConfig, "`saejax prefix`: latents in place of a text.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("name", "store"):
            value = getattr(self, key)
            if Path(value).name != value or value in (".", "..") or (key == "name" and not value):
                raise ConfigError(f"{key} is {value!r}; it must be the name of one folder, without slashes.")
            if any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in value):
                raise ConfigError(
                    f"{key} is {value!r}; a folder's name must have no line breaks or control characters."
                )
            if (length := len(value.encode())) > _LONGEST_NAME:
                raise ConfigError(
                    f"{key} has {length} bytes ({value[:20]!r}...); the name of a folder has at most {_LONGEST_NAME}."
                )
        if "://" in self.runs_dir:
            raise ConfigError(
                f"runs_dir is {self.runs_dir!r}; a run's files are appended to, renamed and locked, which no bucket "
                "can. Name a folder on a disk, or mount the bucket (gs://: gcsfuse, s3://: s3fs) and name the mounted "
                "folder. stores_dir may be a URL."
            )
        if not self.stores_dir:
            raise ConfigError("stores_dir is empty; name a folder ('.' is the current one).")

    @property
    def start_seed(self) -> int:
        """The seed of the coder's start and of resampling."""
        return self.seed if self.coder_seed is None else self.coder_seed

    @property
    def swept(self) -> bool:
        """It trains many coders: its section `sweep` names something to vary."""
        return any(to_json(self.sweep).values())

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def run(self) -> Run:
        return Run(self.run_dir)

    def within(self, e: "Experiment", name: str, **changes: Any) -> "Experiment":
        """`e` as a run in the folder of this one, on the same store."""
        runs, store = str(self.run_dir), self.store or self.name
        return dataclasses.replace(e, name=name, runs_dir=runs, store=store, **changes)

    def store_dir(self, split: str) -> str:
        """A local path, or a URL where `stores_dir` is one."""
        return f"{self.stores_dir.rstrip('/')}/{self.store or self.name}/{split}"


def default_config() -> OpenConfig:
    """Every key with its default: what an experiment file starts from."""
    return to_config_dict(Experiment())


def experiment(config: config_dict.ConfigDict | str | Experiment) -> Experiment:
    """The boundary: settings in, a checked, frozen experiment out.

    Args:
        config: a ConfigDict, or what --config takes: quickstart, truth:large, mine.py. An experiment stays as it is.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or settings that cannot be run; no such experiment.
    """
    if isinstance(config, Experiment):
        return config
    config = experiments.named(config) if isinstance(config, str) else config
    return well_named(from_config_dict(Experiment, config.to_dict()))


def well_named(e: Experiment) -> Experiment:
    """The experiment, whose run and store every list will show.

    Raises:
        ConfigError: their names are of something else, or hidden.
    """
    for key in ("name", "store"):
        if (name := getattr(e, key)).startswith((".", FOREIGN)):
            raise ConfigError(f"{key} is {name!r}; it must not begin with '.' or '{FOREIGN}'. Choose another name.")
    if e.name in RESERVED:
        raise ConfigError(f"name is {e.name!r}, which means something else in a folder of runs. Choose another name.")
    return e


def to_run_json(e: Experiment) -> dict[str, Any]:
    """The content of config.json: every key with its value, those of the coder's preset too.

    So a run keeps its meaning when a default or a preset changes in a later version.
    """
    coder = dataclasses.replace(e.coder.resolved(), dead_after_tokens=e.coder.dead_after(e.train.tokens))
    config = to_json(dataclasses.replace(e, coder=coder))
    config["coder"], parts = to_record(config["coder"])
    return config | ({"parts": parts} if parts else {})


def deciding(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that decides a run's numbers."""
    return settings.deciding(Experiment, config)


def read_experiment(path: Path) -> Experiment:
    """The experiment that the config.json of a run says (`from_json`).

    Raises:
        DataError: it is missing, damaged or of a later version; names it.
    """
    return recorded(path, read_object(path))


def refuse_other_run(e: Experiment) -> None:
    """Raise DataError if the run's folder holds another experiment's run, or a sweep."""
    if Sweep(e.run_dir).exists:
        raise DataError(f"{e.run_dir} holds a sweep. Choose another folder (--config.name) for a single run.")
    if e.run.config.is_file():
        before, now = (deciding(to_run_json(either)) for either in (read_experiment(e.run.config), e))
        if not before["lm"].get("model"):
            # A model decided nothing yet. Which one it is now, with its weights, is compared by provenance.json.
            before, now = before | {"lm": None}, now | {"lm": None}
        if changed := differences(before, now):
            raise other_settings(e.run_dir, "a run", changed)


def recorded(path: Path, value: Any) -> Experiment:
    """As `read_experiment`, of what was read from `path`."""
    if not isinstance(value, dict):
        raise DataError(f"{path} is damaged: it holds no experiment. Restore it.")
    try:
        return from_json(value)
    except ConfigError as error:
        raise DataError(f"{path} cannot be understood. {error}") from None


def from_json(value: dict[str, Any]) -> Experiment:
    """The experiment of a run's config.json.

    Raises:
        ConfigError: what it holds cannot be run, or needs a part that nobody has registered.
    """
    if missing := unregistered(value.get("parts")):
        raise ConfigError(missing)
    return from_config_dict(Experiment, {key: item for key, item in value.items() if key != "parts"})


def with_settings(e: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """`e` with {"section.key": value} set, through the configuration's boundary.

    Raises:
        ConfigError: a key or a value that cannot be.
    """
    config = to_json(e)
    for key, value in settings.items():
        *sections, leaf = key.split(".")
        node = config
        for section_name in sections:
            node = node.setdefault(section_name, {})
            if not isinstance(node, dict):
                raise ConfigError(f"config.{key}: {section_name} is not a section.")
        node[leaf] = value
    return from_json(config)
