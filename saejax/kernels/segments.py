"""Sums by latent on a GPU, the same bits every time: no two writers of one row, so no atomic additions.

    out[indices_bk] += scale_bk rows_b

An ordinary scatter does that with atomic additions there, in whatever order they happen to come. Here the N = B K pairs
are sorted by latent, so that a latent's tokens lie side by side, and are gathered and added in their order:

    the first c pairs of every latent                               F c places to gather from
    pairs c to 2c of the N / (c + 1) busiest latents, c doubling    N places a doubling, at most
    all pairs of the N / (c + 1) busiest latents in the end         one dense product [H, B] [B, D]

At most N / (c + 1) latents can have more than c pairs: so every size is known before the data are, and is right for
all data. A place beyond a latent's last pair counts 0. Nothing of the size N D is kept.

Shape letters: B tokens, K kept latents a token, N pairs, F latents, R latents at hand, H busiest latents, D width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from saejax.kernels.dense import EXACT

# So many gathered rows are added in one pass over the sums, of which XLA makes one kernel. With more there are fewer
# passes, and the compiler takes longer.
_SEGMENTS_AT_ONCE = 8
# A product costs a latent 2 B FLOPs a column, at 60 TFLOP/s in float32 on an H100; a gather 4 bytes a pair and column,
# at about 5 TB/s from its cache. These are equal at B / 24 pairs.
_TOKENS_A_PAIR = 32
# Below so many multiplications, 0.1 ms there, one product is faster than the dozen kernels of the other way.
_FEW_MULTIPLICATIONS = 3e9


def sum_by_latent_reference(
    scale_BK: jax.Array, indices_BK: jax.Array, rows_BD: jax.Array, n_latents: int
) -> jax.Array:
    """out[indices_bk] += scale_bk rows_b; an index from n_latents on is dropped.  -> [n_latents, D]"""
    out_FD = jnp.zeros((n_latents, rows_BD.shape[1]), rows_BD.dtype)
    return out_FD.at[indices_BK].add(scale_BK[..., None] * rows_BD[:, None], mode="drop")


def sum_by_latent(scale_BK: jax.Array, indices_BK: jax.Array, rows_BD: jax.Array, n_latents: int) -> jax.Array:
    """out[indices_bk] += scale_bk rows_b, in one order.  -> [n_latents, D]

    Args:
        indices_BK: not negative. From n_latents on they are dropped; the others are distinct along K.
    """
    way = sum_by_product if prefers_product(rows_BD.shape[0], rows_BD.shape[1], n_latents) else sum_gathered
    return way(scale_BK, indices_BK, rows_BD, n_latents)


def tally_by_latent(weights_BK: jax.Array, indices_BK: jax.Array, n_latents: int) -> jax.Array:
    """out[indices_bk] += weights_bk, in one order; indices as in `sum_by_latent`.  -> [n_latents]"""
    return sum_by_latent(weights_BK, indices_BK, jnp.ones((weights_BK.shape[0], 1), weights_BK.dtype), n_latents)[:, 0]


def prefers_product(n_tokens: int, width: int, n_latents: int) -> bool:
    """True if one dense product [F, B] [B, D] is the faster way to all the sums on an H100 (by arithmetic)."""
    return n_tokens * width * n_latents <= _FEW_MULTIPLICATIONS


def sum_by_product(scale_BK: jax.Array, indices_BK: jax.Array, rows_BD: jax.Array, n_latents: int) -> jax.Array:
    """`sum_by_latent` as one dense product [F, B] [B, D]."""
    return _product(*_flat_pairs(scale_BK, indices_BK), rows_BD, n_latents)


def sum_gathered(scale_BK: jax.Array, indices_BK: jax.Array, rows_BD: jax.Array, n_latents: int) -> jax.Array:
    """`sum_by_latent` of pairs sorted by latent: few at a time are gathered, and of the busiest latents multiplied."""
    return sum_pairs(*_flat_pairs(scale_BK, indices_BK), rows_BD, n_latents)


def sum_pairs(
    scale_N: jax.Array, latent_N: jax.Array, token_N: jax.Array, rows_BD: jax.Array, n_latents: int
) -> jax.Array:
    """out[latent_n] += scale_n rows[token_n], in one order, of pairs that differ.  -> [n_latents, D]

    Latents from n_latents on are dropped. `latent` and `token` may be any two numberings: those of rows and sources.
    """
    rows_BD, n_pairs = jnp.asarray(rows_BD), scale_N.size
    first, last = _gather_bounds(rows_BD.shape[0], n_pairs, n_latents)
    sorted_N, place_N = _sort(latent_N)
    edges = jnp.searchsorted(sorted_N, jnp.arange(n_latents + 1, dtype=jnp.uint32), method="scan_unrolled")
    pairs = _Pairs(scale_N[place_N], token_N[place_N], edges[:-1], edges[1:] - edges[:-1])
    _, busiest_F = _sort(n_pairs - pairs.count_F)

    def busiest(above: int) -> jax.Array:
        """Latents [R], those with more than so many pairs among them."""
        return busiest_F[: min(n_latents, n_pairs // (above + 1))]

    out_FD = _gathered(pairs, jnp.arange(n_latents), rows_BD, 0, first)
    while first < last:
        latents_R = busiest(first)
        part_RD = _gathered(pairs, latents_R, rows_BD, first, 2 * first)
        out_FD = out_FD.at[latents_R].add(part_RD, unique_indices=True)
        first *= 2
    latents_H = busiest(last)
    # Which row of the product each latent has; none where it is not among these.
    row_F = jnp.full(n_latents + 1, latents_H.size, jnp.int32)
    row_F = row_F.at[latents_H].set(jnp.arange(latents_H.size, dtype=jnp.int32), unique_indices=True)
    busiest_HD = _product(scale_N, row_F[jnp.minimum(latent_N, n_latents)], token_N, rows_BD, latents_H.size)
    return out_FD.at[latents_H].set(busiest_HD, unique_indices=True)


def _product(
    scale_N: jax.Array, latent_N: jax.Array, token_N: jax.Array, rows_BD: jax.Array, n_latents: int
) -> jax.Array:
    """`sum_pairs` as one dense product [F, B] [B, D]."""
    dense_FB = jnp.zeros((n_latents, rows_BD.shape[0]), scale_N.dtype)
    dense_FB = dense_FB.at[latent_N, token_N].set(scale_N, mode="drop", unique_indices=True)
    return jnp.matmul(dense_FB, rows_BD, precision=EXACT)


def _flat_pairs(scale_BK: jax.Array, indices_BK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pairs as a list: scales, latents and tokens, [B K] each."""
    token_BK = jax.lax.broadcasted_iota(jnp.int32, jnp.shape(indices_BK), 0)
    return jnp.ravel(scale_BK), jnp.ravel(indices_BK), token_BK.ravel()


class _Pairs(NamedTuple):
    """Pairs sorted by latent, of one latent by token. Latent f has `count_F[f]` of them, from place `first_F[f]` on."""

    scale_N: jax.Array
    token_N: jax.Array
    first_F: jax.Array
    count_F: jax.Array


def _gather_bounds(n_tokens: int, n_pairs: int, n_latents: int) -> tuple[int, int]:
    """(pairs that are gathered of every latent, pairs of one latent above which it goes through the product).

    The first makes F c + N log2(last / c), the places that are gathered from, small.
    """
    first = power_of_two(max(4, 1.44 * n_pairs / n_latents))
    return first, max(first, power_of_two(n_tokens / _TOKENS_A_PAIR))


def power_of_two(number: float) -> int:
    """The nearest from below."""
    return 1 << max(0, int(number).bit_length() - 1)


def _sort(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(numbers in order, their places). Stable: the same places every time.

    Unsigned keys with one number each: what XLA hands to NVIDIA's radix sort.
    """
    places = jnp.arange(numbers.size, dtype=jnp.int32)
    keys, places = jax.lax.sort((numbers.astype(jnp.uint32), places), num_keys=1)
    return keys, places


def _gathered(pairs: _Pairs, latents_R: jax.Array, rows_BD: jax.Array, start: int, stop: int) -> jax.Array:
    """Sums of the pairs `start` to `stop` of each of these latents.  -> [R, D]"""
    first_R, count_R = pairs.first_F[latents_R], pairs.count_F[latents_R]
    # Beyond a latent's last pair that one is read again, which costs little, and counts 0.
    last_R = jnp.clip(first_R + count_R - 1, 0, pairs.token_N.size - 1)

    def add(block: int | jax.Array, out_RD: jax.Array) -> jax.Array:
        place_1J = start + block * at_once + jnp.arange(at_once)[None]
        place_RJ = jnp.minimum(first_R[:, None] + place_1J, last_R[:, None])
        scale_RJ = jnp.where(place_1J < count_R[:, None], pairs.scale_N[place_RJ], 0)
        token_RJ = pairs.token_N[place_RJ]
        for j in range(at_once):
            out_RD = out_RD + scale_RJ[:, j, None] * rows_BD[token_RJ[:, j]]
        return out_RD

    at_once = min(_SEGMENTS_AT_ONCE, stop - start)
    zeros_RD = jnp.zeros((latents_R.size, rows_BD.shape[1]), rows_BD.dtype)
    # The first turn comes before the loop, as in `sparse`.
    return jax.lax.fori_loop(1, (stop - start) // at_once, add, add(0, zeros_RD))
