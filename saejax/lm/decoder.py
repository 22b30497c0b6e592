"""The language model being studied, as a pure function that can be watched and edited at named hook points.

Shape letters: B rows, S positions, M model width, H heads, D width of a head, F MLP width, V vocabulary.

Hook points of block i (`blocks.{i}.<name>`):
    resid_pre   [B, S, M]  residual stream entering the block
    attn_out    [B, S, M]  what attention adds to it
    resid_mid   [B, S, M]  residual stream between attention and MLP
    mlp_in      [B, S, M]  what the MLP reads: resid_mid after its norm
    mlp_act     [B, S, F]  the MLP's hidden activations
    mlp_out     [B, S, M]  what the MLP adds
    resid_post  [B, S, M]  residual stream leaving the block
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from saejax.core.errors import ConfigError, DataError
from saejax.lm.conventions import DecoderConfig

Params = dict[str, Any]
Edit = Callable[[jax.Array], jax.Array]
Tap = Callable[[str, jax.Array], jax.Array]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def run(
    config: DecoderConfig,
    params: Params,
    tokens_BS: jax.Array,
    positions_BS: jax.Array | None = None,
    segments_BS: jax.Array | None = None,
    capture: Sequence[str] = (),
    edits: Mapping[str, Edit] | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """tokens [B, S] -> (logits [B, S, V], {hook point: activation}).

    A pure function: jit it, differentiate it. What a caller does not use of the result (the logits, the blocks
    after the last captured hook point) is removed by XLA, so capture alone costs no more than it must.

    Args:
        positions_BS: position within the document; default 0..S-1.
        segments_BS: attention stays within equal segments, and causal; default one segment.
        capture: hook points whose values (after editing) are returned.
        edits: {hook point: value -> new value of the same shape}; everything downstream sees the new value,
            in the type of the old one.

    Raises:
        DataError: more positions than the model has (indexing would silently repeat the last one).
        ConfigError: an edit that changes the shape.
    """
    batch, length = tokens_BS.shape
    if positions_BS is None:
        if length > config.context_length:
            raise DataError(f"The rows have {length} tokens; the model reads {config.context_length}.")
        positions_BS = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    mask_BSS = jnp.tril(jnp.ones((length, length), bool))[None]
    if segments_BS is not None:
        mask_BSS = mask_BSS & (segments_BS[:, :, None] == segments_BS[:, None, :])
    captured: dict[str, jax.Array] = {}
    wanted, edits = frozenset(capture), edits or {}

    x_BSM = params["W_E"][tokens_BS] + params["W_pos"][positions_BS]
    for i, block in enumerate(params["blocks"]):
        x_BSM = _block(config, block, x_BSM, mask_BSS, _make_tap(f"blocks.{i}.", captured, wanted, edits))
    x_BSM = layer_norm(params["ln_final"], x_BSM, config.norm_eps)
    return jnp.einsum("bsm,mv->bsv", x_BSM, unembedding(params)), captured


def unembedding(params: Params) -> jax.Array:
    """W_U [M, V]; the embedding's transpose where the two are tied."""
    return params["W_U"] if "W_U" in params else params["W_E"].T


def layer_norm(p: Params, x: jax.Array, eps: float) -> jax.Array:
    """w (x - mean) / sqrt(var + eps) + b over the last axis of x [B, S, M]."""
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * p["w"][None, None] + p["b"][None, None]


def _make_tap(prefix: str, captured: dict[str, jax.Array], wanted: frozenset[str], edits: Mapping[str, Edit]) -> Tap:
    def tap(name: str, value: jax.Array) -> jax.Array:
        name = prefix + name
        if name in edits:
            edited = jnp.asarray(edits[name](value))
            if edited.shape != value.shape:
                raise ConfigError(f"The edit at {name} made {edited.shape} of {value.shape}; it must keep the shape.")
            value = edited.astype(value.dtype)
        if name in wanted:
            captured[name] = value
        return value

    return tap


def _block(config: DecoderConfig, p: Params, x_BSM: jax.Array, mask_BSS: jax.Array, tap: Tap) -> jax.Array:
    x_BSM = tap("resid_pre", x_BSM)
    normed_BSM = layer_norm(p["ln1"], x_BSM, config.norm_eps)
    x_BSM = tap("resid_mid", x_BSM + tap("attn_out", _attention(config, p["attn"], normed_BSM, mask_BSS)))
    h_BSM = tap("mlp_in", layer_norm(p["ln2"], x_BSM, config.norm_eps))
    act_BSF = tap("mlp_act", ACTIVATIONS[config.activation](h_BSM @ p["mlp"]["W_in"] + p["mlp"]["b_in"][None, None]))
    out_BSM = tap("mlp_out", act_BSF @ p["mlp"]["W_out"] + p["mlp"]["b_out"][None, None])
    return tap("resid_post", x_BSM + out_BSM)


def _attention(config: DecoderConfig, p: Params, x_BSM: jax.Array, mask_BSS: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(D), masked) v W_O."""

    def heads(name: str) -> jax.Array:
        # One plain matrix product, then a transposition: XLA's CPU backend runs the equivalent einsum with two
        # output axes about three times slower (measured with its gradient).
        W_MN = p[f"W_{name}"].reshape(config.d_model, -1)
        y_BSHD = (x_BSM @ W_MN).reshape(*x_BSM.shape[:2], config.n_head, config.d_head) + p[f"b_{name}"][None, None]
        return y_BSHD.transpose(0, 2, 1, 3)

    q_BHSD, k_BHSD, v_BHSD = heads("Q"), heads("K"), heads("V")
    scores_BHST = jnp.matmul(q_BHSD, k_BHSD.transpose(0, 1, 3, 2)) * config.d_head**-0.5
    scores_BHST = jnp.where(mask_BSS[:, None], scores_BHST.astype(jnp.float32), -1e30)
    pattern_BHST = jax.nn.softmax(scores_BHST, axis=-1).astype(x_BSM.dtype)
    z_BSHD = jnp.matmul(pattern_BHST, v_BHSD).transpose(0, 2, 1, 3)
    return z_BSHD.reshape(*x_BSM.shape[:2], -1) @ p["W_O"].reshape(-1, config.d_model) + p["b_O"][None, None]


def init_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Random parameters as GPT-2 was initialised: N(0, 0.02), residual outputs scaled by 1/sqrt(2 n_layer)."""
    c = config
    keys = iter(jax.random.split(key, 8 * c.n_layer + 3))
    residual_std = 0.02 / (2 * c.n_layer) ** 0.5

    def normal(*shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    def norm() -> Params:
        return {"w": jnp.ones(c.d_model), "b": jnp.zeros(c.d_model)}

    def block() -> Params:
        heads = (c.n_head, c.d_head)
        attn = {f"W_{n}": normal(c.d_model, *heads) for n in "QKV"} | {f"b_{n}": jnp.zeros(heads) for n in "QKV"}
        attn |= {"W_O": normal(*heads, c.d_model, std=residual_std), "b_O": jnp.zeros(c.d_model)}
        mlp = {
            "W_in": normal(c.d_model, c.d_mlp),
            "b_in": jnp.zeros(c.d_mlp),
            "W_out": normal(c.d_mlp, c.d_model, std=residual_std),
            "b_out": jnp.zeros(c.d_model),
        }
        return {"ln1": norm(), "attn": attn, "ln2": norm(), "mlp": mlp}

    params: Params = {
        "W_E": normal(c.vocab_size, c.d_model),
        "W_pos": normal(c.context_length, c.d_model, std=0.01),
        "blocks": [block() for _ in range(c.n_layer)],
        "ln_final": norm(),
    }
    if not c.tied_embeddings:
        params["W_U"] = normal(c.d_model, c.vocab_size)
    return params
