"""Language models as their config.json says they are: no weights are read.

What the hub does not give at once (no network, a licence not accepted) is taken from model_configs.json beside this
file, for the models that it holds, and the plan says so.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from saejax.capture.hook_points import Named
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LMConfig, checkpoint
from saejax.lm.conventions import DecoderConfig
from saejax.lm.families import ARCHITECTURES
from saejax.lm.model import config_folder, runs_in_torch
from saejax.lm.pair import PREFIX
from saejax.lm.shape import ModelShape
from saejax.lm.torch_hooks import torch_shape
from saejax.text import Tokenizer

# {hub id: {"parameters", "config": config.json}} of the models that shipped experiments and reports name.
PUBLISHED: dict[str, Any] = {
    model["model"]: model
    for model in json.loads((Path(__file__).parent / "model_configs.json").read_text(encoding="utf-8")).values()
}


@dataclasses.dataclass(frozen=True)
class TwoModels:
    """The hook points of a model and of the one that it is compared with."""

    first: Named
    second: Named

    def hook_points(self) -> Mapping[str, int]:
        return {**self.first.hook_points(), **{PREFIX + name: d for name, d in self.second.hook_points().items()}}

    def hook_point(self, name: str) -> str:
        if name.startswith(PREFIX):
            return PREFIX + self.second.hook_point(name.removeprefix(PREFIX))
        return self.first.hook_point(name)


def shapes_of(lm: LMConfig) -> tuple[ModelShape, ...]:
    """The model of an experiment, and the second one where there is one.

    Raises:
        ConfigError, DataError: a model that is not named, or whose config.json cannot be had or read.
    """
    if not lm.model:
        raise ConfigError("lm.model is empty: a plan needs the model's config.json. Name the model that was captured.")
    named = [(lm.model, lm.revision), *([(lm.second, lm.second_revision)] if lm.second else ())]
    shapes = [shape_of(*one, lm.backend) for one in named]
    return tuple(x.untied() if lm.center_writing_weights and isinstance(x, DecoderConfig) else x for x in shapes)


@cache
def has_bos(model: str, revision: str = "") -> bool | None:
    """True if a model whose config.json is here has a bos token; None where its tokenizer is not here."""
    try:
        return bool(Tokenizer.from_folder(config_folder(model, revision)).bos)
    except DataError:
        return None


@cache
def shape_of(model: str, revision: str = "", backend: str = "auto") -> ModelShape:
    """The shape of a model, from its config.json alone."""
    try:
        folder = config_folder(model, revision)
    except DataError as error:
        if model not in PUBLISHED:
            raise DataError(
                f"{error} A plan needs config.json alone: a folder that holds nothing else will do."
            ) from None
        published = PUBLISHED[model]["config"]
        config = ARCHITECTURES[published["model_type"]].read_config(published)
        note = "config.json from the copy in saejax, since the hub could not be asked"
        return dataclasses.replace(config, model=model, note=note)
    shape = torch_shape(folder) if runs_in_torch(folder, backend) else checkpoint.read_config(folder)[1]
    return dataclasses.replace(shape, model=model)
