"""One experiment, whole: every stage's configuration, and where its stores and its run lie."""

import dataclasses
import unicodedata
from pathlib import Path
from typing import Any

from ml_collections import config_dict

from saejax.analysis import ReportConfig
from saejax.app.sweep.config import MAX_SEED, SweepConfig
from saejax.capture import CaptureConfig
from saejax.coders import CoderConfig
from saejax.core.config import from_config_dict, to_config_dict, to_json
from saejax.core.errors import ConfigError
from saejax.evals import EvalConfig, GateConfig
from saejax.lm import LMConfig
from saejax.parallel import ParallelConfig
from saejax.text import TextConfig
from saejax.training import TrainConfig

# Of common file systems, in bytes.
_LONGEST_NAME = 255


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The whole way of one experiment, from text to report.

    Attributes:
        name: the run's folder below `runs_dir`.
        store: the store's folder below `stores_dir`; empty means the run's name. Several runs may share one. A run that
            was begun on a store goes on with these activations alone, wherever they lie.
        runs_dir, stores_dir: where those are; stores_dir may be a URL that tensorstore knows, as gs://bucket/stores.
        seed: of everything random.
        coder_seed: of the coder's start and of resampling, where it is to be another one; the activations then still
            come in the order of `seed`.
        hook_point: what a coder of one site reads; empty means the first of capture.hook_points.
        reads, writes: the hook points of a coder of several sites, or of a transcoder, in order, each one captured.
            Empty reads: hook_point, or all that is captured for a crosscoder. Empty writes: what is read, for coders
            that reconstruct their input; else the mlp_out of each block read.
    """

    name: str = "run"
    store: str = ""
    runs_dir: str = "runs"
    stores_dir: str = "stores"
    seed: int = 0
    coder_seed: int | None = None
    hook_point: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    lm: LMConfig = dataclasses.field(default_factory=LMConfig)
    text: TextConfig = dataclasses.field(default_factory=TextConfig)
    capture: CaptureConfig = dataclasses.field(default_factory=CaptureConfig)
    coder: CoderConfig = dataclasses.field(default_factory=CoderConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    gates: GateConfig = dataclasses.field(default_factory=GateConfig)
    report: ReportConfig = dataclasses.field(default_factory=ReportConfig)
    sweep: SweepConfig = dataclasses.field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
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
        if not self.stores_dir:
            raise ConfigError("stores_dir is empty; name a folder ('.' is the current one).")
        if not 0 <= self.start_seed <= MAX_SEED:
            raise ConfigError(f"The seed is {self.start_seed}; it must be between 0 and {MAX_SEED}.")

    @property
    def start_seed(self) -> int:
        """The seed of the coder's start and of resampling."""
        return self.seed if self.coder_seed is None else self.coder_seed

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    def store_dir(self, split: str) -> str:
        """A local path, or a URL where `stores_dir` is one."""
        return f"{self.stores_dir.rstrip('/')}/{self.store or self.name}/{split}"


def default_config() -> config_dict.ConfigDict:
    """Every key with its default: what a file in configs/ starts from."""
    return to_config_dict(Experiment())


def experiment(config: config_dict.ConfigDict) -> Experiment:
    """The boundary: a ConfigDict in, a checked, frozen experiment out.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or settings that cannot be run.
    """
    return from_config_dict(Experiment, config.to_dict())


def to_run_json(e: Experiment) -> dict[str, Any]:
    """What config.json holds: every key with its value, those of the coder's preset too.

    So a run keeps its meaning when a default or a preset changes in a later version.
    """
    return to_json(dataclasses.replace(e, coder=e.coder.resolved()))


def from_json(value: dict[str, Any]) -> Experiment:
    """The experiment of a run's config.json; keys that it does not have yet take their defaults.

    But text.split_by, without which rows were split by name. A gate that was written as null was infinite, which gates
    cannot be any more: it takes its default.
    """
    text, gates = value.get("text"), value.get("gates")
    if isinstance(text, dict) and "split_by" not in text:
        parts = text.get("sources") or [text]
        if any(part.get("source", "stdlib") != "stdlib" for part in parts if isinstance(part, dict)):
            value = value | {"text": text | {"split_by": "name"}}
    if isinstance(gates, dict):
        value = value | {"gates": {name: bar for name, bar in gates.items() if bar is not None}}
    return from_config_dict(Experiment, value)


# Sections of the configuration that decide what a run's numbers are; the others may change between calls.
_DECIDES_RUN = ("seed", "coder_seed", "hook_point", "reads", "writes", "lm", "text", "capture", "coder", "train")
_TIMING = (
    *("validate_every", "log_every", "checkpoint_every", "keep_checkpoints", "keep_best", "keep_every"),
    *("max_skipped_steps", "tensorboard"),
)


def deciding(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that decides a run's numbers."""
    kept = {key: config.get(key) for key in _DECIDES_RUN}
    # Where the model runs decides nothing.
    kept["lm"] = {k: v for k, v in (kept["lm"] or {}).items() if k != "device"}
    return kept | {"train": {k: v for k, v in (kept["train"] or {}).items() if k not in _TIMING}}
