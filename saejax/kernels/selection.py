"""The largest of many numbers, exactly: k of all of them by counting, or k of each row.

The bits of a non-negative float32, read as an integer, are ordered as the float is. So the k-th largest is the
largest bit pattern that at least k numbers reach, found in 31 halvings. Over devices (see `shards`) only counts travel;
for the k largest of each row, each device's own k largest.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from saejax.kernels.shards import Shards, shards_of, shards_of_batch


def largest_mask(values: jax.Array, k: jax.Array | int) -> jax.Array:
    """bool: the k largest entries of a non-negative array [B, ..., F], over all of it; zeros are never chosen.

    Exactly k of them (or all that are positive, when fewer): among equal numbers at the border the first in
    row-major order win, however tokens and latents lie on devices. XLA may compute `values` again for the mask, so they
    must come out alike: give it no product and sum that one place could contract into one operation and another not.
    """
    rows = jnp.atleast_2d(values)
    shards = shards_of_batch(rows.shape[0], rows.shape[-1])
    layout = "B" + "G" * (rows.ndim - 2) + "F"
    mask = shards.run(lambda own, k: _mask(_bits(own), k, shards), f"{layout} -", layout)(rows, jnp.int32(k))
    return mask.reshape(jnp.shape(values))


def largest_of_rows(values: jax.Array, k: int) -> jax.Array:
    """int32 [B, ..., k]: indices of the k largest of [B, ..., F] along F, falling; among equals the lower first."""
    shards = shards_of(values.shape[0], values.shape[-1])

    def local(own: jax.Array) -> jax.Array:
        if shards.n_along_latents == 1:
            return top_k(own, k)[1]
        # What is among the k largest of all is among the k largest of its device. These are side by side in the order
        # of the latents, so that among equals the first place is the lowest index.
        best, at = top_k(own, min(k, own.shape[-1]))
        best, at = shards.beside(best), shards.beside(at + shards.first_latent(own.shape[-1]))
        return jnp.take_along_axis(at, top_k(best, k)[1], axis=-1)

    middle = "G" * (values.ndim - 2)
    return shards.run(local, f"B{middle}F", f"B{middle}K")(values)


def top_k(values: jax.Array, k: int) -> list[jax.Array]:
    """`jax.lax.top_k`, out of reach of what follows: XLA makes a sort of a top_k whose results are then sliced."""
    # A barrier for each: one around the pair makes the compiler of jax 0.10.2 abort.
    return [jax.lax.optimization_barrier(found) for found in jax.lax.top_k(values, k)]


def _bits(values: jax.Array) -> jax.Array:
    """int32, ordered as the values are; a zero with a sign is negative, below every other."""
    return jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def _kth_largest(bits: jax.Array, k: jax.Array, shards: Shards) -> jax.Array:
    """The largest pattern that at least k entries reach; 0 where fewer than k are at least 0."""

    def halve(i: int, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.int32(1) << (30 - i))
        return jnp.where(_reaches(bits >= candidate, k, shards), candidate, found)

    return jax.lax.fori_loop(0, 31, halve, jnp.int32(0))


def _mask(bits: jax.Array, k: jax.Array, shards: Shards) -> jax.Array:
    """`largest_mask` of the whole from one device's block of it."""
    # Bits are compared, not floats: a CPU takes numbers below the smallest normal one for 0.
    kth = _kth_largest(bits, k, shards)
    above, ties = bits > kth, (bits == kth) & (bits > 0)
    room = k - shards.over_all(above.sum(dtype=jnp.int32))  # fewer than k are above
    too_many = _reaches(ties, room + 1, shards)
    return jax.lax.cond(too_many, lambda: above | (ties & _first(ties, room, shards)), lambda: above | ties)


def _first(ties: jax.Array, room: jax.Array, shards: Shards) -> jax.Array:
    """bool: the places up to the `room`-th of the ties in row-major order. There are more than `room`.

    The row of that place is found from each row's count, then the place in the row, each by halving.
    """
    others, n_own = tuple(range(1, ties.ndim)), ties.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, ties.shape, 0) + shards.first_row(n_own)
    row_B = jnp.arange(n_own, dtype=jnp.int32) + shards.first_row(n_own)
    count_B = shards.over_latents(ties.sum(others, dtype=jnp.int32))
    n_rows = shards.over_rows(jnp.int32(n_own))

    def rows_fit(n: jax.Array) -> jax.Array:
        return ~_sum_reaches(jnp.where(row_B < n, count_B, 0).sum(dtype=jnp.uint32), room + 1, shards.over_rows)

    cut = _last_true(rows_fit, n_rows)
    left = room - shards.over_rows(jnp.where(row_B < cut, count_B, 0).sum(dtype=jnp.int32))

    # Of the row that is cut, every device with its latents has the ties: a column is [F] or [G, F].
    in_row = shards.over_rows((ties & (row == cut)).sum(0, dtype=jnp.int32))
    n_latents = shards.over_latents(jnp.int32(in_row.shape[-1]))
    column = jax.lax.broadcasted_iota(jnp.int32, in_row.shape, in_row.ndim - 1)
    column = column + shards.first_latent(in_row.shape[-1])
    for axis in range(in_row.ndim - 1):  # groups come before latents
        column = column + n_latents * jax.lax.broadcasted_iota(jnp.int32, in_row.shape, axis)

    def columns_fit(n: jax.Array) -> jax.Array:
        return shards.over_latents(jnp.where(column < n, in_row, 0).sum(dtype=jnp.int32)) <= left

    stop = _last_true(columns_fit, n_latents * (in_row.size // in_row.shape[-1]))
    return (row < cut) | ((row == cut) & (column < stop)[None])


def _last_true(fits: Callable[[jax.Array], jax.Array], n: jax.Array) -> jax.Array:
    """The largest i of 0 ... n with fits(i), which holds at 0 and, once it fails, for no larger i."""

    def halve(i: int, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.int32(1) << (30 - i))
        return jnp.where((candidate > 0) & (candidate <= n) & fits(candidate), candidate, found)

    return jax.lax.fori_loop(0, 31, halve, jnp.int32(0))


def _reaches(chosen: jax.Array, k: jax.Array, shards: Shards) -> jax.Array:
    """Whether at least k entries are chosen, over all devices."""
    return _sum_reaches(chosen.sum(dtype=jnp.uint32), k, shards.over_all)


def _sum_reaches(own: jax.Array, k: jax.Array, over: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Whether the devices' own counts add up to k >= 0. The sum may pass 2^32, so it travels as two halves."""
    halves = over(jnp.stack([own >> 16, own & 0xFFFF]))
    high, low = halves[0] + (halves[1] >> 16), halves[1] & 0xFFFF
    k = k.astype(jnp.uint32)
    return (high > k >> 16) | ((high == k >> 16) & (low >= k & 0xFFFF))
