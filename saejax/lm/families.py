"""The table of architectures: how each `model_type`'s config.json is read, and where its tensors go.

A row is a reader (config.json -> `DecoderConfig`) and a table {parameter: tensor name and layout}. Which parameters
there are follows from the `DecoderConfig`, so a table may name more than a checkpoint has.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from saejax.core.errors import DataError
from saejax.lm.conventions import MOST_LAYERS, DecoderConfig, Experts, Llama3Scaling, Rope, check_positive, check_size
from saejax.lm.layouts import (
    AS_IS,
    CONV_OF_HEADS,
    LINEAR,
    LINEAR_OF_EACH,
    LINEAR_OF_HEADS,
    PLUS_ONE,
    STACK,
    Layout,
    Tensors,
    fused_tensors,
    half,
    linear_tensors,
    norm_tensors,
    separate_tensors,
    third,
    third_of_each_head,
)

ConfigJson = dict[str, Any]
_OTHERWISE = "Choose a checkpoint without it, or set lm.backend=torch: PyTorch runs this model, watched by hooks."


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The files of one `model_type`.

    Attributes:
        read_config: config.json -> DecoderConfig.
        tensors: {parameter's path: (tensor name, layout)}; `blocks.attn.W_Q` stands for every block's, with `{}` in the
            tensor name for the block's number.
        prefix: what may stand in front of every tensor name but the head's.
        others: more of what may stand there; and `heads` in front of the head's.
        stacked: as `tensors`, other forms of what a checkpoint may hold; one is read where it is there.
        beside: how the names of tensors begin that text does not meet.
    """

    read_config: Callable[[ConfigJson], DecoderConfig]
    tensors: Tensors
    prefix: str
    beside: tuple[str, ...] = ()
    stacked: tuple[Tensors, ...] = ()
    others: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()


def architecture(config_json: ConfigJson, where: str) -> Architecture:
    """The row for a checkpoint's config.json."""
    model_type = config_json.get("model_type")
    if model_type not in ARCHITECTURES:
        raise DataError(
            f"{where}: the JAX decoder does not know model_type {model_type!r}; it knows {', '.join(ARCHITECTURES)}."
        )
    if config_json.get("quantization_config") is not None:
        raise DataError(
            f"{where}: quantization_config is {str(config_json['quantization_config'])[:100]}; the JAX decoder reads "
            "float weights alone. Give the checkpoint that was quantised."
        )
    return ARCHITECTURES[model_type]


# --- reading config.json ----------------------------------------------------------------------------


def _refuse_unless(c: ConfigJson, **plain: Any) -> None:
    """Each key absent, null or of this value: every other makes a variant that the decoder would compute wrongly."""
    for key, wanted in plain.items():
        if c.get(key) is not None and c[key] != wanted:
            raise DataError(
                f"config.json: {key}={c[key]!r} is a variant of {c['model_type']} that the JAX decoder does not have "
                f"(it has {wanted!r}). {_OTHERWISE}"
            )


def _given(c: ConfigJson, key: str, default: Any) -> Any:
    """The value, or the default where it is absent or null."""
    return default if c.get(key) is None else c[key]


def _head_width(c: ConfigJson, model: str, heads: str) -> int:
    width, n = check_size(model, c[model]), check_size(heads, c[heads])
    if width % n:
        raise DataError(f"config.json: {model}={width} is not a multiple of {heads}={n}.")
    return width // n


def _rope(c: ConfigJson, d_head: int, part: float = 1.0, theta: Any = None) -> Rope:
    """Rotary parameters in the new form (`rope_parameters`) or the old (`rope_theta` and `rope_scaling`).

    `part` of each head is rotated and `theta` is the base where neither form says otherwise.
    """
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3") or any(isinstance(value, dict) for value in rope.values()):
        raise DataError(
            f"config.json: rope type {kind!r} in {str(rope)[:200]} is not known; the JAX decoder has default, linear "
            f"and llama3, one for all layers. {_OTHERWISE}"
        )
    theta = rope.get("rope_theta", _given(c, "rope_theta", 10000.0 if theta is None else theta))
    part = check_positive("partial_rotary_factor", rope.get("partial_rotary_factor", part))
    width = int(check_size("head_dim", d_head) * part)
    if kind == "default":
        return Rope(theta, width)
    if kind == "linear":
        return Rope(theta, width, rope["factor"])
    context = _given(c, "original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    context = c["max_position_embeddings"] if context is None else context
    llama3 = Llama3Scaling(rope["low_freq_factor"], rope["high_freq_factor"], context)
    return Rope(theta, width, rope["factor"], llama3)


def _windows(c: ConfigJson, window: Any, default: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer, by `layer_types`, or where that is absent, by `default` (layer -> does it slide?)."""
    layers = check_size("num_hidden_layers", c["num_hidden_layers"], MOST_LAYERS)
    types = c.get("layer_types")
    if types is None:
        types = ["sliding_attention" if default(i) else "full_attention" for i in range(layers)]
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise DataError(
                f"config.json: layer_types names {kind!r}; the JAX decoder has full_attention and sliding_attention. "
                f"{_OTHERWISE}"
            )
    if window is None and "sliding_attention" in types:
        raise DataError("config.json: sliding_window is null, yet layer_types names sliding_attention.")
    if len(types) != layers:
        raise DataError(f"config.json: layer_types has {len(types)} entries for {layers} layers.")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _gpt2_config(c: ConfigJson) -> DecoderConfig:
    _refuse_unless(c, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return DecoderConfig(
        n_layer=c["n_layer"],
        d_model=c["n_embd"],
        n_head=c["n_head"],
        d_head=_head_width(c, "n_embd", "n_head"),
        d_mlp=c.get("n_inner") or 4 * check_size("n_embd", c["n_embd"]),
        vocab_size=c["vocab_size"],
        context_length=c["n_positions"],
        activation=c.get("activation_function", "gelu_new"),
        norm_eps=c.get("layer_norm_epsilon", 1e-5),
        tied_embeddings=c.get("tie_word_embeddings", True),
    )


def _shapes(c: ConfigJson) -> dict[str, Any]:
    """The sizes that all families but GPT-2 call by the same names."""
    return {
        "n_layer": c["num_hidden_layers"],
        "d_model": c["hidden_size"],
        "n_head": c["num_attention_heads"],
        "d_mlp": c["intermediate_size"],
        "vocab_size": c["vocab_size"],
        "context_length": c["max_position_embeddings"],
    }


def _neox_config(c: ConfigJson) -> DecoderConfig:
    d_head = _head_width(c, "hidden_size", "num_attention_heads")
    bias = _given(c, "attention_bias", True)
    parallel = _given(c, "use_parallel_residual", True)
    return DecoderConfig(
        **_shapes(c),
        d_head=d_head,
        activation=_given(c, "hidden_act", "gelu"),
        norm_eps=_given(c, "layer_norm_eps", 1e-5),
        tied_embeddings=_given(c, "tie_word_embeddings", False),
        residual="parallel" if parallel else "sequential",
        rope=_rope(c, d_head, _given(c, "rotary_pct", 0.25), _given(c, "rotary_emb_base", 10000.0)),
        qkv_bias=bias,
        attn_out_bias=bias,
    )


def _phi_config(c: ConfigJson) -> DecoderConfig:
    _refuse_unless(c, qk_layernorm=False)
    d_head = _head_width(c, "hidden_size", "num_attention_heads")
    return DecoderConfig(
        **_shapes(c),
        d_head=d_head,
        activation=_given(c, "hidden_act", "gelu_new"),
        norm_eps=_given(c, "layer_norm_eps", 1e-5),
        tied_embeddings=_given(c, "tie_word_embeddings", False),
        n_kv_head=c.get("num_key_value_heads"),
        residual="parallel_one_norm",
        rope=_rope(c, d_head, _given(c, "partial_rotary_factor", 0.5)),
        unembed_bias=True,
    )


def _llama_like(c: ConfigJson, d_head: int | None = None, **conventions: Any) -> DecoderConfig:
    """RMSNorm, rotary positions on whole heads, grouped queries, gated MLP; `conventions` are what differs."""
    _refuse_unless(c, partial_rotary_factor=1.0)
    d_head = c.get("head_dim") or d_head or _head_width(c, "hidden_size", "num_attention_heads")
    rope = conventions.get("rope") or _rope(c, d_head)
    if rope.width != d_head:
        raise DataError(f"config.json: partial_rotary_factor rotates {rope.width} of a head's {d_head}. {_OTHERWISE}")
    common = {
        "d_head": d_head,
        "activation": _given(c, "hidden_act", "silu"),
        "norm_eps": _given(c, "rms_norm_eps", 1e-6),
        "tied_embeddings": _given(c, "tie_word_embeddings", False),
        "n_kv_head": c.get("num_key_value_heads"),
        "norm": "rms",
        "rope": rope,
        "qkv_bias": False,
        "attn_out_bias": False,
        "mlp_bias": False,
        "gated_mlp": True,
    }
    return DecoderConfig(**_shapes(c) | common | conventions)


def _attention_bias(c: ConfigJson) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "attn_out_bias"), _given(c, "attention_bias", False))


def _llama_config(c: ConfigJson) -> DecoderConfig:
    return _llama_like(c, mlp_bias=_given(c, "mlp_bias", False), **_attention_bias(c))


def _olmo2_config(c: ConfigJson) -> DecoderConfig:
    return _llama_like(
        {"rms_norm_eps": 1e-5} | c, pre_norms=False, post_norms=True, qk_norm_of_all=True, **_attention_bias(c)
    )


def _qwen_windows(c: ConfigJson) -> tuple[int | None, ...]:
    window = _given(c, "sliding_window", 4096) if c.get("use_sliding_window") else None
    first = _given(c, "max_window_layers", 28)
    return _windows(c, window, lambda i: window is not None and i >= first)


def _qwen2_config(c: ConfigJson) -> DecoderConfig:
    return _llama_like(c, qkv_bias=True, windows=_qwen_windows(c))


def _qwen3_config(c: ConfigJson) -> DecoderConfig:
    return _llama_like(c, 128, qk_norm=True, windows=_qwen_windows(c), **_attention_bias(c))


def _qwen3_moe_config(c: ConfigJson) -> DecoderConfig:
    _refuse_unless(c, layer_types=None)
    c = {"num_key_value_heads": 4} | c
    layers = check_size("num_hidden_layers", c["num_hidden_layers"], MOST_LAYERS)
    step = check_size("decoder_sparse_step", _given(c, "decoder_sparse_step", 1))
    dense = _given(c, "mlp_only_layers", [])
    if type(dense) is not list or any(type(i) is not int for i in dense):
        raise DataError(f"config.json: mlp_only_layers is {str(dense)[:200]}; it must be a list of numbers of layers.")
    window = _given(c, "sliding_window", 4096) if c.get("use_sliding_window") else None
    return _llama_like(
        c,
        qk_norm=True,
        windows=_windows(c, window, lambda i: window is not None),
        experts=_experts(c, 128, _given(c, "moe_intermediate_size", 768)),
        sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        **_attention_bias(c),
    )


def _olmoe_config(c: ConfigJson) -> DecoderConfig:
    _refuse_unless(c, clip_qkv=None)
    layers = check_size("num_hidden_layers", c["num_hidden_layers"], MOST_LAYERS)
    experts = _experts(c, 64, c["intermediate_size"])
    more: dict[str, Any] = {"experts": experts, "sparse": (True,) * layers, "qk_norm_of_all": True} | _attention_bias(c)
    return _llama_like({"rms_norm_eps": 1e-5} | c, **more)


def _experts(c: ConfigJson, count: int, width: Any) -> Experts:
    count = _given(c, "num_local_experts", _given(c, "num_experts", count))
    return Experts(count, _given(c, "num_experts_per_tok", 8), width, _given(c, "norm_topk_prob", False))


def _smollm3_config(c: ConfigJson) -> DecoderConfig:
    c = {"num_key_value_heads": 4} | c
    layers = check_size("num_hidden_layers", c["num_hidden_layers"], MOST_LAYERS)
    interval = check_size("no_rope_layer_interval", _given(c, "no_rope_layer_interval", 4))
    turned = _given(c, "no_rope_layers", [int((i + 1) % interval != 0) for i in range(layers)])[:layers]
    if len(turned) < layers or any(turns not in (0, 1) for turns in turned):
        raise DataError(f"config.json: no_rope_layers is {str(turned)[:200]}; it must be 0 or 1 for {layers} layers.")
    window = c.get("sliding_window") if c.get("use_sliding_window") else None
    d_head = _given(c, "head_dim", None) or _head_width(c, "hidden_size", "num_attention_heads")
    rope = _rope(c, d_head, theta=2e6)
    return _llama_like(
        c,
        rope=rope,
        ropes=tuple(rope if turns else None for turns in turned),
        windows=_windows(c, window, lambda i: window is not None and not turned[i]),
        tied_embeddings=_given(c, "tie_word_embeddings", True),
        mlp_bias=_given(c, "mlp_bias", False),
        **_attention_bias(c),
    )


def _mistral_config(c: ConfigJson) -> DecoderConfig:
    _refuse_unless(c, layer_types=None)
    window = c.get("sliding_window", 4096)
    return _llama_like(
        c, n_kv_head=c.get("num_key_value_heads", 8), windows=_windows(c, window, lambda i: window is not None)
    )


def _gemma_config(c: ConfigJson, **conventions: Any) -> DecoderConfig:
    _refuse_unless(c, use_bidirectional_attention=False)
    # The first releases say gelu and mean its approximation by tanh.
    act = c.get("hidden_activation") or c.get("hidden_act")
    common = {
        "activation": "gelu_pytorch_tanh" if act in (None, "gelu") else act,
        "tied_embeddings": _given(c, "tie_word_embeddings", True),
        "embed_scale": check_size("hidden_size", c["hidden_size"]) ** 0.5,
        **_attention_bias(c),
    }
    return _llama_like(c, 256, **common | conventions)


def _gemma2_config(c: ConfigJson) -> DecoderConfig:
    scalar = _given(c, "query_pre_attn_scalar", 256)
    return _gemma_config(
        c,
        activation=_given(c, "hidden_activation", "gelu_pytorch_tanh"),
        post_norms=True,
        windows=_windows(c, c.get("sliding_window", 4096), lambda i: i % 2 == 0),
        attn_scale=scalar**-0.5 if type(scalar) in (int, float) and scalar > 0 else scalar,
        attn_softcap=c.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.get("final_logit_softcapping", 30.0),
    )


# Of Gemma 3; the configurations of the models with images leave out what is not their own.
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208, "max_position_embeddings": 2**17}


def _gemma3_config(c: ConfigJson) -> DecoderConfig:
    _refuse_unless(c, attn_logit_softcapping=None)
    c = _GEMMA3 | c
    pattern = check_size("sliding_window_pattern", _given(c, "sliding_window_pattern", 6))
    windows = _windows(c, c.get("sliding_window", 4096), lambda i: (i + 1) % pattern != 0)
    everywhere, within = _ropes_of_kinds(c, _given(c, "head_dim", 256))
    scalar = _given(c, "query_pre_attn_scalar", 256)
    return _gemma_config(
        c,
        activation=_given(c, "hidden_activation", "gelu_pytorch_tanh"),
        post_norms=True,
        qk_norm=True,
        windows=windows,
        rope=everywhere,
        ropes=tuple(everywhere if window is None else within for window in windows),
        attn_scale=scalar**-0.5 if type(scalar) in (int, float) and scalar > 0 else scalar,
        logit_softcap=c.get("final_logit_softcapping"),
    )


def _ropes_of_kinds(c: ConfigJson, d_head: int) -> tuple[Rope, Rope]:
    """Of layers that see everything, which alone are scaled in the old form, and of those with a window."""
    given = _given(c, "rope_parameters", {})
    if other := given.keys() - {"full_attention", "sliding_attention"}:
        raise DataError(f"config.json: rope_parameters names {str(sorted(other))[:200]}, which are no kinds of layers.")
    full = _given(given, "full_attention", {}) | _given(c, "rope_scaling", {})
    old = {"rope_theta": c.get("rope_local_base_freq"), "rope_scaling": _given(given, "sliding_attention", {})}
    c = c | {"rope_parameters": None}
    return _rope(c | {"rope_scaling": full}, d_head, theta=1e6), _rope(c | old, d_head)


def _gemma3_with_images_config(c: ConfigJson) -> DecoderConfig:
    """The part that reads text; images are not read."""
    text = c["text_config"]
    _refuse_unless(text, model_type="gemma3_text", final_logit_softcapping=None)
    tied = _given(text, "tie_word_embeddings", _given(c, "tie_word_embeddings", True))
    return _gemma3_config(text | {"model_type": c["model_type"], "tie_word_embeddings": tied})


# --- where tensors go -------------------------------------------------------------------------------


_GPT2: Tensors = {
    "W_E": ("wte.weight", AS_IS),
    "W_pos": ("wpe.weight", AS_IS),
    "W_U": ("lm_head.weight", LINEAR),
    **norm_tensors({"ln_final": "ln_f", "blocks.ln1": "h.{}.ln_1", "blocks.ln2": "h.{}.ln_2"}),
    **fused_tensors("h.{}.attn.c_attn", third),
    **linear_tensors({"blocks.attn.O": "h.{}.attn.c_proj"}, CONV_OF_HEADS),
    **linear_tensors({"blocks.mlp.in": "h.{}.mlp.c_fc", "blocks.mlp.out": "h.{}.mlp.c_proj"}, AS_IS),
}
_NEOX: Tensors = {
    "W_E": ("embed_in.weight", AS_IS),
    "W_U": ("embed_out.weight", LINEAR),
    **norm_tensors(
        {
            "ln_final": "final_layer_norm",
            "blocks.ln1": "layers.{}.input_layernorm",
            "blocks.ln2": "layers.{}.post_attention_layernorm",
        }
    ),
    **fused_tensors("layers.{}.attention.query_key_value", third_of_each_head),
    **linear_tensors({"blocks.attn.O": "layers.{}.attention.dense"}, LINEAR_OF_HEADS),
    **linear_tensors(
        {"blocks.mlp.in": "layers.{}.mlp.dense_h_to_4h", "blocks.mlp.out": "layers.{}.mlp.dense_4h_to_h"}, LINEAR
    ),
}
_PHI: Tensors = {
    "W_E": ("embed_tokens.weight", AS_IS),
    "W_U": ("lm_head.weight", LINEAR),
    "b_U": ("lm_head.bias", AS_IS),
    **norm_tensors({"ln_final": "final_layernorm", "blocks.ln1": "layers.{}.input_layernorm"}),
    **separate_tensors("layers.{}.self_attn"),
    **linear_tensors({"blocks.attn.O": "layers.{}.self_attn.dense"}, LINEAR_OF_HEADS),
    **linear_tensors({"blocks.mlp.in": "layers.{}.mlp.fc1", "blocks.mlp.out": "layers.{}.mlp.fc2"}, LINEAR),
}


def _llama_tensors(norm: Layout = AS_IS, **block_norms: str) -> Tensors:
    """Llama's names; `block_norms` are {norm of ours: its name in a layer} where they differ from Llama's."""
    block_norms = {"ln1": "input_layernorm", "ln2": "post_attention_layernorm"} | block_norms
    block_norms |= {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
    names = {f"blocks.{ours}": f"layers.{{}}.{theirs}" for ours, theirs in block_norms.items()}
    mlp = {"gate": "gate_proj", "in": "up_proj", "out": "down_proj"}
    return {
        "W_E": ("embed_tokens.weight", AS_IS),
        "W_U": ("lm_head.weight", LINEAR),
        **norm_tensors({"ln_final": "norm"} | names, norm),
        **separate_tensors("layers.{}.self_attn"),
        **linear_tensors({"blocks.attn.O": "layers.{}.self_attn.o_proj"}, LINEAR_OF_HEADS),
        **linear_tensors({f"blocks.mlp.{ours}": f"layers.{{}}.mlp.{theirs}" for ours, theirs in mlp.items()}, LINEAR),
        "blocks.experts.W_router": ("layers.{}.mlp.gate.weight", LINEAR),
        **{
            f"blocks.experts.W_{ours}": (f"layers.{{}}.mlp.experts.{{}}.{theirs}.weight", LINEAR_OF_EACH)
            for ours, theirs in mlp.items()
        },
    }


_LLAMA = _llama_tensors()
_GEMMA = _llama_tensors(PLUS_ONE)
_GEMMA2 = _llama_tensors(
    PLUS_ONE,
    ln1_post="post_attention_layernorm",
    ln2="pre_feedforward_layernorm",
    ln2_post="post_feedforward_layernorm",
)
_OLMO2 = _llama_tensors(ln1_post="post_attention_layernorm", ln2_post="post_feedforward_layernorm")
_STACKED: tuple[Tensors, ...] = (
    {
        "blocks.experts.W_gate": ("layers.{}.mlp.experts.gate_up_proj", half(0)),
        "blocks.experts.W_in": ("layers.{}.mlp.experts.gate_up_proj", half(1)),
        "blocks.experts.W_out": ("layers.{}.mlp.experts.down_proj", STACK),
    },
    {
        f"blocks.experts.W_{ours}": (f"layers.{{}}.mlp.experts.{theirs}_proj.weight", STACK)  # of GGUF
        for ours, theirs in (("gate", "gate"), ("in", "up"), ("out", "down"))
    },
)


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(_gpt2_config, _GPT2, "transformer."),
    "gpt_neox": Architecture(_neox_config, _NEOX, "gpt_neox."),
    "llama": Architecture(_llama_config, _LLAMA, "model."),
    "qwen2": Architecture(_qwen2_config, _LLAMA, "model."),
    "qwen3": Architecture(_qwen3_config, _LLAMA, "model."),
    "qwen3_moe": Architecture(_qwen3_moe_config, _LLAMA, "model.", stacked=_STACKED),
    "olmoe": Architecture(_olmoe_config, _LLAMA, "model.", stacked=_STACKED),
    "smollm3": Architecture(_smollm3_config, _LLAMA, "model."),
    "mistral": Architecture(_mistral_config, _LLAMA, "model."),
    "gemma": Architecture(_gemma_config, _GEMMA, "model."),
    "gemma2": Architecture(_gemma2_config, _GEMMA2, "model."),
    "gemma3_text": Architecture(_gemma3_config, _GEMMA2, "model."),
    # transformers has the text within `model` and writes the older names; files of other tools have either.
    "gemma3": Architecture(
        _gemma3_with_images_config,
        _GEMMA2,
        "language_model.model.",
        tuple(f"{outer}{part}." for outer in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
        others=("model.language_model.",),
        heads=("language_model.",),
    ),
    "olmo2": Architecture(_olmo2_config, _OLMO2, "model."),
    "phi": Architecture(_phi_config, _PHI, "model."),
}
