"""A language model as its config.json says it is: names, widths, parameters and work; no weights.

    parameters            of one block, and of everything outside of the blocks
    operations of a row   2 S P for P parameters that S tokens meet, and 4 S^2 H D a block for attention
    key-value cache       2 S K D a block: K heads of keys and values, D numbers each

What the hub does not give at once (no network, a licence not accepted) is taken from model_configs.json beside this
file, for the models that it holds, and the plan says so.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax

from saejax.capture.hook_points import Named
from saejax.core.errors import ConfigError, DataError
from saejax.lm import LMConfig, checkpoint, parameters
from saejax.lm.conventions import DecoderConfig
from saejax.lm.families import ARCHITECTURES
from saejax.lm.model import config_folder, runs_in_torch
from saejax.lm.pair import PREFIX
from saejax.lm.points import DecoderPoints
from saejax.lm.torch_hooks.shapes import torch_shapes

# {hub id: {"parameters", "config": config.json}} of the models that shipped experiments and reports name.
PUBLISHED: dict[str, Any] = {
    one["model"]: one
    for one in json.loads((Path(__file__).parent / "model_configs.json").read_text(encoding="utf-8")).values()
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(\w+)")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """One language model.

    Attributes:
        model: the id or folder.
        block, outer: parameters of one block, and of all outside of the blocks.
        kv_heads, d_head, n_head: of attention; 0 where PyTorch runs the model and it does not say.
        names: resolves hook points and knows their widths.
        config: the JAX decoder's; None where PyTorch runs the model.
        note: what to know of where this is from; empty where it is the model's own config.json.
    """

    model: str
    n_layer: int
    d_model: int
    d_mlp: int
    n_head: int
    kv_heads: int
    d_head: int
    vocab_size: int
    context_length: int
    block: int
    outer: int
    names: Named
    config: DecoderConfig | None
    note: str = ""

    @property
    def n_parameters(self) -> int:
        return self.outer + self.n_layer * self.block

    def depth(self, names: tuple[str, ...]) -> int:
        """How many blocks run for these hook points."""
        found = [_BLOCK.fullmatch(name) for name in names]
        if not found or any(one is None for one in found):
            return self.n_layer
        return max(int(one[1]) + (one[2] != "resid_pre") for one in found if one)

    def operations(self, length: int, depth: int | None = None) -> float:
        """Floating-point operations of a row of `length` tokens; without `depth` of the whole model, with logits."""
        blocks = self.n_layer if depth is None else depth
        attention = 4 * length**2 * self.n_head * self.d_head
        logits = 2 * length * self.d_model * self.vocab_size if depth is None else 0
        return blocks * (2 * length * self.block + attention) + logits

    def cache_bytes(self, length: int, width: int) -> int:
        """Bytes of the keys and values of one row of `length` tokens, in numbers of `width` bytes."""
        return 2 * self.n_layer * length * self.kv_heads * self.d_head * width


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
    first = shape_of(lm.model, lm.revision, lm.backend)
    return (first, shape_of(lm.second, lm.second_revision, lm.backend)) if lm.second else (first,)


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
        kept = PUBLISHED[model]["config"]
        config = ARCHITECTURES[kept["model_type"]].read_config(kept)
        return of_decoder(model, config, "config.json from the copy in saejax, since the hub could not be asked")
    if runs_in_torch(folder, backend):
        found = torch_shapes(folder)
        sizes = {
            field.name: getattr(found, field.name) for field in dataclasses.fields(found) if field.name != "places"
        }
        return ModelShape(model, **sizes, names=found, config=None)
    return of_decoder(model, checkpoint.read_config(folder)[1])


def of_decoder(model: str, config: DecoderConfig, note: str = "") -> ModelShape:
    """The shape of a model that the JAX decoder runs."""
    outer, block = (
        sum(math.prod(one.shape) for one in jax.tree.leaves(part(config)))
        for part in (parameters.outer_parameters, parameters.block_parameters)
    )
    c = config
    sizes = (c.n_layer, c.d_model, c.d_mlp, c.n_head, c.kv_heads, c.d_head, c.vocab_size, c.context_length)
    return ModelShape(model, *sizes, block, outer, DecoderPoints(c), c, note)
