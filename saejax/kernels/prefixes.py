"""Errors of the reconstructions from the first kept latents of a token, for many numbers of them at once.

Shape letters: B tokens, G groups, K kept latents a token and group, F latents, R width of a decoder row.

The stacked reconstructions [B, n, R] are never built, forward or backward: both walk over the list, block by block, and
carry what is summed so far, [B, R]. The way back takes the blocks off again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from saejax.kernels.groups import Groups
from saejax.kernels.sparse import decode_groups


def prefix_errors_reference(
    values_BGK: jax.Array, indices_BGK: jax.Array, rows: Groups, target_BR: jax.Array, every: int
) -> jax.Array:
    """mean over j of ||target_b - sum of the first j||^2, for j = K, K - every, ... > 0.  -> [B]"""
    n_kept, width = values_BGK.shape[-1], rows.width
    written = [
        jnp.pad(values_BGK[:, g, :, None] * rows[g][indices_BGK[:, g]], ((0, 0), (0, 0), (at.start, width - at.stop)))
        for g, at in enumerate(rows.columns)
    ]
    sums_BKR = jnp.cumsum(functools.reduce(jnp.add, written), axis=1)[:, (n_kept - 1) % every :: every]
    return jnp.square(target_BR[:, None] - sums_BKR).sum(2).mean(1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def prefix_errors(
    values_BGK: jax.Array, indices_BGK: jax.Array, rows: Groups, target_BR: jax.Array, every: int
) -> jax.Array:
    """`prefix_errors_reference` in memory [B, R]; rows as `decode_groups` takes them.

    Over devices that hold other latents one sum of [B, R] crosses for each number of latents. The gradient of the rows
    is summed block by block: its time is that of one decoder for each number of latents.
    """
    return _fwd(values_BGK, indices_BGK, rows, target_BR, every)[0]


def _fwd(
    values_BGK: jax.Array, indices_BGK: jax.Array, rows: Groups, target_BR: jax.Array, every: int
) -> tuple[jax.Array, Any]:
    """Errors [B]; beside the arguments the way back needs what the last reconstruction leaves of the target, [B, R]."""

    def add(carry: tuple[jax.Array, jax.Array], block: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        left_BR, errors_B = carry
        left_BR = left_BR - decode_groups(*block, rows)
        return (left_BR, errors_B + jnp.square(left_BR).sum(1)), None

    blocks = _rank_blocks(values_BGK, every), _rank_blocks(indices_BGK, every)
    # The zeros vary over devices as the target does, which other people's shard_map asks of what a loop carries.
    (left_BR, errors_B), _ = jax.lax.scan(add, (target_BR, jnp.zeros_like(target_BR[:, 0])), blocks)
    return errors_B / len(blocks[0]), (values_BGK, indices_BGK, rows, left_BR)


def _rank_blocks(array_BGK: jax.Array, every: int) -> jax.Array:
    """[n, B, G, every]: the list in blocks, the first filled up in front with zeros."""
    every = min(every, array_BGK.shape[-1])
    n = -(-array_BGK.shape[-1] // every)
    full = jnp.pad(array_BGK, ((0, 0), (0, 0), (n * every - array_BGK.shape[-1], 0)))
    return jnp.moveaxis(full.reshape(*full.shape[:-1], n, every), -2, 0)


def _bwd(every: int, residuals: Any, g_B: jax.Array) -> tuple[jax.Array, None, Any, jax.Array]:
    values_BGK, indices_BGK, rows, left_BR = residuals
    blocks = _rank_blocks(values_BGK, every), _rank_blocks(indices_BGK, every)
    weight_B1 = (2 / len(blocks[0]) * g_B)[:, None]

    def take_off(carry: Any, block: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        """The gradient of a block's latents: from all reconstructions that they are in, this one and those after."""
        left_BR, pull_BR, of_rows = carry
        values, indices = block
        pull_BR = pull_BR + weight_B1 * left_BR
        written_BR, back = jax.vjp(lambda values, rows: decode_groups(values, indices, rows), values, rows)
        of_values, of_block = back(-pull_BR)
        return (left_BR + written_BR, pull_BR, jax.tree.map(jnp.add, of_rows, of_block)), of_values

    start = left_BR, jnp.zeros_like(left_BR), jax.tree.map(jnp.zeros_like, rows)
    (_, pull_BR, of_rows), of_blocks = jax.lax.scan(take_off, start, blocks, reverse=True)
    of_values = jnp.moveaxis(of_blocks, 0, -2).reshape(*values_BGK.shape[:-1], -1)
    return of_values[..., -values_BGK.shape[-1] :], None, of_rows, pull_BR


prefix_errors.defvjp(_fwd, _bwd)
