"""What differs between decoder architectures, as data: one row of `ARCHITECTURES` a `model_type`.

A row says how to read the checkpoint's config.json and where its tensors go. `decoder.py` knows only
`DecoderConfig`; a new architecture is a new row here plus, where it needs one, a new piece there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from saejax.core.errors import DataError


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shapes and conventions of one decoder; always read from the checkpoint, never from a table."""

    n_layer: int
    d_model: int
    n_head: int
    d_head: int
    d_mlp: int
    vocab_size: int
    context_length: int
    activation: str
    norm_eps: float
    tied_embeddings: bool

    def __post_init__(self) -> None:
        for field in ("n_layer", "d_model", "n_head", "d_head", "d_mlp", "vocab_size", "context_length"):
            value = getattr(self, field)
            # The bounds refuse a hostile config.json before anything is allocated.
            if type(value) is not int or not 0 < value <= 2**20:
                raise DataError(f"config.json: {field} is {value!r}; it must be a positive integer up to 2^20.")
        if not isinstance(self.norm_eps, float | int) or not 0 <= self.norm_eps < 1:
            raise DataError(f"config.json: the norm's epsilon is {self.norm_eps!r}; it must be a number in [0, 1).")


Tensors = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one `model_type` is read.

    Attributes:
        read_config: config.json -> DecoderConfig.
        read_params: (DecoderConfig, tensor by name) -> parameter tree of `decoder.run`.
        write_params: the inverse, parameter tree -> {tensor name: array}.
    """

    read_config: Callable[[dict[str, Any]], DecoderConfig]
    read_params: Callable[[DecoderConfig, Tensors], dict[str, Any]]
    write_params: Callable[[DecoderConfig, dict[str, Any]], dict[str, np.ndarray]]


def architecture(config_json: dict[str, Any], where: str) -> Architecture:
    """The row for a checkpoint's config.json.

    Raises:
        DataError: no row for its `model_type`, naming those there are.
    """
    model_type = config_json.get("model_type")
    if model_type not in ARCHITECTURES:
        raise DataError(
            f"{where}: the JAX decoder does not know model_type {model_type!r}; it knows "
            f"{', '.join(sorted(ARCHITECTURES))}."
        )
    return ARCHITECTURES[model_type]


def _gpt2_config(c: dict[str, Any]) -> DecoderConfig:
    plain = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for key, wanted in plain.items():
        if c.get(key, wanted) != wanted:
            raise DataError(f"config.json: {key}={c[key]} is a GPT-2 variant that is not supported.")
    if c["n_embd"] % c["n_head"]:
        raise DataError(f"config.json: n_embd={c['n_embd']} is not a multiple of n_head={c['n_head']}.")
    return DecoderConfig(
        n_layer=c["n_layer"],
        d_model=c["n_embd"],
        n_head=c["n_head"],
        d_head=c["n_embd"] // c["n_head"],
        d_mlp=c.get("n_inner") or 4 * c["n_embd"],
        vocab_size=c["vocab_size"],
        context_length=c["n_positions"],
        activation=c.get("activation_function", "gelu_new"),
        norm_eps=c.get("layer_norm_epsilon", 1e-5),
        tied_embeddings=c.get("tie_word_embeddings", True),
    )


def _gpt2_params(c: DecoderConfig, tensor: Tensors) -> dict[str, Any]:
    def norm(name: str) -> dict[str, np.ndarray]:
        return {"w": tensor(f"{name}.weight"), "b": tensor(f"{name}.bias")}

    def block(i: int) -> dict[str, Any]:
        h = f"h.{i}"
        # Conv1D holds its weight as [in, out], so nothing is transposed.
        w_q, w_k, w_v = np.split(tensor(f"{h}.attn.c_attn.weight"), 3, axis=1)
        b_q, b_k, b_v = np.split(tensor(f"{h}.attn.c_attn.bias"), 3)
        heads = (c.n_head, c.d_head)
        return {
            "ln1": norm(f"{h}.ln_1"),
            "attn": {
                "W_Q": w_q.reshape(c.d_model, *heads),
                "W_K": w_k.reshape(c.d_model, *heads),
                "W_V": w_v.reshape(c.d_model, *heads),
                "b_Q": b_q.reshape(heads),
                "b_K": b_k.reshape(heads),
                "b_V": b_v.reshape(heads),
                "W_O": tensor(f"{h}.attn.c_proj.weight").reshape(*heads, c.d_model),
                "b_O": tensor(f"{h}.attn.c_proj.bias"),
            },
            "ln2": norm(f"{h}.ln_2"),
            "mlp": {
                "W_in": tensor(f"{h}.mlp.c_fc.weight"),
                "b_in": tensor(f"{h}.mlp.c_fc.bias"),
                "W_out": tensor(f"{h}.mlp.c_proj.weight"),
                "b_out": tensor(f"{h}.mlp.c_proj.bias"),
            },
        }

    params = {
        "W_E": tensor("wte.weight"),
        "W_pos": tensor("wpe.weight"),
        "blocks": [block(i) for i in range(c.n_layer)],
        "ln_final": norm("ln_f"),
    }
    if not c.tied_embeddings:
        params["W_U"] = tensor("lm_head.weight").T
    return params


def _gpt2_tensors(c: DecoderConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    out = {"wte.weight": params["W_E"], "wpe.weight": params["W_pos"]}

    def put_norm(name: str, norm: dict[str, Any]) -> None:
        out[f"{name}.weight"], out[f"{name}.bias"] = norm["w"], norm["b"]

    for i, block in enumerate(params["blocks"]):
        h, attn, mlp = f"h.{i}", block["attn"], block["mlp"]
        put_norm(f"{h}.ln_1", block["ln1"])
        put_norm(f"{h}.ln_2", block["ln2"])
        flat = [np.reshape(attn[k], (c.d_model, -1)) for k in ("W_Q", "W_K", "W_V")]
        out[f"{h}.attn.c_attn.weight"] = np.concatenate(flat, axis=1)
        out[f"{h}.attn.c_attn.bias"] = np.concatenate([np.ravel(attn[k]) for k in ("b_Q", "b_K", "b_V")])
        out[f"{h}.attn.c_proj.weight"] = np.reshape(attn["W_O"], (-1, c.d_model))
        out[f"{h}.attn.c_proj.bias"] = attn["b_O"]
        out[f"{h}.mlp.c_fc.weight"], out[f"{h}.mlp.c_fc.bias"] = mlp["W_in"], mlp["b_in"]
        out[f"{h}.mlp.c_proj.weight"], out[f"{h}.mlp.c_proj.bias"] = mlp["W_out"], mlp["b_out"]
    put_norm("ln_f", params["ln_final"])
    if not c.tied_embeddings:
        out["lm_head.weight"] = np.transpose(params["W_U"])
    return {
        (name if name.startswith("lm_head") else f"transformer.{name}"): np.ascontiguousarray(value)
        for name, value in out.items()
    }


ARCHITECTURES: dict[str, Architecture] = {"gpt2": Architecture(_gpt2_config, _gpt2_params, _gpt2_tensors)}
