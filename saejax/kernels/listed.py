"""The sparse products of a coder whose kept entries are one list for the batch, each token any number of them.

`selection.largest_listed` makes the list: a pair's row is its token, or b G + g where there are groups; pairs that are
not there have a row beyond the last. Over devices each has a list of the entries in its own block, with the rows and
latents of the whole; what crosses is a sum of [B, D], and the gradient of a weight stays where the weight is.

Shape letters: P pairs, B tokens, G groups, F latents, D width of all that is written, R of what one group writes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from saejax.kernels.groups import Groups
from saejax.kernels.pairs import PairRows, in_order, ordered, row_products, weighted_sums
from saejax.kernels.segments import sum_pairs
from saejax.kernels.shards import Shards, shards_of


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def decode_listed(
    values_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array, tables: Groups, n_tokens: int, per_token: int
) -> jax.Array:
    """out_r = sum over the pairs of row r of value W[latent]: [n_tokens per_token, D] where there is one table.

    A list's rows rise. With a table for each group (per_token is their number) out is [n_tokens, D], the sum over the
    groups, each at its columns.
    """
    shards = shards_of(n_tokens, tables[0].shape[0])

    def local(values_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array, tables: Groups) -> jax.Array:
        list_ = _Own(rows_P, latents_P, n_tokens, per_token, len(tables), tables[0].shape, shards)
        parts = [weighted_sums(values_P, list_.latents, list_.of_group(g), W_FR) for g, W_FR in enumerate(tables)]
        return shards.over_latents(tables.added_up(parts))

    return shards.run(local, "P P P FR", "BD")(values_P, rows_P, latents_P, tables)


def _listed_bwd(n_tokens: int, per_token: int, residuals: Any, g_RD: jax.Array) -> Any:
    values_P, rows_P, latents_P, tables = residuals
    shards = shards_of(n_tokens, tables[0].shape[0])

    def local(values_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array, tables: Groups, g_RD: jax.Array) -> Any:
        list_ = _Own(rows_P, latents_P, n_tokens, per_token, len(tables), tables[0].shape, shards)
        parts = tables.of(g_RD)
        of_values = row_products(list(zip(parts, tables, strict=True)), list_.by_row, list_.latents)
        of_tables = [weighted_sums(values_P, list_.sums, list_.of_latent(g), g_RR) for g, g_RR in enumerate(parts)]
        return of_values, jax.tree.map(shards.over_rows, Groups(tuple(of_tables), tables.starts))

    of_values, of_tables = shards.run(local, "P P P FR BD", "P FR")(values_P, rows_P, latents_P, tables, g_RD)
    return of_values, None, None, of_tables


decode_listed.defvjp(lambda *arguments: (decode_listed(*arguments), arguments[:4]), _listed_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def kept_listed(
    x_BGD: jax.Array, W_GFD: jax.Array, pre_BGF: jax.Array, rows_P: jax.Array, latents_P: jax.Array, n_tokens: int
) -> jax.Array:
    """pre at the pairs, [P], where pre = x_g W_g^T is already known; its gradient to W touches only kept rows.

    As `sparse.kept_pre_activations`: no gradient flows into pre, nor into x.
    """
    return entries_listed(pre_BGF, rows_P, latents_P)


def _kept_bwd(n_tokens: int, residuals: Any, g_P: jax.Array) -> Any:
    x_BGD, W_GFD, rows_P, latents_P = residuals
    n_groups, n_latents, _ = W_GFD.shape
    shards = shards_of(n_tokens, n_latents)

    def local(g_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array, x_BGD: jax.Array) -> jax.Array:
        x_RD = x_BGD.reshape(-1, x_BGD.shape[-1])
        table = n_latents // shards.n_along_latents, x_RD.shape[1]
        list_ = _Own(rows_P, latents_P, n_tokens, n_groups, n_groups, table, shards)
        grad_GFD = weighted_sums(g_P, list_.rows, list_.by_latent, x_RD).reshape(n_groups, -1, x_RD.shape[1])
        return shards.over_rows(grad_GFD)

    grad_GFD = shards.run(local, "P P P BGD", "GFD")(g_P, rows_P, latents_P, x_BGD.astype(g_P.dtype))
    return None, grad_GFD, None, None, None


# All but pre, and the number of tokens.
kept_listed.defvjp(lambda *given: (kept_listed(*given), (*given[:2], *given[3:5])), _kept_bwd)


def entries_listed(dense: jax.Array, rows_P: jax.Array, latents_P: jax.Array) -> jax.Array:
    """dense[row, latent] of [B, ..., F] at the pairs, [P]; 0 where there is none. No gradient."""
    shards, middle = shards_of(dense.shape[0], dense.shape[-1]), "G" * (dense.ndim - 2)
    per_token = dense.size // dense.shape[0] // dense.shape[-1]

    def local(dense: jax.Array, rows_P: jax.Array, latents_P: jax.Array) -> jax.Array:
        n_own, flat = dense.shape[0] * per_token, dense.reshape(-1, dense.shape[-1])
        rows_P = _own_rows(rows_P, n_own, shards, per_token)
        at_P = jnp.minimum(rows_P, n_own - 1) * flat.shape[1] + latents_P - shards.first_latent(flat.shape[1])
        return jnp.where(rows_P < n_own, flat.reshape(-1).at[at_P].get(mode="clip"), 0)

    return shards.run(local, f"B{middle}F P P", "P")(dense, rows_P, latents_P)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def of_latents_listed(vector_GF: jax.Array, rows_P: jax.Array, latents_P: jax.Array, n_tokens: int) -> jax.Array:
    """vector[group, latent] at the pairs: [G, F] -> [P]."""
    shards, n_groups = shards_of(n_tokens, vector_GF.shape[1]), vector_GF.shape[0]

    def local(vector_GF: jax.Array, rows_P: jax.Array, latents_P: jax.Array) -> jax.Array:
        at_P = latents_P - shards.first_latent(vector_GF.shape[1])
        return vector_GF[rows_P % n_groups, jnp.clip(at_P, 0, vector_GF.shape[1] - 1)]

    return shards.run(local, "GF P P", "P")(vector_GF, rows_P, latents_P)


def _of_latents_bwd(n_tokens: int, residuals: Any, g_P: jax.Array) -> Any:
    vector_GF, rows_P, latents_P = residuals
    return tally_listed(g_P, rows_P, latents_P, (n_tokens, *vector_GF.shape)), None, None


of_latents_listed.defvjp(lambda *arguments: (of_latents_listed(*arguments), arguments[:3]), _of_latents_bwd)


def tally_listed(weights_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """out[group, latent] += weight, [G, F], of pairs of an array of `shape` [B, G, F]."""
    n_tokens, n_groups, n_latents = shape
    shards = shards_of(n_tokens, n_latents)

    def local(weights_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array) -> jax.Array:
        n_own = n_latents // shards.n_along_latents
        n_rows = n_tokens * n_groups // shards.n_along_rows
        rows_P = _own_rows(rows_P, n_rows, shards, n_groups)
        at_P, there = latents_P - shards.first_latent(n_own), rows_P < n_rows
        key_P = jnp.where(there, rows_P % n_groups * n_own + at_P, n_groups * n_own)

        def add(weights_P: jax.Array, key_P: jax.Array) -> jax.Array:
            return jnp.zeros(n_groups * n_own, weights_P.dtype).at[key_P].add(weights_P, mode="drop")

        def by_latent(weights_P: jax.Array, key_P: jax.Array) -> jax.Array:
            ones_R1 = jnp.ones((n_rows, 1), weights_P.dtype)
            return sum_pairs(weights_P, key_P, rows_P, ones_R1, n_groups * n_own)[:, 0]

        if jnp.issubdtype(weights_P.dtype, jnp.floating):  # whole numbers have one sum in every order
            own = jax.lax.platform_dependent(weights_P, key_P, cpu=add, default=by_latent)
        else:
            own = add(weights_P, key_P)
        return shards.over_rows(own.reshape(n_groups, n_own))

    return shards.run(local, "P P P", "GF")(weights_P, rows_P, latents_P)


def spread_listed(values_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B, ..., F]: zeros, with the values at their pairs."""
    n_latents, shards, middle = shape[-1], shards_of(shape[0], shape[-1]), "G" * (len(shape) - 2)

    def local(values_P: jax.Array, rows_P: jax.Array, latents_P: jax.Array) -> jax.Array:
        own = (shape[0] // shards.n_along_rows, *shape[1:-1], n_latents // shards.n_along_latents)
        flat = jnp.zeros((own[0] * (len(shape) == 2 or shape[1]), own[-1]), values_P.dtype)
        rows_P = _own_rows(rows_P, flat.shape[0], shards, flat.shape[0] // own[0])
        at_P = latents_P - shards.first_latent(own[-1])
        return flat.at[rows_P, at_P].add(values_P, mode="drop", unique_indices=True).reshape(own)

    return shards.run(local, "P P P", f"B{middle}F")(values_P, rows_P, latents_P)


def _own_rows(rows_P: jax.Array, n_own: int, shards: Shards, per_token: int) -> jax.Array:
    """Rows of the whole as rows of this device's block; n_own for pairs that there are not."""
    own_P = rows_P - shards.first_row(n_own // per_token) * per_token
    return jnp.where((own_P >= 0) & (own_P < n_own), own_P, n_own)


class _Own:
    """A device's list, in the numbers of its own block: `table` is its own [F, D], `n_tokens` those of all devices."""

    def __init__(
        self,
        rows_P: jax.Array,
        latents_P: jax.Array,
        n_tokens: int,
        per_token: int,
        n_groups: int,
        table: tuple[int, ...],
        shards: Shards,
    ) -> None:
        n_own, (n_latents, width) = n_tokens // shards.n_along_rows * per_token, table
        self.n_groups, self.n_latents, self.n_sums = n_groups, n_latents, n_own // n_groups
        self.rows = _own_rows(rows_P, n_own, shards, per_token)
        self.there = self.rows < n_own
        self.latents = jnp.clip(latents_P - shards.first_latent(n_latents), 0, n_latents - 1)
        self.groups = self.rows % n_groups
        # Which sum a pair belongs to: its row, or its token where groups are added up.
        self.sums = jnp.minimum(self.rows // n_groups, self.n_sums)
        # A list comes in the order of its rows, which is that of its sums but where groups lie between them.
        arranged = in_order if n_groups == 1 else ordered
        self.by_row = arranged(self._key(self.sums, self.n_sums), n_groups * self.n_sums, width)
        self.by_latent = ordered(self._key(self.latents, n_latents), n_groups * n_latents, width)

    def of_group(self, group: int) -> PairRows:
        return self.by_row.part(group, self.n_sums)

    def of_latent(self, group: int) -> PairRows:
        """A group's latents, as rows of the transposed product."""
        return self.by_latent.part(group, self.n_latents)

    def _key(self, within_P: jax.Array, n: int) -> jax.Array:
        return jnp.where(self.there, self.groups * n + within_P, self.n_groups * n)
