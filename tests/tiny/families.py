"""A tiny random model of transformers of every family that saejax reads, no parameter zero or one."""

from typing import Any

from tiny.decoders import VOCAB

LAYERS = 3
SHAPES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 95,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GROUPED = SHAPES | {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
MIXED = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GEMMA3 = GROUPED | {
    "head_dim": 10,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 17,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
# {name: (transformers' class of configuration, its settings)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoX", SHAPES | {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.34}}),
    "gpt_neox, sequential, no bias": (
        "GPTNeoX",
        SHAPES
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0},
        },
    ),
    "llama, llama3 rope": ("Llama", GROUPED | {"rope_parameters": LLAMA3}),
    "llama, linear rope, biases, tied": (
        "Llama",
        GROUPED
        | {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.1,
        },
    ),
    "qwen2": ("Qwen2", GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 10}),
    "qwen3_moe": (
        "Qwen3Moe",
        GROUPED | MIXED | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    "qwen3_moe, dense by number, normed": (
        "Qwen3Moe",
        GROUPED | MIXED | {"mlp_only_layers": [1], "norm_topk_prob": True, "head_dim": 10, "attention_bias": True},
    ),
    "olmoe": ("Olmoe", GROUPED | MIXED),
    "smollm3": (
        "SmolLM3",
        GROUPED
        | {
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
        },
    ),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 7, "head_dim": 8}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 10, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        GROUPED
        | {
            "head_dim": 10,
            "sliding_window": 6,
            "query_pre_attn_scalar": 17,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3_text": ("Gemma3Text", GEMMA3 | {"final_logit_softcapping": 4.0, "attention_bias": True}),
    "gemma3": (
        "Gemma3",
        {
            "text_config": GEMMA3,
            "vision_config": SHAPES | {"hidden_size": 8, "image_size": 8, "patch_size": 4},
            "mm_tokens_per_image": 1,
        },
    ),
    "olmo2": ("Olmo2", GROUPED | {"attention_bias": True, "rope_parameters": LLAMA3}),
    "phi": ("Phi", GROUPED | {"rope_parameters": {"rope_theta": 200.0, "partial_rotary_factor": 0.67}}),
}


def random_model(name: str) -> Any:
    """Of PyTorch, which the caller has."""
    import torch
    import transformers

    family, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    name = f"{family}ForConditionalGeneration" if "vision_config" in settings else name
    model = getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model
