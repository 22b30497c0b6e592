"""config.json of a model in a GGUF file, from the file's metadata."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.lm.gguf.header import Header
from saejax.lm.gguf.tensors import FREQUENCIES, dequantized

# Of Llama 3.1 and later. The file holds what they make of the frequencies, not these numbers.
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_json(header: Header) -> dict[str, Any]:
    """The same model's config.json.

    Raises:
        DataError: an architecture, or a variant of it, that is not read; a number that is missing or none.
    """
    kind = header.text("general.architecture")
    if kind not in _FAMILIES:
        raise DataError(
            f"{header.path}: the architecture {kind[:80]!r} is not read from GGUF; {', '.join(_FAMILIES)} are. Give "
            "the model as a Hugging Face folder."
        )
    if "token_embd.weight" not in header.tensors:
        raise DataError(f"{header.path}: there is no token_embd.weight. Give the file of the whole model.")
    said = _Said(header, kind)
    return _FAMILIES[kind](said)


class _Said:
    """The metadata of one architecture: `llama.block_count` is read as `block_count`."""

    def __init__(self, header: Header, kind: str) -> None:
        self.header, self._kind = header, kind

    def __call__(self, key: str, default: float | None = None) -> Any:
        """A number. Raises DataError where there is none and no default, or where layers differ in it."""
        name = f"{self._kind}.{key}"
        value: Any = self.header.fields.get(name, default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise DataError(f"{self.header.path}: {name} is {repr(value)[:80]}; it must be one number for all layers.")
        return value

    def has(self, key: str) -> bool:
        return f"{self._kind}.{key}" in self.header.fields

    @property
    def kind(self) -> str:
        return self._kind


def _token_ids(said: _Said) -> dict[str, Any]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos"}
    ids = {theirs: said.header.fields.get(f"tokenizer.ggml.{ours}_token_id") for theirs, ours in keys.items()}
    return {key: value for key, value in ids.items() if type(value) is int}


def _rows(said: _Said) -> int:
    """Rows of the embedding, which may be more than the tokenizer has tokens."""
    return said.header.tensors["token_embd.weight"].shape[0]


def _gpt2(said: _Said) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": said("block_count"),
        "n_embd": said("embedding_length"),
        "n_head": said("attention.head_count"),
        "n_inner": said("feed_forward_length", 4 * said("embedding_length")),
        "n_positions": said("context_length"),
        "vocab_size": _rows(said),
        "layer_norm_epsilon": said("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in said.header.tensors,
        **_token_ids(said),
    }


def _llama_like(said: _Said, **conventions: Any) -> dict[str, Any]:
    heads = said("attention.head_count")
    if type(heads) is not int or heads < 1:
        raise DataError(f"{said.header.path}: {said.kind}.attention.head_count is {heads!r}; it must be 1 or more.")
    width = said("attention.key_length", said("rope.dimension_count", said("embedding_length") // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if said(key, width) != width:
            raise DataError(
                f"{said.header.path}: {said.kind}.{key} is {said(key)} for heads of {width}; the JAX decoder has one "
                "width for both. Give the model as a Hugging Face folder, with lm.backend=torch."
            )
    return {
        "model_type": said.kind,
        "num_hidden_layers": said("block_count"),
        "hidden_size": said("embedding_length"),
        "intermediate_size": said("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": said("attention.head_count_kv", heads),
        "head_dim": width,
        "max_position_embeddings": said("context_length"),
        "vocab_size": _rows(said),
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon"),
        "rope_theta": said("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in said.header.tensors,
        **_rope_scaling(said, width),
        **_token_ids(said),
        **conventions,
    }


def _rope_scaling(said: _Said, width: int) -> dict[str, Any]:
    if FREQUENCIES in said.header.tensors:
        return {"rope_scaling": _llama3_scaling(said, width)}
    if said.has("rope.scale_linear"):  # of files from before rope.scaling
        return {"rope_scaling": {"rope_type": "linear", "factor": said("rope.scale_linear")}}
    kind = said.header.text(f"{said.kind}.rope.scaling.type", "none")
    if kind == "none" or (kind == "linear" and said("rope.scaling.factor", 1.0) == 1):
        return {}
    if kind != "linear":
        raise DataError(
            f"{said.header.path}: rope scaling {kind!r} is not read from GGUF; none, linear and Llama 3's are. Give "
            "the model as a Hugging Face folder."
        )
    return {"rope_scaling": {"rope_type": "linear", "factor": said("rope.scaling.factor")}}


def _llama3_scaling(said: _Said, width: int) -> dict[str, Any]:
    """Llama 3's scaling, found from what the file divides each frequency by; refused where it is another one."""
    content = np.memmap(said.header.path, np.uint8, "r")
    divided_by = dequantized(said.header, content, FREQUENCIES).astype(np.float64).ravel()
    factor = float(divided_by.max(initial=1.0))
    wavelength = 2 * np.pi * said("rope.freq_base", 10000.0) ** (np.arange(0, width, 2) / width)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((_LLAMA3["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    if divided_by.shape != smooth.shape or not np.allclose(1 / divided_by, (1 - smooth) / factor + smooth, rtol=1e-4):
        raise DataError(
            f"{said.header.path}: {FREQUENCIES} is not the scaling of Llama 3, which alone is read. Give the model "
            "as a Hugging Face folder."
        )
    return _LLAMA3 | {"factor": factor}


def _llama(said: _Said) -> dict[str, Any]:
    if said.has("attention.sliding_window"):
        return _llama_like(said, model_type="mistral", sliding_window=said("attention.sliding_window"))
    if said("expert_count", 0):
        raise DataError(f"{said.header.path}: a mixture of experts is not read. Choose a dense model.")
    bias = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return _llama_like(said, **{key: name in said.header.tensors for key, name in bias.items()})


def _qwen3(said: _Said) -> dict[str, Any]:
    return _llama_like(said, attention_bias="blk.0.attn_q.bias" in said.header.tensors)


def _gemma(said: _Said) -> dict[str, Any]:
    return _llama_like(said, hidden_activation="gelu_pytorch_tanh")


def _gemma2(said: _Said) -> dict[str, Any]:
    common = _gemma(said)
    # llama.cpp: of the model with 46 blocks (27B) d_model / heads, of the others the width of a head.
    large = common["num_hidden_layers"] == 46
    scalar = common["hidden_size"] / common["num_attention_heads"] if large else common["head_dim"]
    return common | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": said("attention.sliding_window", 4096),
        "attn_logit_softcapping": said("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": said("final_logit_softcapping", 30.0),
    }


def _gemma3(said: _Said) -> dict[str, Any]:
    common = _gemma(said)
    # llama.cpp: of the model with 62 blocks (27B) d_model / heads. It has each sixth layer see everything.
    large = common["num_hidden_layers"] == 62
    return common | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": common["hidden_size"] / common["num_attention_heads"] if large else common["head_dim"],
        "sliding_window": said("attention.sliding_window"),
        "rope_theta": said("rope.freq_base", 1e6),
        "rope_local_base_freq": said("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": said("final_logit_softcapping") if said.has("final_logit_softcapping") else None,
    }


def _olmo2(said: _Said) -> dict[str, Any]:
    if said.has("attention.sliding_window"):
        raise DataError(f"{said.header.path}: this is OLMo 3, whose windows are not read. Choose another model.")
    bias = "blk.0.attn_q.bias" in said.header.tensors
    return _llama_like(said, attention_bias=bias)


def _smollm3(said: _Said) -> dict[str, Any]:
    return _llama_like(said, no_rope_layer_interval=4)  # llama.cpp's constant


def _qwen3moe(said: _Said) -> dict[str, Any]:
    # llama.cpp: every MLP of experts, the weights of those chosen add up to one.
    return _qwen3(said) | {
        "model_type": "qwen3_moe",
        "num_experts": said("expert_count"),
        "num_experts_per_tok": said("expert_used_count"),
        "moe_intermediate_size": said("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


_FAMILIES: dict[str, Callable[[_Said], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen2": _llama_like,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "qwen3moe": _qwen3moe,
}
