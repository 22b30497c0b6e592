"""A model's sizes and hook points, as data; from its config.json if the JAX decoder runs it."""

import dataclasses
import math
from typing import cast

import jax

from saejax.lm import checkpoint, parameters
from saejax.lm.conventions import DecoderConfig
from saejax.lm.model import LMConfig, config_folder, load_lm, runs_in_torch
from saejax.lm.points import DecoderPoints, HookPoint
from saejax.lm.torch_hooks import TorchModel, text_config
from saejax.lm.torch_hooks.shapes import config_number


@dataclasses.dataclass(frozen=True)
class HookList:
    """One model: its dimensions, which all come from the model itself, and its hook points.

    Attributes:
        model: the folder or id.
        architecture: `model_type` of config.json, or the class of a PyTorch module.
        backend: what runs it, jax or torch.
        n_head, n_kv_head, d_head, d_mlp: None where PyTorch runs the model and does not say.
        n_parameters: each counted once, also where embedding and unembedding are tied.
        number_types: of the weights on disk, as in ("BF16",), or as PyTorch has loaded them; empty if some are
            not here.
        points: in the order in which the model computes them; in PyTorch the names in blocks first.
        names: what resolves other names of the points.
    """

    model: str
    architecture: str
    backend: str
    n_layer: int
    d_model: int
    n_head: int | None
    n_kv_head: int | None
    d_head: int | None
    d_mlp: int | None
    vocab_size: int
    context_length: int
    n_parameters: int
    number_types: tuple[str, ...]
    points: tuple[HookPoint, ...]
    names: DecoderPoints | TorchModel = dataclasses.field(repr=False, compare=False)

    def hook_points(self) -> dict[str, int]:
        """{hook point: width} of those that can be stored."""
        return self.names.hook_points()

    def hook_point(self, name: str) -> str:
        """The canonical name; see `LanguageModel.hook_point`."""
        return self.names.hook_point(name)


def list_hook_points(
    model: str = "demo", revision: str = "", backend: str = "auto", dtype: str = "float32", device: str = ""
) -> HookList:
    """All hook points of a model with their shapes, names and dimensions; the arguments are those of `load_lm`.

    If the JAX decoder runs the model, only config.json is read (and fetched, for a hub id), and the headers of
    safetensors on disk. Nothing is loaded, so a model larger than this machine is listed too. If PyTorch runs it, the
    whole model is loaded, because shapes and names are measured on a few tokens.

    Raises:
        ConfigError: a `dtype` or `backend` that is not offered, or torch where it is not installed.
        DataError: it cannot be found, or it is a variant that nothing here runs; the message says what to do.
    """
    LMConfig(model, revision, dtype, backend=backend, device=device)
    folder = config_folder(model, revision)
    if runs_in_torch(folder, backend):
        lm = load_lm(model, revision, dtype, "torch", device)
        return _of_module(model, cast(TorchModel, lm))
    config_json, _ = checkpoint.read_config(folder)
    config, number_types = checkpoint.stored(folder)
    return HookList(
        model=model,
        architecture=config_json["model_type"],
        backend="jax",
        n_layer=config.n_layer,
        d_model=config.d_model,
        n_head=config.n_head,
        n_kv_head=config.kv_heads,
        d_head=config.d_head,
        d_mlp=config.d_mlp,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        n_parameters=count_parameters(config),
        number_types=number_types,
        points=tuple(DecoderPoints(config)),
        names=DecoderPoints(config),
    )


def count_parameters(config: DecoderConfig) -> int:
    """The sum of all parameters' sizes; nothing is allocated."""
    outer, block = (
        sum(math.prod(parameter.shape) for parameter in jax.tree.leaves(part(config)))
        for part in (parameters.outer_parameters, parameters.block_parameters)
    )
    return outer + config.n_layer * block


def _of_module(model: str, lm: TorchModel) -> HookList:
    config = text_config(lm.module)
    widths, theirs = lm.hook_points(), {ours: name for name, ours in lm.synonyms.items()}

    def point(name: str) -> HookPoint:
        block, _, short = name.rpartition(".")
        alias = f"{block}.{theirs[short]}" if name in lm.aliases and short in theirs else ""
        return HookPoint(name, (widths[name],), alias=alias, module=lm.aliases.get(name, ""))

    n_head = config_number(config, ("num_attention_heads", "num_heads")) or None
    return HookList(
        model=model,
        architecture=type(lm.module).__name__,
        backend="torch",
        n_layer=lm.config.n_layer,
        d_model=lm.config.d_model,
        n_head=n_head,
        n_kv_head=config_number(config, ("num_key_value_heads",)) or n_head,
        d_head=config_number(config, ("head_dim", "d_kv")) or None,
        d_mlp=widths.get("blocks.0.mlp_act"),
        vocab_size=lm.config.vocab_size,
        context_length=lm.config.context_length,
        n_parameters=sum(parameter.numel() for parameter in lm.module.parameters()),
        number_types=(str(next(lm.module.parameters()).dtype).removeprefix("torch."),),
        points=tuple(point(name) for name in widths),
        names=lm,
    )
