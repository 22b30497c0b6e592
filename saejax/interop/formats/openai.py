"""OpenAI's sparse_autoencoder: one .pt file a layer, torch.save of Autoencoder.state_dict(). (its model.py, paths.py)

    latents = activation((x - pre_bias) W_enc + latent_bias),   x_hat = latents W_dec + pre_bias

A file whose activation is TopK is of layer-normalised tokens: its from_state_dict says so, the file does not. Linear
layers are kept as [out, in]; a tied decoder is the encoder transposed. The model is GPT-2 small; the place and the
layer are in the names of the published folders (resid_post_mlp_v5_32k/autoencoders/8.pt).
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.torch_file import names_in, read_torch
from saejax.interop.assemble import Layout, assemble
from saejax.trained import Format, TrainedCoder, register_format

_MOST_FILES = 1000
_AUTOENCODER = Layout(
    {"pre_bias": "b_dec", "latent_bias": "b_enc", "encoder.weight": "W_enc", "decoder.weight": "W_dec"},
    transposed=("encoder.weight", "decoder.weight"),
)
_TIED = "decoder.linear.weight"
# Counters of its training.
_STATISTICS = {"stats_last_nonzero", "latents_activation_frequency", "latents_mean_square"}
_SITES = {
    "mlp_post_act": "mlp_act",
    "resid_delta_attn": "attn_out",
    "resid_post_attn": "resid_mid",
    "resid_delta_mlp": "mlp_out",
    "resid_post_mlp": "resid_post",
}


@register_format
class OpenAI(Format):
    """One file a coder; a folder of them is a set."""

    name = "openai"
    title = "OpenAI's sparse_autoencoder"
    files = "8.pt"
    reads = frozenset({("autoencoder", "relu"), ("layernorm_autoencoder", "topk")})

    def here(self, path: Path) -> list[Path]:
        files = [path]
        if path.is_dir():
            files = sorted(path.glob("*.pt"), key=lambda file: (len(file.name), file.name))[:_MOST_FILES]
        return [file for file in files if file.suffix == ".pt" and names_in(file, "pre_bias", "latent_bias")]

    def read(self, path: Path, hook_points: Sequence[str] = ()) -> TrainedCoder:
        state = read_torch(path)
        tensors = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        tied = _TIED in tensors
        named = set(_AUTOENCODER.names) - ({"decoder.weight"} if tied else set())
        if tensors.keys() - named - _STATISTICS - {_TIED, "activation.k"} or named - tensors.keys():
            raise DataError(
                f"{path} holds {', '.join(map(str, tensors))}; an autoencoder of {self.title} has "
                f"{', '.join(_AUTOENCODER.names)}."
            )
        params = _AUTOENCODER.read(path, {name: tensors[name] for name in named})
        if tied:
            params["W_dec"] = params["W_enc"].T
        topology, sparsity, k, notes = _activation(path, state)
        model, site = _model_and_site(path)
        return assemble(
            path, topology, sparsity, params, hook_points, reads=site, writes=site, k=k, model=model, notes=notes
        )


def _activation(path: Path, state: Mapping[str, Any]) -> tuple[str, str, int | None, tuple[str, ...]]:
    """(topology, sparsity, k, notes)"""
    kind, more = state.get("activation", "ReLU"), state.get("activation_state_dict")
    more = more if isinstance(more, dict) else {}
    if kind == "ReLU":
        return "autoencoder", "relu", None, ()
    after = more.get("postact_fn", state.get("activation.postact_fn"))
    if kind != "TopK" or after != "ReLU":
        what = f"TopK with {after!r} behind it" if kind == "TopK" else repr(kind)
        raise DataError(f"{path}: its activation is {what}; saejax reads ReLU, and TopK with ReLU behind it.")
    k = more.get("k", state.get("activation.k"))
    k = k.item() if isinstance(k, np.ndarray) and k.size == 1 else k
    if type(k) is not int or k < 1:
        raise DataError(f"{path}: its TopK has no whole number k of at least 1. The file is damaged.")
    note = "Its tokens are layer-normalised, as its from_state_dict does for every TopK; the file does not say it."
    return "layernorm_autoencoder", "topk", k, (note,)


def _model_and_site(path: Path) -> tuple[str, tuple[str, ...]]:
    """(model, (hook point,)) from .../resid_post_mlp_v5_32k/autoencoders/8.pt; empty for other names."""
    if path.stem.isdigit():
        for part in reversed(Path(os.path.abspath(path)).parent.parts):
            match = re.fullmatch(rf"({'|'.join(_SITES)})(?:_v\w+)?", part)
            if match:
                return "gpt2", (f"blocks.{int(path.stem)}.{_SITES[match[1]]}",)
    return "", ()
