"""Optional packages that an experiment needs: missing ones are refused with the configuration, before any work."""

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from saejax.app.experiment import Experiment
from saejax.core.errors import ConfigError, SaejaxError
from saejax.core.extras import installing
from saejax.core.wandb_runs import refuse_no_login
from saejax.parallel import Process, from_first
from saejax.text.config import SourceConfig
from saejax.text.paths import ending, files_of

Part = Literal["text", "lm", "train"]


def refuse_missing(e: Experiment, *parts: Part) -> None:
    """Raise ConfigError where a package is not installed that a setting of these sections needs, or has no login."""
    for part, setting, package, extra in _needed(e):
        if part in parts and not _is_there(package):
            raise ConfigError(f"{setting} needs the package {package}: {installing(extra)}")
    if "train" in parts and e.train.wandb:
        refuse_no_login()


def refuse_untrainable(e: Experiment, process: Process) -> None:
    """Raise as `refuse_missing` of a training, in all processes: the first one looks, because it alone writes."""

    def refuse() -> int:
        refuse_missing(e, "train")
        return 0

    from_first(process, refuse)


def _is_there(package: str) -> bool:
    """True for a package that can be imported; it is not."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _needed(e: Experiment) -> Iterator[tuple[Part, str, str, str]]:
    """(section, what asks for it, package, extra)."""
    for source in e.text.sources or (e.text,):
        if source.source == "hub":
            yield "text", "text.source='hub'", "datasets", "data"
        paths = _paths(source)
        for end, package in ((".parquet", "pyarrow"), (".zst", "zstandard")):
            if first := next((path for path in paths if ending(path).endswith(end)), None):
                yield "text", f"text.paths={str(first)!r}", package, "data"
        if source.chat:
            yield "text", "text.chat=True", "jinja2", "chat"
    if e.lm.model and e.lm.backend == "torch":
        yield "lm", "lm.backend='torch'", "torch", "torch"
    for key, model in (("model", e.lm.model), ("second", e.lm.second)):
        if model.lower().endswith(".gguf"):
            yield "lm", f"lm.{key}={model!r}", "gguf", "gguf"
    if e.train.tensorboard:
        yield "train", "train.tensorboard=True", "tensorboardX", "tensorboard"
    if e.train.wandb:
        yield "train", "train.wandb=True", "wandb", "wandb"


def _paths(source: SourceConfig) -> list[Path]:
    """The files that a source names; what is wrong with its paths is said by whoever reads them."""
    if source.source not in ("files", "prompts"):
        return []
    with contextlib.suppress(SaejaxError), warnings.catch_warnings(action="ignore"):
        return files_of(source.paths)
    return []
