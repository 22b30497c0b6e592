"""One prompt's model made linear: attention patterns and norms' scales stay, dictionaries stand where they write.

With x_l what layer l reads, y_l what stands where it writes, and delta_l what sources add there:

    y_l = skip_l(x_l) + delta_l                     nothing else comes through a place that a dictionary writes
    z   = pattern v(x W_V) W_O, norm(x) = w x / scale      pattern and scale as in the prompt's own pass
    mlp(x) = J x                                    an MLP that no dictionary replaces, by its derivative at the prompt

So what reaches x_l has come from layers below through residual stream, attention's values and skips alone: a direct
effect. In the residual stream an autoencoder's x = x_hat + e stands for all that comes from below: every path ends
there.
(Ameisen et al. 2025, "Circuit Tracing"; the derivative of what is left: Marks et al. 2024, arXiv:2403.19647)

Constants are left out, since only derivatives are asked of it. Keys and queries are kept, patterns are not: they come
anew from these, a block of queries at a time, as a pattern of 8,192 tokens has 67 million numbers a head.

Shape letters: S tokens, M model width, V vocabulary, D width of a hook point; B = 1 row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from saejax.attribution.layers import Layer
from saejax.lm import decoder
from saejax.lm.conventions import DecoderConfig
from saejax.lm.decoder import Attend, Edit, Params, Tap

Frozen = dict[str, Any]

_QUERIES = 128  # that attend together


def watch(
    config: DecoderConfig, params: Params, tokens_S: jax.Array, end: jax.Array, layers: Sequence[Layer]
) -> Frozen:
    """The prompt's own pass: what `linear` keeps of it, and what the nodes are made of.

    Its last token is the one before `end`. What follows fills it up, and no token of the prompt sees it.

    Returns:
        queries, keys: of each block; scales: {name: [1, S, 1]}; inputs: {mlp_in of an MLP that stays: [1, S, M]}.
        embeddings: [S, M], of the tokens alone, without positions.
        values: {hook point that a dictionary reads or writes: [S, D]}.
        logits: [V], of the token after the prompt. final: its residual stream [M] and scale [1] before the last norm.
    """
    queries: list[jax.Array] = []
    keys: list[jax.Array] = []

    def watching(window: int | None) -> Attend:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, tap: Tap) -> jax.Array:
            queries.append(q)
            keys.append(k)
            return _attended(config, window, q, k, v)

        return attend

    scales, last = _scales(config), f"blocks.{config.n_layer - 1}.resid_post"
    written = {layer.write for layer in layers}
    inputs = [f"blocks.{i}.mlp_in" for i in range(config.n_layer) if f"blocks.{i}.mlp_out" not in written]
    points = {name for layer in layers for name in (layer.read, layer.write)}
    attends = [watching(window) for window in config.layer_windows]
    with _exact(params):
        _, seen = _forward(config, params, tokens_S, attends, {*scales, *inputs, *points, last}, {})
        x_M, scale_1 = seen[last][0, end - 1], seen["ln_final_scale"][0, end - 1]
        normed_M = _final_norm(config, params, x_M, scale_1)
        logits_V = normed_M @ decoder.unembedding(params) + params.get("b_U", 0)
    return {
        "queries": queries,
        "keys": keys,
        "scales": {name: seen[name] for name in scales},
        "inputs": {name: seen[name] for name in inputs},
        "embeddings": decoder.embed(config, params, tokens_S[None])[0],
        "values": {name: seen[name][0] for name in points},
        "logits": decoder.softcap(logits_V.astype(jnp.float32), config.logit_softcap),
        "final": (x_M, scale_1),
    }


def linear(
    config: DecoderConfig,
    params: Params,
    frozen: Frozen,
    layers: Sequence[Layer],
    skips: dict[int, jax.Array],
    read: Callable[[int, jax.Array], jax.Array],
    delta: Callable[[int, jax.Array], jax.Array],
    delta_SM: jax.Array,
    also: Sequence[str] = (),
    gates: Sequence[jax.Array] = (),
) -> jax.Array:
    """The sum of what is read of the layers, and of the residual stream after the last block, up to constants.

    Backward, blocks come one after the other: what is read enters when the cotangent of its block's end is there, and
    that of its beginning waits for what is asked of the deltas. XLA would make and keep all blocks' at the same time.

    Args:
        read: (a layer's number, what it reads [S, D]) -> a number. Layer L reads the residual stream's end, [S, M].
        delta: (a layer's number, a tie) -> what is added where it writes, [S, D]. The cotangent of the tie, a zero, is
            awaited before the backward pass leaves the block: what takes it from the effects makes them come first.
        delta_SM: is added to the embeddings.
        also: more hook points that are read, as layers L + 1, ...; they are read after what stands there is written.
        gates: of each block, [H, S, S]: the pattern is multiplied by them.
    """
    reads: dict[int, jax.Array] = {}
    ties: dict[str, jax.Array] = {}
    products: dict[int, jax.Array] = {}

    def tying(block: str) -> Edit:
        def edit(x_BSM: jax.Array) -> jax.Array:
            x_BSM, ties[block] = _tied(x_BSM)
            return x_BSM

        return edit

    def reading(number: int) -> Edit:
        def edit(x_BSD: jax.Array) -> jax.Array:
            reads[number] = x_BSD[0]
            products[number] = read(number, x_BSD[0])
            return x_BSD

        return edit

    def ending(block: str) -> Edit:
        def edit(x_BSM: jax.Array) -> jax.Array:
            for number, layer in enumerate(layers):
                if _block_of(layer.read) == block:
                    x_BSM, products[number] = _awaited(x_BSM, products[number])
            return x_BSM

        return edit

    def writing(number: int) -> Edit:
        def edit(y_BSD: jax.Array) -> jax.Array:
            new_SD = delta(number, ties[_block_of(layers[number].write)])
            if number in skips:
                new_SD = new_SD + reads[number].astype(jnp.float32) @ skips[number]
            return new_SD[None].astype(y_BSD.dtype)

        return edit

    # One after the other where several meet: a dictionary reads before it, or another, writes.
    edits: list[tuple[str, Edit]] = [("blocks.0.resid_pre", lambda x_BSM: x_BSM + delta_SM[None].astype(x_BSM.dtype))]
    edits += [(f"{block}.resid_pre", tying(block)) for block in sorted({_block_of(layer.write) for layer in layers})]
    edits += [(layer.read, reading(number)) for number, layer in enumerate(layers)]
    edits += [(layer.write, writing(number)) for number, layer in enumerate(layers)]
    edits += [(name, reading(len(layers) + 1 + i)) for i, name in enumerate(also)]
    edits += [(f"{block}.resid_post", ending(block)) for block in sorted({_block_of(layer.read) for layer in layers})]
    edits += [(name, _with_derivative(value)) for name, value in frozen["inputs"].items()]
    edits += [(name, functools.partial(lambda value, _: value, value)) for name, value in frozen["scales"].items()]
    last = f"blocks.{config.n_layer - 1}.resid_post"
    tokens_S = jnp.zeros(delta_SM.shape[0], jnp.int32)  # their embeddings are a constant
    with _exact(params):
        _, seen = _forward(config, params, tokens_S, _held(config, frozen, gates), {last}, _merged(edits))
    return sum(products.values(), read(len(layers), seen[last][0]))


def _held(config: DecoderConfig, frozen: Frozen, gates: Sequence[jax.Array]) -> list[Attend]:
    """Each block attends with the prompt's own pattern, times its gate where there are some."""

    def attending(i: int) -> Attend:
        held = config.layer_windows[i], frozen["queries"][i], frozen["keys"][i]
        return lambda _, __, v, tap: _attended(config, *held, v, gates[i] if gates else None)

    return [attending(i) for i in range(config.n_layer)]


def _merged(edits: Sequence[tuple[str, Edit]]) -> dict[str, Edit]:
    """One edit for each hook point: those that meet there, one after the other."""
    together: dict[str, Edit] = {}
    for name, edit in edits:
        together[name] = functools.partial(_both, together[name], edit) if name in together else edit
    return together


def unembedding_at_residual(config: DecoderConfig, params: Params, ids_K: jax.Array, scale_1: jax.Array) -> jax.Array:
    """d (logit - mean of all logits) / d (residual stream before the last norm, its scale fixed), float32 [K, M].

    Of logits before their cap, where the model has one.
    """
    W_U = decoder.unembedding(params)
    with _exact(params):
        u_KM = W_U[:, ids_K].T.astype(jnp.float32) - W_U.mean(1, dtype=jnp.float32)[None]
    u_KM = u_KM * params["ln_final"]["w"].astype(jnp.float32)[None] / scale_1[None]
    return u_KM - u_KM.mean(1, keepdims=True) if config.norm == "layer" else u_KM


def _forward(
    config: DecoderConfig,
    params: Params,
    tokens_S: jax.Array,
    attends: Sequence[Attend],
    wanted: set[str],
    edits: dict[str, Edit],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    x_BSM = decoder.embed(config, params, tokens_S[None])
    positions_BS = jnp.arange(x_BSM.shape[1])[None]
    return decoder.forward(config, params, x_BSM, positions_BS, attends, frozenset(wanted), edits)


def _attended(
    config: DecoderConfig,
    window: int | None,
    q_BHSD: jax.Array,
    k_BGSD: jax.Array,
    v_BGSD: jax.Array,
    gate_HSS: jax.Array | None = None,
) -> jax.Array:
    """`decoder.attended` by blocks of queries, none of whose patterns is kept for the derivative by v."""
    length = q_BHSD.shape[2]
    count = -(-length // _QUERIES)
    size = min(_QUERIES, length)
    more = count * size - length
    q_BHSD = jnp.pad(q_BHSD, ((0, 0), (0, 0), (0, more), (0, 0)))
    gate_HSS = None if gate_HSS is None else jnp.pad(gate_HSS, ((0, 0), (0, more), (0, 0)))

    @jax.checkpoint
    def block(start: jax.Array, v_BGSD: jax.Array, gate_HSS: jax.Array | None) -> jax.Array:
        def tap(_: str, pattern_BHQS: jax.Array) -> jax.Array:
            if gate_HSS is None:
                return pattern_BHQS
            return pattern_BHQS * jax.lax.dynamic_slice_in_dim(gate_HSS, start, size, axis=1)[None]

        at_Q1, to_1S = (start + jnp.arange(size))[:, None], jnp.arange(length)[None]
        mask_QS = to_1S <= at_Q1
        if window is not None:
            mask_QS = mask_QS & (to_1S > at_Q1 - window)
        q_BHQD = jax.lax.dynamic_slice_in_dim(q_BHSD, start, size, axis=2)
        return decoder.attended(config, q_BHQD, k_BGSD, v_BGSD, mask_QS[None], tap)

    z_NBHQD = jax.lax.map(lambda start: block(start, v_BGSD, gate_HSS), jnp.arange(count) * size)
    z_BHNQD = jnp.moveaxis(z_NBHQD, 0, 2)
    return z_BHNQD.reshape(*z_BHNQD.shape[:2], count * size, -1)[:, :, :length]


def _final_norm(config: DecoderConfig, params: Params, x_M: jax.Array, scale_1: jax.Array) -> jax.Array:
    x_M32 = x_M.astype(jnp.float32)
    if config.norm == "layer":
        x_M32 = x_M32 - x_M32.mean()
    normed_M = x_M32 / scale_1 * params["ln_final"]["w"] + params["ln_final"].get("b", 0)
    return normed_M.astype(x_M.dtype)


def _with_derivative(value: jax.Array) -> Edit:
    """The value at the prompt, whatever constants were left out before, with the derivative of what comes."""
    return lambda x: value + (x - jax.lax.stop_gradient(x))


@jax.custom_vjp
def _tied(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x, and a zero whose cotangent, a zero too, is added to x's."""
    return x, jnp.zeros(())


_tied.defvjp(lambda x: (_tied(x), None), lambda _, cts: (cts[0] + cts[1].astype(cts[0].dtype),))


@jax.custom_vjp
def _awaited(x: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both; the number's cotangent comes after x's."""
    return x, number


_awaited.defvjp(
    lambda x, number: ((x, number), None), lambda _, cts: (cts[0], cts[1] + 0 * cts[0].ravel()[0].astype(cts[1].dtype))
)


def _block_of(name: str) -> str:
    """blocks.3.mlp_out -> blocks.3"""
    return name.rpartition(".")[0]


def _both(first: Edit, second: Edit, value: jax.Array) -> jax.Array:
    return second(first(value).astype(value.dtype))


def _exact(params: Params) -> Any:
    """As `decoder.run`: with float32 parameters every product is float32."""
    return jax.default_matmul_precision("highest" if params["W_E"].dtype == jnp.float32 else None)


def _scales(config: DecoderConfig) -> list[str]:
    """Names of all norms' scales in the blocks and after them."""
    return [name for name in config.inner_points() if name.endswith("_scale")]
