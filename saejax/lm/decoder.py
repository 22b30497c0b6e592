"""The language model being studied, as a pure function that can be watched and edited at named hook points.

Shape letters: B rows, S positions (T of keys), M model width, H heads, D width of a head, F MLP width, V vocabulary.

Hook points of block i (`blocks.{i}.<name>`), in the order of computation:
    resid_pre     [B, S, M]     residual stream entering the block
    ln1_scale     [B, S, 1]     what attention's norm divides by: the root of variance (or mean square) + epsilon
    attn_pattern  [B, H, S, T]  attention probabilities
    attn_z        [B, S, H*D]   what the heads read, before W_O; head h is the slice from h*D to (h+1)*D
    attn_out      [B, S, M]     what attention adds to the residual stream (after its post norm, where there is one)
    resid_mid     [B, S, M]     resid_pre + attn_out
    ln2_scale     [B, S, 1]     as ln1_scale, of the MLP's norm
    mlp_in        [B, S, M]     what the MLP reads, after its norm
    mlp_act       [B, S, F]     the MLP's hidden activations: what W_out reads (gated: activation times linear branch)
    mlp_out       [B, S, M]     what the MLP adds (after its post norm, where there is one)
    resid_post    [B, S, M]     residual stream leaving the block
With post norms there are ln1_post_scale and ln2_post_scale too; ln_final_scale is the last norm's.
Without norms before the parts (OLMo 2) is no ln1_scale, no ln2_scale: attention reads resid_pre, the MLP resid_mid.
An MLP of experts has no mlp_act.
In a parallel block the MLP reads resid_pre, so resid_mid is on the way to resid_post alone; with a single norm in the
block there is no ln2_scale and mlp_in is what attention reads.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.arrays import as_array
from saejax.core.errors import ConfigError, DataError
from saejax.lm.conventions import DecoderConfig, Parameter, ParameterPath, Rope, tree_of
from saejax.lm.experts import routed
from saejax.lm.points import next_block
from saejax.lm.product import product
from saejax.lm.rows import check_ids, check_length, check_rows

Params = dict[str, Any]
Edit = Callable[[jax.Array], jax.Array]
# A hook point, and what stands there.
Begin = tuple[str, jax.Array]
Tap = Callable[[str, jax.Array], jax.Array]
Rotation = tuple[jax.Array, jax.Array]  # cos and sin, [B, 1, S, width / 2]
# How a layer's queries attend: q [B, H, S, D], k and v [B, G, S, D] of the G key heads, tap -> z [B, H, S, D].
Attend = Callable[[jax.Array, jax.Array, jax.Array, Tap], jax.Array]

# Queries that attend together on a CPU, and into how many such blocks a row is divided at most (each is compiled).
_QUERIES, _MOST_BLOCKS = 128, 4

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
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
    prefix_BPM: jax.Array | None = None,
    begin: Begin | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """tokens [B, S] -> (logits [B, S, V], {hook point: activation}); with a prefix all S are P + S.

    With float32 parameters every product is float32, on devices too that would round its operands if nobody asked.

    A pure function: jit it, differentiate it. What a caller does not use of the result (the logits, the blocks
    after the last captured hook point) is removed by XLA, so capture alone costs no more than it must.

    Args:
        tokens_BS: ids. Under a trace (jit, grad) nothing can look at them, and one beyond the vocabulary is clamped.
        positions_BS: position within the document; default 0..S-1. A table of learned ones ends with the context, and
            under a trace the last is taken for those beyond it; rotary ones are computed, however large.
        segments_BS: attention stays within equal segments, and causal; default one segment. A sliding window counts
            positions in the row, which within a segment are the document's.
        capture: hook points whose values (after editing) are returned.
        edits: {hook point: value -> new value of the same shape}; everything downstream sees the new value,
            in the type of the old one.
        prefix_BPM: embeddings that stand before the tokens, as if `embed` had made them of P tokens (the inputs_embeds
            of transformers). They have positions and segments of their own: where those are given, of P + S.
        begin: what an earlier pass over these rows had at a hook point of `start_of`; nothing before it is computed.

    Raises:
        DataError: ids or positions that the model does not have, rows that are longer than it reads, or a prefix of
            another width or number of rows.
        ConfigError: an edit that changes the shape.
    """
    tokens_BS = _checked("tokens", tokens_BS, config.vocab_size)
    batch, length = tokens_BS.shape
    if prefix_BPM is not None:
        if prefix_BPM.ndim != 3 or prefix_BPM.shape[::2] != (batch, config.d_model):
            wanted = f"for {batch} rows of this model it must be [{batch}, P, {config.d_model}]"
            raise DataError(f"The prefix is {list(prefix_BPM.shape)}; {wanted}.")
        length += prefix_BPM.shape[1]
    if positions_BS is not None and config.rope is None:
        positions_BS = _checked("positions", positions_BS, config.context_length)
    if positions_BS is None:
        check_length("The rows have", length, config.context_length)
        positions_BS = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    with jax.default_matmul_precision("highest" if params["W_E"].dtype == jnp.float32 else None):
        x_BSM = embed(config, params, tokens_BS) if begin is None else begin[1]
        if prefix_BPM is not None:
            x_BSM = jnp.concatenate([jnp.asarray(prefix_BPM, x_BSM.dtype), x_BSM], axis=1)
        windows = config.layer_windows
        masks = {window: attention_mask(length, segments_BS, window) for window in set(windows)}
        queries = query_block(length, whole=any(name.endswith(".attn_pattern") for name in (*capture, *(edits or {}))))
        attends = [functools.partial(_within_rows, config, masks[window], queries) for window in windows]
        at = begin[0] if begin else ""
        return forward(config, params, x_BSM, positions_BS, attends, frozenset(capture), edits or {}, at)


def embed(config: DecoderConfig, params: Params, tokens_BS: jax.Array) -> jax.Array:
    """W_E[tokens] embed_scale, [B, S, M]: what the first block reads, but for learned positions."""
    x_BSM: jax.Array = params["W_E"][tokens_BS] * config.embed_scale
    return x_BSM


def forward(
    config: DecoderConfig,
    params: Params,
    x_BSM: jax.Array,
    positions_BS: jax.Array,
    attends: Sequence[Attend],
    wanted: frozenset[str],
    edits: Mapping[str, Edit],
    begin: str = "",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`run` of what `embed` made, or of what stands at `begin`; layers attend as they are told, nothing is checked."""
    captured: dict[str, jax.Array] = {}
    ropes = config.layer_ropes
    rotations = {r: None if r is None else rotary_angles(r, positions_BS) for r in dict.fromkeys(ropes)}
    first = next_block(begin) if begin else 0
    if begin.endswith("resid_post"):  # that of resid_pre is in the block
        x_BSM = _make_tap("", captured, wanted, edits)(begin, x_BSM)
    if not begin and "W_pos" in params:
        x_BSM = x_BSM + params["W_pos"][positions_BS]
    layers = list(enumerate(zip(params["blocks"], ropes, attends, strict=True)))
    for i, (block, rope, attend) in layers[first:]:
        tap = _make_tap(f"blocks.{i}.", captured, wanted, edits)
        x_BSM = _block(config, block, x_BSM, rotations[rope], attend, tap)
    x_BSM = norm(config, "ln_final", params, x_BSM, _make_tap("", captured, wanted, edits))
    return _logits(config, params, x_BSM), captured


def _checked(name: str, ids: Any, limit: int) -> jax.Array:
    """`ids` as an array, if they are rows of integers in [0, limit); of traced ones their type and rank are known."""
    ids = as_array(ids, name)
    if isinstance(ids, jax.core.Tracer):
        check_rows(name, ids)
    else:
        check_ids(name, np.asarray(ids), limit)
    return jnp.asarray(ids)


def unembedding(params: Params) -> jax.Array:
    """W_U [M, V]; the embedding's transpose where the two are tied."""
    return params["W_U"] if "W_U" in params else params["W_E"].T


def attention_mask(length: int, segments_BS: jax.Array | None, window: int | None) -> jax.Array:
    """True where position s may read position t, bool [B or 1, S, T].

    t <= s, both in one segment (segments None: all are), and t > s - window (None: no window).
    """
    mask_BST = jnp.tril(jnp.ones((length, length), bool))[None]
    if window is not None:
        mask_BST = mask_BST & ~jnp.tril(jnp.ones((length, length), bool), -window)[None]
    if segments_BS is not None:
        mask_BST = mask_BST & (segments_BS[:, :, None] == segments_BS[:, None, :])
    return mask_BST


def query_block(length: int, whole: bool) -> int:
    """Queries of a row that attend together: all if somebody watches the `whole` pattern, and beside a CPU.

    On a CPU, blocks of 128 (of a quarter of a long row) do not look at the keys after them, and their scores stay in
    the cache: of a row of 512 they take 0.63 of the products and of the exponentials.
    """
    if whole or jax.default_backend() != "cpu":
        return length
    return _QUERIES * -(-length // (_QUERIES * _MOST_BLOCKS))


def rotary_angles(rope: Rope, positions_BS: jax.Array) -> Rotation:
    """Cosine and sine of position times frequency, float32 [B, 1, S, width / 2]."""
    angles_B1SW = positions_BS[:, None, :, None].astype(jnp.float32) * jnp.asarray(rope.frequencies())[None, None, None]
    return jnp.cos(angles_B1SW), jnp.sin(angles_B1SW)


def rotate(x_BHSD: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns each pair (j, j + width / 2) of a head's first `width` numbers by its angle; the rest stays."""
    cos, sin = rotation
    half = cos.shape[-1]
    a, b = (x_BHSD[..., i * half : (i + 1) * half].astype(jnp.float32) for i in (0, 1))
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BHSD.dtype)
    return jnp.concatenate([turned, x_BHSD[..., 2 * half :]], axis=-1)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap tanh(x / cap), which stays within (-cap, cap); x where cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


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


def _keep(_: str, value: jax.Array) -> jax.Array:
    """The tap of a place that is no hook point."""
    return value


def norm(config: DecoderConfig, name: str, params: Params, x: jax.Array, tap: Tap) -> jax.Array:
    """w x / sqrt(mean(x^2) + eps) + b over the last axis, in float32; in a LayerNorm x is centred first."""
    p, dtype = params[name], x.dtype
    x = x.astype(jnp.promote_types(dtype, jnp.float32))
    if config.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x * (1 / tap(f"{name}_scale", jnp.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)))
    x = x * jnp.expand_dims(p["w"], range(x.ndim - 1))
    if "b" in p:
        x = x + jnp.expand_dims(p["b"], range(x.ndim - 1))
    return x.astype(dtype)


def _block(
    config: DecoderConfig, p: Params, x_BSM: jax.Array, rotation: Rotation | None, attend: Attend, tap: Tap
) -> jax.Array:
    """One block: attention, then the MLP on its result, or on the same input in a parallel block."""
    x_BSM = tap("resid_pre", x_BSM)
    normed_BSM = norm(config, "ln1", p, x_BSM, tap) if "ln1" in p else x_BSM
    attn_BSM = _attention(config, p["attn"], normed_BSM, rotation, attend, tap)
    if "ln1_post" in p:
        attn_BSM = norm(config, "ln1_post", p, attn_BSM, tap)
    mid_BSM = tap("resid_mid", x_BSM + tap("attn_out", attn_BSM))
    if "ln2" in p:
        normed_BSM = norm(config, "ln2", p, mid_BSM if config.residual == "sequential" else x_BSM, tap)
    elif config.residual == "sequential":
        normed_BSM = mid_BSM
    normed_BSM = tap("mlp_in", normed_BSM)
    if config.experts is not None and "experts" in p:
        out_BSM = routed(config.experts, ACTIVATIONS[config.activation], p["experts"], normed_BSM)
    else:
        out_BSM = _mlp(config, p["mlp"], normed_BSM, tap)
    if "ln2_post" in p:
        out_BSM = norm(config, "ln2_post", p, out_BSM, tap)
    return tap("resid_post", mid_BSM + tap("mlp_out", out_BSM))


def _attention(
    config: DecoderConfig, p: Params, x_BSM: jax.Array, rotation: Rotation | None, attend: Attend, tap: Tap
) -> jax.Array:
    """z W_O + b_O with z of `attend`."""
    z_BHSD = attend(*heads_of(config, p, x_BSM, rotation), tap)
    z_BSN = tap("attn_z", z_BHSD.transpose(0, 2, 1, 3).reshape(*x_BSM.shape[:2], -1))
    return _plus(product(z_BSN, p["W_O"].reshape(-1, config.d_model)), p, "b_O")


def heads_of(
    config: DecoderConfig, p: Params, x_BSM: jax.Array, rotation: Rotation | None, tap: Tap = _keep
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, H, S, D], keys and values [B, G, S, D] of what attention reads; normed and rotated as the model does.

    `tap` sees the scales of their norms, where there are such: q_norm_scale, k_norm_scale.
    """

    def heads(name: str) -> jax.Array:
        # One plain matrix product, then a transposition: XLA's CPU backend runs the equivalent einsum with two
        # output axes about three times slower (measured with its gradient).
        W_MHD = p[f"W_{name}"]
        y_BSHD = product(x_BSM, W_MHD.reshape(config.d_model, -1)).reshape(*x_BSM.shape[:2], *W_MHD.shape[1:])
        if f"b_{name}" in p:
            y_BSHD = y_BSHD + p[f"b_{name}"][None, None]
        if config.qk_norm_of_all and name != "V":
            y_BSN = y_BSHD.reshape(*x_BSM.shape[:2], -1)
            y_BSHD = norm(config, f"{name.lower()}_norm", p, y_BSN, tap).reshape(y_BSHD.shape)
        return y_BSHD.transpose(0, 2, 1, 3)

    q_BHSD, k_BGSD, v_BGSD = heads("Q"), heads("K"), heads("V")
    if config.qk_norm:
        q_BHSD, k_BGSD = norm(config, "q_norm", p, q_BHSD, tap), norm(config, "k_norm", p, k_BGSD, tap)
    if rotation is not None:
        q_BHSD, k_BGSD = rotate(q_BHSD, rotation), rotate(k_BGSD, rotation)
    return q_BHSD, k_BGSD, v_BGSD


def attended(
    config: DecoderConfig, q_BHSD: jax.Array, k_BGTD: jax.Array, v_BGTD: jax.Array, mask_BST: jax.Array, tap: Tap
) -> jax.Array:
    """softmax(cap(q k^T scale), masked) v, [B, H, S, D]; each key head serves H / G heads one after the other."""
    if config.kv_heads < config.n_head:
        k_BGTD, v_BGTD = (jnp.repeat(x, config.n_head // config.kv_heads, axis=1) for x in (k_BGTD, v_BGTD))
    scores_BHST = product(q_BHSD, k_BGTD.transpose(0, 1, 3, 2)) * score_scale(config)
    scores_BHST = softcap(scores_BHST.astype(jnp.float32), config.attn_softcap)
    masked_BHST = jnp.where(mask_BST[:, None], scores_BHST, -1e30)
    pattern_BHST = jax.nn.softmax(masked_BHST, axis=-1).astype(v_BGTD.dtype)
    return product(tap("attn_pattern", pattern_BHST), v_BGTD)


def score_scale(config: DecoderConfig) -> float:
    """By which <q, k> is multiplied."""
    return config.d_head**-0.5 if config.attn_scale is None else config.attn_scale


def _within_rows(
    config: DecoderConfig,
    mask_BST: jax.Array,
    queries: int,
    q_BHSD: jax.Array,
    k_BGSD: jax.Array,
    v_BGSD: jax.Array,
    tap: Tap,
) -> jax.Array:
    """Whole rows. So many `queries` attend together, to the keys up to the last of them; the others are masked."""

    def block(start: int) -> jax.Array:
        stop = start + queries
        k_BGTD, v_BGTD = k_BGSD[:, :, :stop], v_BGSD[:, :, :stop]
        return attended(config, q_BHSD[:, :, start:stop], k_BGTD, v_BGTD, mask_BST[:, start:stop, :stop], tap)

    return jnp.concatenate([block(start) for start in range(0, q_BHSD.shape[2], queries)], axis=2)


def _mlp(config: DecoderConfig, p: Params, x_BSM: jax.Array, tap: Tap) -> jax.Array:
    """act(x W_in + b_in) W_out + b_out; gated, act(x W_gate + b_gate) (x W_in + b_in) W_out + b_out."""
    act = ACTIVATIONS[config.activation]
    h_BSF = _plus(product(x_BSM, p["W_in"]), p, "b_in")
    h_BSF = act(_plus(product(x_BSM, p["W_gate"]), p, "b_gate")) * h_BSF if "W_gate" in p else act(h_BSF)
    return _plus(product(tap("mlp_act", h_BSF), p["W_out"]), p, "b_out")


def _logits(config: DecoderConfig, params: Params, x_BSM: jax.Array) -> jax.Array:
    logits_BSV = _plus(product(x_BSM, unembedding(params)), params, "b_U")
    return softcap(logits_BSV, config.logit_softcap)


def _plus(x_BSN: jax.Array, p: Params, bias: str) -> jax.Array:
    """x + bias, where there is one."""
    return x_BSN + p[bias][None, None] if bias in p else x_BSN


def init_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Random parameters as GPT-2 was initialised: N(0, 0.02), residual outputs scaled by 1/sqrt(2 n_layer)."""
    keys = iter(jax.random.split(key, 8 * config.n_layer + 3))

    def initial(_: ParameterPath, spec: Parameter) -> jax.Array:
        if not spec.std:
            return jnp.full(spec.shape, spec.mean, jnp.float32)
        return spec.mean + spec.std * jax.random.normal(next(keys), spec.shape, jnp.float32)

    return tree_of(config, initial)
