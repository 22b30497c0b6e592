"""Products with K non-zeros a row, that never build the dense [B, F] latents, forward or backward.

Shape letters: B tokens, K kept latents a token, F latents, D model width.

The K latents of a token are a list of pairs as in `pairs`, which has the products for a CPU.

Where latents are split over devices (see `shards`), each device treats the indices that are its own and takes the
others for zeros. What crosses is a sum of [B, D] or [B, K]; the gradient of a weight stays where the weight is, summed
over the devices that hold other tokens, once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from saejax.kernels.groups import Groups
from saejax.kernels.pairs import even_sums_on_cpu, few, ordered, products_on_cpu, sums_on_cpu, turned
from saejax.kernels.segments import sum_by_latent, tally_by_latent
from saejax.kernels.shards import Shards, shards_of


def decode_rows_reference(values_BK: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
    """out_b = sum_k values_bk W[indices_bk].  [B, K], [B, K], [F, D] -> [B, D]"""
    return jnp.einsum("bk,bkd->bd", values_BK, W_FD[indices_BK])


def decode_rows(values_BK: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
    """out_b = sum_k values_bk W[indices_bk], with gradients to values and W that stay sparse."""
    return decode_groups(values_BK[:, None], indices_BK[:, None], Groups.one(W_FD))


@jax.custom_vjp
def decode_groups(values_BGK: jax.Array, indices_BGK: jax.Array, rows: Groups) -> jax.Array:
    """out_b = sum_g sum_k values_bgk rows_g[indices_bgk] at the group's columns, [B, D]; gradients stay sparse.

    Over devices the groups are added up before they are summed: one sum of [B, D], however many groups there are.
    """
    shards = shards_of(indices_BGK.shape[0], rows[0].shape[0])

    def local(values_BGK: jax.Array, indices_BGK: jax.Array, rows: Groups) -> jax.Array:
        parts = []
        for group, W_FR in enumerate(rows):
            at_BK, own_BK = _local_indices(indices_BGK[:, group], W_FR.shape[0], shards)
            parts.append(_weighted_rows(_only(own_BK, values_BGK[:, group]), at_BK, W_FR))
        return shards.over_latents(rows.added_up(parts))

    return shards.run(local, "BGK BGK FR", "BD")(values_BGK, indices_BGK, rows)


def _decode_bwd(residuals: Any, g_BD: jax.Array) -> tuple[jax.Array, None, Groups]:
    values_BGK, indices_BGK, rows = residuals
    shards = shards_of(indices_BGK.shape[0], rows[0].shape[0])

    def local(values_BGK: jax.Array, indices_BGK: jax.Array, rows: Groups, g_BD: jax.Array) -> Any:
        of_values, of_rows = [], []
        for group, (W_FR, g_BR) in enumerate(zip(rows, rows.of(g_BD), strict=True)):
            at_BK, own_BK = _local_indices(indices_BGK[:, group], W_FR.shape[0], shards)
            of_rows.append(_scatter_rows(values_BGK[:, group], at_BK, own_BK, g_BR, W_FR.shape[0]))
            of_values.append(_only(own_BK, _row_products(g_BR, at_BK, W_FR)))
        own = Groups(tuple(of_rows), rows.starts)
        return shards.over_latents(jnp.stack(of_values, axis=1)), jax.tree.map(shards.over_rows, own)

    of_values, of_rows = shards.run(local, "BGK BGK FR BD", "BGK FR")(values_BGK, indices_BGK, rows, g_BD)
    return of_values, None, of_rows


decode_groups.defvjp(lambda *arguments: (decode_groups(*arguments), arguments), _decode_bwd)


@jax.custom_vjp
def rows_of_columns(W_GDF: jax.Array) -> jax.Array:
    """W^T, [G, F, D]. A weight's columns as the rows that `kept_pre_activations` and others have gradients of.

    Where nobody reads them nothing is turned but the sum of these gradients, once (`pairs.turned`).
    """
    return jnp.swapaxes(W_GDF, -1, -2)


def _rows_bwd(_: None, g_GFD: jax.Array) -> tuple[jax.Array]:
    return (shards_of(0, g_GFD.shape[1]).run(turned, "GFD", "GDF")(g_GFD),)


rows_of_columns.defvjp(lambda W_GDF: (rows_of_columns(W_GDF), None), _rows_bwd)


def kept_pre_activations_reference(
    x_BD: jax.Array, W_FD: jax.Array, pre_BF: jax.Array, indices_BK: jax.Array
) -> jax.Array:
    """pre[b, indices_bk] for pre = x W^T, differentiated through the dense product. -> [B, K]"""
    del pre_BF
    return jnp.take_along_axis(x_BD @ W_FD.T, indices_BK, axis=1)


@jax.custom_vjp
def kept_pre_activations(x_BD: jax.Array, W_FD: jax.Array, pre_BF: jax.Array, indices_BK: jax.Array) -> jax.Array:
    """pre[b, indices_bk], where pre = x W^T is already known; its gradient to W touches only kept rows.

    `pre_BF` serves the values alone: no gradient flows into it, and none into x (activations are data; what
    the encoder's input bias needs is added by the caller, who knows it).
    """
    return _gather_entries(pre_BF, indices_BK)


def _kept_bwd(residuals, g_BK: jax.Array):  # type: ignore[no-untyped-def]
    x_BD, indices_BK, n_latents = residuals
    shards = shards_of(indices_BK.shape[0], n_latents)

    def local(g_BK: jax.Array, indices_BK: jax.Array, x_BD: jax.Array) -> jax.Array:
        n_own = n_latents // shards.n_along_latents
        at_BK, own_BK = _local_indices(indices_BK, n_own, shards)
        return shards.over_rows(_scatter_rows(g_BK, at_BK, own_BK, x_BD, n_own))

    grad_FD = shards.run(local, "BK BK BD", "FD")(g_BK, indices_BK, x_BD.astype(g_BK.dtype))
    return None, grad_FD, None, None


kept_pre_activations.defvjp(
    lambda x_BD, W_FD, pre_BF, indices_BK: (_gather_entries(pre_BF, indices_BK), (x_BD, indices_BK, W_FD.shape[0])),
    _kept_bwd,
)


@jax.custom_vjp
def entries(dense: jax.Array, indices: jax.Array) -> jax.Array:
    """dense[b, ..., indices[b, ..., k]]: [B, ..., F] and [B, ..., K] -> [B, ..., K]; its gradient is `spread`."""
    return _gather_entries(dense, indices)


def _gather_entries(dense: jax.Array, indices: jax.Array) -> jax.Array:
    shards, middle = shards_of(dense.shape[0], dense.shape[-1]), "G" * (dense.ndim - 2)

    def local(dense: jax.Array, indices: jax.Array) -> jax.Array:
        at, own = _local_indices(indices, dense.shape[-1], shards)
        return shards.over_latents(_only(own, jnp.take_along_axis(dense, at, axis=-1)))

    return shards.run(local, f"B{middle}F B{middle}K", f"B{middle}K")(dense, indices)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(values: jax.Array, indices: jax.Array, n_latents: int) -> jax.Array:
    """[B, ..., n_latents]: zeros, with values[b, ..., k] at indices[b, ..., k]; its gradient is `entries`."""
    shards, middle = shards_of(values.shape[0], n_latents), "G" * (values.ndim - 2)

    def local(values: jax.Array, indices: jax.Array) -> jax.Array:
        n_own = n_latents // shards.n_along_latents
        at, own = _local_indices(indices, n_own, shards)
        # What is another device's goes past the end, where a scatter drops it.
        at = at if own is None else jnp.where(own, at, n_own)
        zeros = jnp.zeros((*values.shape[:-1], n_own), values.dtype)
        return jnp.put_along_axis(zeros, at, values, axis=-1, inplace=False, mode="drop")

    return shards.run(local, f"B{middle}K B{middle}K", f"B{middle}F")(values, indices)


def _entries_bwd(residuals, g):  # type: ignore[no-untyped-def]
    indices, n_latents = residuals
    return spread(g, indices, n_latents), None


def _spread_bwd(n_latents, indices, g):  # type: ignore[no-untyped-def]
    return entries(g, indices), None


entries.defvjp(lambda dense, at: (_gather_entries(dense, at), (at, dense.shape[-1])), _entries_bwd)
spread.defvjp(lambda values, at, n_latents: (spread(values, at, n_latents), at), _spread_bwd)


@jax.custom_vjp
def of_latents(vector_F: jax.Array, indices_BK: jax.Array) -> jax.Array:
    """vector[indices]: a number of each latent, where it is kept.  [F], [B, K] -> [B, K]"""
    shards = shards_of(indices_BK.shape[0], vector_F.shape[0])

    def local(vector_F: jax.Array, indices_BK: jax.Array) -> jax.Array:
        at_BK, own_BK = _local_indices(indices_BK, vector_F.shape[0], shards)
        return shards.over_latents(_only(own_BK, vector_F[at_BK]))

    return shards.run(local, "F BK", "BK")(vector_F, indices_BK)


def tally(weights_BK: jax.Array, indices_BK: jax.Array, n_latents: int) -> jax.Array:
    """out[indices_bk] += weights_bk.  -> [n_latents]"""
    shards = shards_of(indices_BK.shape[0], n_latents)

    def local(weights_BK: jax.Array, indices_BK: jax.Array) -> jax.Array:
        n_own = n_latents // shards.n_along_latents
        at_BK, own_BK = _local_indices(indices_BK, n_own, shards)
        at_BK = at_BK if own_BK is None else jnp.where(own_BK, at_BK, n_own)

        def add(weights_BK: jax.Array, at_BK: jax.Array) -> jax.Array:
            return jnp.zeros(n_own, weights_BK.dtype).at[at_BK].add(weights_BK, mode="drop")

        if not jnp.issubdtype(weights_BK.dtype, jnp.floating):
            return shards.over_rows(add(weights_BK, at_BK))  # whole numbers have one sum in every order
        by_latent = functools.partial(tally_by_latent, n_latents=n_own)
        return shards.over_rows(jax.lax.platform_dependent(weights_BK, at_BK, cpu=add, default=by_latent))

    return shards.run(local, "BK BK", "F")(weights_BK, indices_BK)


def _of_latents_bwd(residuals, g_BK):  # type: ignore[no-untyped-def]
    indices_BK, n_latents = residuals
    return tally(g_BK, indices_BK, n_latents), None


of_latents.defvjp(lambda vector_F, at_BK: (of_latents(vector_F, at_BK), (at_BK, vector_F.shape[0])), _of_latents_bwd)


def _local_indices(indices: jax.Array, n_own: int, shards: Shards) -> tuple[jax.Array, jax.Array | None]:
    """(places among this device's latents, which of the indices those are: None for all of them)."""
    if not shards.latents:
        return indices, None
    at = indices - shards.first_latent(n_own)
    own = (at >= 0) & (at < n_own)
    return jnp.where(own, at, 0), own


def _only(own: jax.Array | None, values: jax.Array) -> jax.Array:
    return values if own is None else jnp.where(own, values, 0)


# On a CPU the products are those of `pairs`. On an NVIDIA card XLA makes one kernel of a gather and the sum over it,
# and two or more of each turn of a loop. Elsewhere there are loops over K that vectorise over B, and sums by latent. A
# custom_vjp hands NumPy arrays on as they are, and a loop's counter cannot index those: hence `asarray`. The first turn
# is taken before the loop: in other people's shard_map what is carried must vary over devices from the start.
def _weighted_rows(values_BK: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
    def at_once(values_BK: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
        return (values_BK[..., None] * W_FD[indices_BK]).sum(1)

    def by_pairs(values_BK: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
        way = at_once if few(indices_BK.size, W_FD.shape[1]) else even_sums_on_cpu
        return way(values_BK, indices_BK, W_FD)

    def by_k(values_BK: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
        def add(k: int, out_BD: jax.Array) -> jax.Array:
            return out_BD + values_BK[:, k, None] * W_FD[indices_BK[:, k]]

        start_BD = jnp.zeros((values_BK.shape[0], W_FD.shape[1]), W_FD.dtype)
        return jax.lax.fori_loop(1, values_BK.shape[1], add, add(0, start_BD))

    arrays = jnp.asarray(values_BK), jnp.asarray(indices_BK), jnp.asarray(W_FD)
    return jax.lax.platform_dependent(*arrays, cpu=by_pairs, cuda=at_once, default=by_k)


def _row_products(g_BD: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
    """out_bk = g_b . W[indices_bk]"""

    def at_once(g_BD: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
        return (g_BD[:, None] * W_FD[indices_BK]).sum(-1)

    def by_pairs(g_BD: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
        if few(indices_BK.size, W_FD.shape[1]):
            return at_once(g_BD, indices_BK, W_FD)
        rows_P = jax.lax.broadcasted_iota(jnp.int32, indices_BK.shape, 0).reshape(-1)
        return products_on_cpu([(g_BD, W_FD)], rows_P, indices_BK.reshape(-1)).reshape(indices_BK.shape)

    def by_k(g_BD: jax.Array, indices_BK: jax.Array, W_FD: jax.Array) -> jax.Array:
        def put(k: int, out_BK: jax.Array) -> jax.Array:
            return out_BK.at[:, k].set((g_BD * W_FD[indices_BK[:, k]]).sum(-1))

        return jax.lax.fori_loop(1, indices_BK.shape[1], put, put(0, jnp.zeros(indices_BK.shape, g_BD.dtype)))

    arrays = jnp.asarray(g_BD), jnp.asarray(indices_BK), jnp.asarray(W_FD)
    return jax.lax.platform_dependent(*arrays, cpu=by_pairs, cuda=at_once, default=by_k)


def _scatter_rows(
    scale_BK: jax.Array, indices_BK: jax.Array, own_BK: jax.Array | None, rows_BD: jax.Array, n_rows: int
) -> jax.Array:
    """out[indices_bk] += scale_bk rows_b, of the pairs that are this device's own.  -> [n_rows, D]"""

    def by_pairs(scale_BK: jax.Array, indices_BK: jax.Array, rows_BD: jax.Array) -> jax.Array:
        tokens_P = jax.lax.broadcasted_iota(jnp.int32, indices_BK.shape, 0).reshape(-1)
        rows = ordered(indices_BK.reshape(-1), n_rows, rows_BD.shape[1])
        return sums_on_cpu(scale_BK.reshape(-1), tokens_P, rows, rows_BD)

    def by_latent(scale_BK: jax.Array, indices_BK: jax.Array, rows_BD: jax.Array) -> jax.Array:
        return sum_by_latent(scale_BK, indices_BK, rows_BD, n_rows)

    # What is another device's goes past the end.
    indices_BK = jnp.asarray(indices_BK) if own_BK is None else jnp.where(own_BK, indices_BK, n_rows)
    arrays = jnp.asarray(scale_BK), indices_BK, jnp.asarray(rows_BD)
    return jax.lax.platform_dependent(*arrays, cpu=by_pairs, default=by_latent)
