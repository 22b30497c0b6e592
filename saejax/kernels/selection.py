"""The k-th largest of many numbers, exactly, by counting: no sort, and over shards only counts would travel.

The bits of a non-negative float32, read as an integer, are ordered as the float is. So the k-th largest is the
largest bit pattern that at least k numbers reach, found in 31 halvings.
"""

import jax
import jax.numpy as jnp


def kth_largest_reference(values: jax.Array, k: jax.Array | int) -> jax.Array:
    """The k-th largest of all entries, by sorting them. k is at least 1."""
    return jnp.sort(values.ravel())[-jnp.asarray(k)]


def kth_largest(values: jax.Array, k: jax.Array | int) -> jax.Array:
    """The k-th largest of all entries of a non-negative float32 array of any shape; k >= 1 may be traced.

    0 where k exceeds the number of entries.
    """
    return jax.lax.bitcast_convert_type(_kth_largest(_bits(values), k), jnp.float32)


def largest_mask(values: jax.Array, k: jax.Array | int) -> jax.Array:
    """bool: the k largest entries of a non-negative array, over all of it; zeros are never chosen.

    Exactly k of them (or all that are positive, when fewer): among equal numbers at the border the first in
    row-major order win.
    """
    # Bits are compared, not floats: a CPU takes numbers below the smallest normal one for 0.
    bits = _bits(values)
    kth = _kth_largest(bits, k)
    above, ties = bits > kth, (bits == kth) & (bits > 0)
    room = k - above.sum(dtype=jnp.int32)

    def first_ties() -> jax.Array:
        order = jnp.cumsum(ties.ravel(), dtype=jnp.int32).reshape(ties.shape)
        return above | (ties & (order <= room))

    return jax.lax.cond(ties.sum(dtype=jnp.int32) > room, first_ties, lambda: above | ties)


def _bits(values: jax.Array) -> jax.Array:
    """int32, ordered as the values are; a zero with a sign is negative, below every other."""
    return jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def _kth_largest(bits: jax.Array, k: jax.Array | int) -> jax.Array:
    """The largest pattern that at least k entries reach; 0 where fewer than k are at least 0."""

    def halve(i: int, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.int32(1) << (30 - i))
        return jnp.where((bits >= candidate).sum(dtype=jnp.int32) >= k, candidate, found)

    return jax.lax.fori_loop(0, 31, halve, jnp.int32(0))
