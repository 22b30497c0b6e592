"""GGUF files of tiny models of transformers, written by gguf's own writer and by the names that llama.cpp gives."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, WIDTH, HEADS, KV_HEADS, LAYERS = 96, 64, 4, 2, 2
_SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 64, "n_inner": 96}
# {architecture in GGUF: (class of transformers, its settings)}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SHAPES | {"rope_theta": 500.0}),
    "qwen2": ("Qwen2", _SHAPES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _SHAPES | {"head_dim": 32}),
    "gemma": ("Gemma", _SHAPES | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        _SHAPES | {"head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3Text",
        _SHAPES
        | {"head_dim": 32, "sliding_window": 6, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
        | {"num_hidden_layers": 6},
    ),
    "olmo2": ("Olmo2", _SHAPES),
    "smollm3": ("SmolLM3", _SHAPES | {"num_hidden_layers": 4, "rope_theta": 500.0}),
    "qwen3moe": (
        "Qwen3Moe",
        _SHAPES
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        | {"head_dim": 32},
    ),
    "gpt2": ("GPT2", _GPT2),
}
# {part of a name in transformers: its name in GGUF}, as llama.cpp's table of names has them.
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
    "mlp.gate": "ffn_gate_inp", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip


def random_of(family: str, **settings: Any) -> Any:
    """A random model of PyTorch, which the caller has; no parameter zero or one."""
    import torch
    import transformers

    name, usual = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**usual | settings)
    kind = f"{name}LMHeadModel" if name == "GPT2" else f"{name.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, kind)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


def named(family: str, name: str) -> str:
    """The name in GGUF of a parameter of transformers."""
    stem, _, part = name.rpartition(".")
    if not (found := re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", stem)):
        return f"{_NAMES[stem]}.{part}"
    number, inside = found.groups()
    second_norm = family in ("gemma2", "gemma3", "olmo2") and inside == "post_attention_layernorm"
    return f"blk.{number}.{'post_attention_norm' if second_norm else _NAMES[inside]}.{part}"


def converted(family: str, name: str, value: np.ndarray) -> np.ndarray:
    """The numbers as llama.cpp's conversion leaves them."""
    if family in ("llama", "smollm3") and (kind := re.search(r"\.([qk])_proj", name)):
        heads = HEADS if kind[1] == "q" else KV_HEADS
        return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1
    return value.T if family == "gpt2" and ".h." in name and value.ndim == 2 else value


def _parts(family: str, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors that a parameter becomes, by their names in GGUF: of stacked experts gate and up stand apart."""
    if not (found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name)):
        return {named(family, name): value}
    block, kind = found.groups()
    names, parts = (("gate", "up"), np.split(value, 2, axis=1)) if kind == "gate_up" else (("down",), [value])
    return {f"blk.{block}.ffn_{one}_exps.weight": part for one, part in zip(names, parts, strict=True)}


def write_gguf(
    path: Path, family: str, model: Any, kind: str = "F32", more: Mapping[str, np.ndarray] | None = None, **fields: Any
) -> Path:
    """The model as one file: matrices in a quantization, vectors in float32, and a tokenizer of single letters.

    `more` are tensors beside the model's, `fields` keys beside its own, with __ for each dot.
    """
    import gguf

    config, writer = model.config.to_dict(), gguf.GGUFWriter(path, family)
    writer.add_block_count(config.get("num_hidden_layers", LAYERS))
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    if family == "gpt2":
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    else:
        rope = config.get("rope_parameters") or config
        rope = rope.get("full_attention", rope)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(rope["rope_theta"])
        width = config.get("head_dim") or WIDTH // HEADS
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_vocab_size(VOCAB)
    if family == "gemma2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    if family == "qwen3moe":
        writer.add_expert_count(model.config.num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _add_tokenizer(writer)
    for key, value in fields.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    tied = config.get("tie_word_embeddings", True)
    for name, parameter in model.named_parameters():
        if not (tied and name == "lm_head.weight"):
            for own, value in _parts(family, name, converted(family, name, parameter.detach().numpy())).items():
                quantization = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
                packed = gguf.quants.quantize(np.ascontiguousarray(value), quantization)
                writer.add_tensor(own, packed, raw_dtype=quantization)
    for name, value in (more or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tokenizer(path: Path, **fields: Any) -> Path:
    """A file with these keys alone, for `tokenizer_json`."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any) -> None:
    """Byte-level, of 93 letters that are ASCII, without a merge."""
    letters = [chr(i) for i in range(33, 126)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
    writer.add_token_types([3, 3, 3, *[1] * len(letters)])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
