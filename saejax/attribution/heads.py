"""Attention in a graph: which heads an edge goes through, and why a head attends.

    part of an edge through one entry of a pattern = pattern d(weight) / d(pattern)

With norms and patterns frozen a weight is linear in each pattern's entry, so that this is what the weight would lose
without it. The parts of one block sum up to what passes attention there. And before its cap, a head's score of query
token i and key token j is a sum over pairs,

    score = scale <q, k> = scale sum_s sum_t <q_s, k_t>       s, t over features, errors, tokens and a bias

q_s is what node s adds to the query, k_t what node t adds to the key: through the residual stream and the values of
earlier heads, the norms' scales and rotations frozen. The bias is what no node adds: biases, learned positions, and
MLPs' constants. (After Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions".)

Shape letters: N nodes that can be sources, D width of a head, M model width, L layers, B blocks, H heads, S tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.attribution.frozen import linear
from saejax.attribution.layers import Layer
from saejax.attribution.local import LocalModel
from saejax.attribution.rows import read_at
from saejax.core.errors import DataError
from saejax.lm import decoder
from saejax.lm.conventions import DecoderConfig, Rope

_CHUNK = 16  # numbers of a head whose rows are computed at once
_PAIRS = 1 << 24  # products that are held at once
LARGEST = 1 << 26  # entries of all patterns of a prompt


@dataclasses.dataclass(frozen=True)
class HeadScore:
    """Why head `head` of block `block` attends from token `query` to token `key`.

    Attributes:
        score: scale <q, k>, before the model's cap where it has one.
        pattern: the probability that the head gives it.
        mean: of the scores of all keys that the query sees: attention follows what is above it.
        query_ND, key_ND: float64 [N + 1, D], what each node adds to query and key; the bias is the last. Nodes are
            those of the graph without its logits, all active features among them.
        mean_key_D: the mean of these keys.
    """

    block: int
    head: int
    query: int
    key: int
    score: float
    pattern: float
    mean: float
    scale: float
    query_ND: np.ndarray
    key_ND: np.ndarray
    mean_key_D: np.ndarray

    @property
    def pairs(self) -> np.ndarray:
        """scale <q_s, k_t>, float64 [N + 1, N + 1]; its sum is the score."""
        return self.scale * self.query_ND @ self.key_ND.T

    @property
    def above_by_query(self) -> np.ndarray:
        """scale <q_s, k - mean k>, [N + 1]: why this key and not any; its sum is score - mean."""
        return self.scale * self.query_ND @ (self.key_ND.sum(0) - self.mean_key_D)

    @property
    def by_key(self) -> np.ndarray:
        """Sums of `pairs` over queries, [N + 1]."""
        return self.scale * self.key_ND @ self.query_ND.sum(0)

    def strongest(self, count: int) -> list[tuple[int, int, float]]:
        """(query's node, key's node, part of the score) of the largest parts, by size; N is the bias."""
        best: list[tuple[int, int, float]] = []
        rows = max(1, _PAIRS // len(self.key_ND))
        for start in range(0, len(self.query_ND), rows):
            part = self.scale * self.query_ND[start : start + rows] @ self.key_ND.T
            places = np.stack(np.unravel_index(_largest(np.abs(part), count), part.shape), 1)
            best += [(start + int(s), int(t), float(part[s, t])) for s, t in places]
        return sorted(best, key=lambda one: -abs(one[2]))[:count]


@dataclasses.dataclass(frozen=True)
class Passed:
    """A part of an edge's weight: what passes from token `key` to token `query` in one head."""

    block: int
    head: int
    query: int
    key: int
    weight: float


class Heads:
    """Heads of one prompt: heads.score(2, 0, query=9, key=4), heads.passed(source, target)

    Raises:
        DataError: the prompt's patterns have more than `LARGEST` entries.
    """

    def __init__(self, local: LocalModel):
        self.local, config, length = local, local.lm.config, local.sources["embeddings"].shape[0]
        self._shape = config.n_layer, config.n_head, length, length
        if np.prod(self._shape) > LARGEST:
            raise DataError(
                f"The patterns of {length} tokens have {np.prod(self._shape):,} entries: for heads, shorten the prompt."
            )
        names = [f"blocks.{i}.{name}" for i in range(config.n_layer) for name in ("resid_pre", "attn_pattern")]
        tokens_S = jnp.asarray(local.tokens)
        self._seen = jax.jit(functools.partial(_seen, config, tuple(names)))(local.lm.params, tokens_S)

    def score(self, block: int, head: int, query: int, key: int) -> HeadScore:
        """The sum over pairs that a head's score is.

        Raises:
            DataError: no such block, head or token, or a key after its query.
        """
        n_layer, n_head, *_ = self._shape
        ends = {"block": (block, n_layer), "head": (head, n_head), "query": (query, self.local.n_tokens)}
        for name, (value, end) in (ends | {"key": (key, query + 1)}).items():
            if not 0 <= value < end:
                raise DataError(f"The {name} is {value}; it must be 0 to {end - 1}.")
        scale = decoder.score_scale(self.local.lm.config)
        q_ND, k_ND = self._parts("q", block, head, query), self._parts("k", block, head, key)
        config = self.local.lm.config
        pattern = float(self._seen[f"blocks.{block}.attn_pattern"][head, query, key])
        window = config.layer_windows[block]
        first = 0 if window is None else max(0, query + 1 - window)
        keys_SD = self.local.frozen["keys"][block][0, head * config.kv_heads // config.n_head, first : query + 1]
        mean_D, q_D = np.asarray(keys_SD, np.float64).mean(0), q_ND.sum(0)
        score, mean = scale * float(q_D @ k_ND.sum(0)), scale * float(q_D @ mean_D)
        return HeadScore(block, head, query, key, score, pattern, mean, scale, q_ND, k_ND, mean_D)

    def _parts(self, side: str, block: int, head: int, position: int) -> np.ndarray:
        """The parts of nodes, and then the bias, in the query ("q") or the key of a head at a token, [N + 1, D]."""
        config, params = self.local.lm.config, self.local.lm.params["blocks"][block]
        x_M = self._seen[f"blocks.{block}.resid_pre"][position]
        whole_D, slopes_DM = _slopes(config, config.layer_ropes[block], side, params, x_M, head, position)
        slopes = np.asarray(slopes_DM, np.float32)
        chunks = [slopes[start : start + _CHUNK] for start in range(0, len(slopes), _CHUNK)]
        rows_DN = np.concatenate([self.local.residual_rows(block, position, chunk) for chunk in chunks])
        parts_ND = rows_DN.T.astype(np.float64)
        return np.concatenate([parts_ND, (np.asarray(whole_D, np.float64) - parts_ND.sum(0))[None]])

    def passed(self, source: int, target: int, count: int) -> list[Passed]:
        """The largest parts of the edge from node `source` to node `target`, by size; nodes are `local`'s numbers."""
        local, size = self.local, self.local.mesh.devices.size
        program = head_program(local.lm.config, local.layers, self._shape)
        one = {name: value[0] for name, value in local.targets(np.array([target]), size).items()}
        skips = local.sources["skips"]
        gates = np.asarray(program(local.params, local.frozen, skips, local.source(source), one))
        places = np.stack(np.unravel_index(_largest(np.abs(gates), count), gates.shape), 1).tolist()
        return [Passed(b, h, q, k, weight) for b, h, q, k in places if (weight := float(gates[b, h, q, k]))]


@functools.lru_cache(maxsize=8)
def head_program(
    config: DecoderConfig, layers: tuple[Layer, ...], shape: tuple[int, int, int, int]
) -> Callable[..., Any]:
    """jit of (params, frozen, skips, source, target) -> parts of the edge between them, [B, H, S, S].

    Args of the program:
        source: position, and what it adds there: embedding [M]; writes, of each layer [D].
        target: layer, position and vector of one target of `row_program`.
    """

    def parts(params: Any, frozen: Any, skips: Any, source: Any, target: Any) -> jax.Array:
        def weight(share: jax.Array, gates_BHSS: jax.Array) -> jax.Array:
            here_S1 = (jnp.arange(shape[2])[:, None] == source["position"]) * share
            read = functools.partial(read_at, target)
            return linear(
                config,
                params,
                frozen,
                layers,
                skips,
                read,
                lambda layer, tie: here_S1 * source["writes"][layer][None] + 0 * tie,
                here_S1 * source["embedding"][None],
                gates=list(gates_BHSS),
            )

        # By the share first: what does not come from the source is a constant, and has no part.
        return jax.grad(lambda gates: jax.grad(weight)(jnp.float32(0), gates))(jnp.ones(shape, jnp.float32))

    return jax.jit(parts)


def _largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """Flat places of the largest, the largest first."""
    flat = sizes.ravel()
    some = np.argpartition(-flat, min(count, flat.size) - 1)[:count]
    return some[np.lexsort((some, -flat[some]))]


def _seen(config: DecoderConfig, names: tuple[str, ...], params: Any, tokens_S: jax.Array) -> dict[str, jax.Array]:
    _, seen = decoder.run(config, params, tokens_S[None], capture=names)
    return {name: value[0] for name, value in seen.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _slopes(
    config: DecoderConfig, rope: Rope | None, side: str, p: Any, x_M: jax.Array, head: int, position: int
) -> tuple[jax.Array, jax.Array]:
    """(query or key of a head [D], its derivative [D, M]) of what enters the block at a token; scales are constant."""

    def held(name: str, value: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(value) if name.endswith("_scale") else value

    def query_or_key(x_M: jax.Array) -> jax.Array:
        x_BSM = x_M[None, None]
        rotation = None if rope is None else decoder.rotary_angles(rope, jnp.full((1, 1), position))
        normed_BSM = decoder.norm(config, "ln1", p, x_BSM, held) if "ln1" in p else x_BSM
        q_BHSD, k_BGSD, _ = decoder.heads_of(config, p["attn"], normed_BSM, rotation, held)
        each = q_BHSD if side == "q" else jnp.repeat(k_BGSD, config.n_head // config.kv_heads, axis=1)
        return each[0, head, 0].astype(jnp.float32)

    with jax.default_matmul_precision("highest"):
        return query_or_key(x_M), jax.jacrev(query_or_key)(x_M)
