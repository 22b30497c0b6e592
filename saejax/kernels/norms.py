"""Lengths of rows whose gradient is finite everywhere."""

import jax
import jax.numpy as jnp


def norms(rows: jax.Array, axis: int | tuple[int, ...], keepdims: bool = False) -> jax.Array:
    """||rows|| along `axis`, with gradient rows / ||rows||, and 0 at a row of zeros, where `jnp.linalg.norm` has NaN.

    0 is a subgradient there, the shortest: a penalty on a length leaves a row of zeros alone.
    """
    squares = jnp.square(rows).sum(axis, keepdims=keepdims)
    some = squares > 0
    return jnp.where(some, jnp.sqrt(jnp.where(some, squares, 1)), 0)


def unit_rows(rows: jax.Array) -> jax.Array:
    """Each rows[f] at length 1; a row of zeros stays."""
    lengths = norms(rows, tuple(range(1, rows.ndim)), keepdims=True)
    return rows / jnp.where(lengths > 0, lengths, 1)
