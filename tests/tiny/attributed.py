"""Random decoders of several families with random dictionaries on them, for the tests of attribution."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from saejax.coders import CoderConfig, Sites, build
from saejax.lm import LanguageModel, checkpoint
from saejax.text import Tokenizer
from saejax.trained import TrainedCoder
from tiny.decoders import random_params

VOCAB, LAYERS = 41, 3
_SHAPES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCAB, "n_positions": 24, "n_embd": 16, "n_layer": LAYERS, "n_head": 4},
    # A parallel residual, rotary positions.
    "gpt_neox": _SHAPES | {"rotary_pct": 0.5},
    # Gated MLPs, shared heads of keys and values, normed queries and keys.
    "qwen3": _SHAPES | {"num_key_value_heads": 2, "head_dim": 6},
    # Without norms before a part.
    "olmo2": _SHAPES,
    "qwen3_moe": _SHAPES
    | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_key_value_heads": 2},
    # Post norms, capped scores and logits, windows, scaled embeddings.
    "gemma2": _SHAPES
    | {
        "num_key_value_heads": 2,
        "head_dim": 6,
        "sliding_window": 4,
        "query_pre_attn_scalar": 17,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
    },
}


@functools.cache
def lm_of(family: str, seed: int = 0) -> LanguageModel:
    """Three layers of width 16; no parameter is zero or one."""
    config_json = {"model_type": family} | FAMILIES[family]
    config = checkpoint.architecture(config_json, "").read_config(config_json)
    params = jax.tree.map(jnp.asarray, random_params(config_json, seed))
    return LanguageModel(config, params, tokenizer_of(VOCAB), {"model": f"{family}{seed or ''}"})


def tokenizer_of(vocab: int) -> Tokenizer:
    """`w0` ... one id each; the last is bos."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab - 1)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>"])
    return Tokenizer(backend, vocab - 1, frozenset({vocab - 1}), "0")


def prompt(length: int = 7, seed: int = 0) -> np.ndarray:
    return np.r_[VOCAB - 1, np.random.default_rng(seed).integers(0, VOCAB - 1, length - 1)].astype(np.int32)


def dictionary(
    topology: str,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    seed: int = 0,
    width: int = 16,
    d_sae: int = 24,
    preset: str = "standard",
) -> TrainedCoder:
    """With random parameters, a third of its latents active."""
    config = CoderConfig(
        preset,
        topology=topology,
        d_sae=d_sae,
        k=6,
        init="uniform",
        unit_decoder_every=0,
        matmul_dtype="float32",
        encoder_centre=False,
    )
    coder = build(config, [width] * len(reads), 10, [width] * len(writes))
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(coder.init, jax.random.key(0))
    params = {name: rng.normal(0, 0.3, s.shape).astype(np.float32) for name, s in sorted(shapes.items())}
    params["b_enc"] -= 0.6
    coder, params = coder.inference(params, coder.init_stats())
    ones = (1.0,) * len(reads)
    sites = Sites(reads, writes, ones, (1.0,) * len(writes), coder.topology.stacked)
    return TrainedCoder(coder, {name: np.asarray(value) for name, value in params.items()}, sites)


@functools.cache
def mlp_dictionaries(
    topology: str, seed: int = 0, preset: str = "standard", d_sae: int = 24
) -> tuple[TrainedCoder, ...]:
    """For the MLPs of all layers: a transcoder each, or one cross-layer transcoder. The same objects every time, which
    keep their compiled programs.
    """
    reads, writes = (tuple(f"blocks.{i}.{name}" for i in range(LAYERS)) for name in ("mlp_in", "mlp_out"))
    if topology.endswith("clt") or topology.startswith("per_layer"):
        return (dictionary(topology, reads, writes, seed, d_sae=d_sae, preset=preset),)
    return tuple(
        dictionary(topology, (r,), (w,), seed + i, d_sae=d_sae, preset=preset)
        for i, (r, w) in enumerate(zip(reads, writes, strict=True))
    )
