"""Products with the kept entries of a batch as a list of pairs (row, latent), for a CPU's cores.

    weighted_sums:   out_r = sum over the pairs p of row r  of  weight_p table[source_p]
    row_products:    out_p = g[row_p] . W[latent_p]

A pair's row is whatever has a sum of its own: a token, or a token and a group, and for the gradient of a weight, which
is the same product with the list in another order, a latent. `ordered` puts a list in the order of its rows.

Rows are taken fullest first, a block of them at a time, and each block runs as many turns as its fullest row needs.
So that no block waits for the few latents that fire all the time, long rows are divided, and their parts added up. A
turn gathers eight rows of the table (sixteen where all rows are of one length) into one loop, which XLA runs on all
cores. With one row a turn the same sums took two to three times as long; scatters run on one core. Every row is
summed by itself in the order of the list, so that results depend neither on the number of cores nor on chance.

Where there is little to multiply (`few`), the plain references take no longer and compile in a tenth of the time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from saejax.kernels.segments import power_of_two, sum_pairs

_ROWS_AT_ONCE, _EVEN_AT_ONCE = 8, 16
# Entries of a block of sums: 256 kB, which stay in a core's cache.
_PAIRS_IN_BLOCK = 2**16
# Entries of a piece of products: 4 MB. Alone they took up to twice as long with half of that, 1.2 times with twice.
_PIECE, _TURN = 2**20, 128
# Pairs of a row that a block waits for.
_LONG = 64
# Numbers of the sums of longer rows that are held at once, 64 MB.
_HELD = 2**24
# Up to so many multiplications (pairs x width) a CPU takes the references. The products of a step of TopK took 2.9 ms
# by blocks and 1.8 ms by them at 2^18, 24 and 220 ms at 2^23, and compiled in 4.0 and 0.5 s. Tests of the blocks set 0.
FEW = 2**18


class PairRows(NamedTuple):
    """A list in the order of its rows: where each of its pairs stood, [P]; each row's first pair and how many, [R].

    `keys` are the rows of the pairs as the list stood, R for nobody's. Without `places` the list stands as it did, for
    the reference, which wants no order; the numbers of `start` and `sizes` mean nothing then.
    """

    places: jax.Array | None
    start: jax.Array
    sizes: jax.Array
    keys: jax.Array

    def part(self, i: int, n: int) -> "PairRows":
        keys = self.keys - i * n
        keys = jnp.where((keys >= 0) & (keys < n), keys, n)
        return PairRows(self.places, self.start[i * n : (i + 1) * n], self.sizes[i * n : (i + 1) * n], keys)


def few(n_pairs: int, width: int) -> bool:
    """True if a CPU takes the references for products of so many pairs with rows of this width."""
    return n_pairs * width <= FEW


def ordered(rows_P: jax.Array, n_rows: int, width: int) -> PairRows:
    """The order of a list by row, pairs of one row as they stood; rows from n_rows on are nobody's.

    `width` is that of the widest table: where there are `few` products, nothing is put in order.
    """
    n_pairs = rows_P.shape[0]
    keys_P = rows_P = jnp.minimum(rows_P, n_rows)
    if few(n_pairs, width):
        return _as_it_stands(keys_P, n_rows)
    places_P = jnp.arange(n_pairs, dtype=jnp.int32)
    if (n_rows + 1) * n_pairs <= 2**32:  # one number for both sorts several times as fast as two
        key = jnp.sort(rows_P.astype(jnp.uint32) * n_pairs + places_P.astype(jnp.uint32))
        rows_P, places_P = (key // n_pairs).astype(jnp.int32), (key % n_pairs).astype(jnp.int32)
    else:
        rows_P, places_P = jax.lax.sort((rows_P, places_P), num_keys=1, is_stable=True)
    return PairRows(places_P, *_bounds(rows_P, n_rows), keys_P)


def in_order(rows_P: jax.Array, n_rows: int, width: int) -> PairRows:
    """`ordered` of a list whose rows rise: nothing to sort."""
    if few(rows_P.shape[0], width):
        return _as_it_stands(rows_P, n_rows)
    return PairRows(jnp.arange(rows_P.shape[0], dtype=jnp.int32), *_bounds(rows_P, n_rows), rows_P)


def _as_it_stands(keys_P: jax.Array, n_rows: int) -> PairRows:
    nothing_R = jnp.zeros(n_rows, jnp.int32)
    return PairRows(None, nothing_R, nothing_R, keys_P)


def _bounds(rising_P: jax.Array, n_rows: int) -> tuple[jax.Array, jax.Array]:
    """(first pair, number of pairs) of each row."""
    bounds = jnp.searchsorted(rising_P, jnp.arange(n_rows + 1, dtype=jnp.int32)).astype(jnp.int32)
    return bounds[:-1], bounds[1:] - bounds[:-1]


def weighted_sums_reference(
    weights_P: jax.Array, sources_P: jax.Array, rows_P: jax.Array, table_ND: jax.Array, n_rows: int
) -> jax.Array:
    """out[rows_p] += weights_p table[sources_p]. -> [n_rows, D]"""
    out_RD = jnp.zeros((n_rows, table_ND.shape[1]), table_ND.dtype)
    return out_RD.at[rows_P].add(weights_P[:, None] * table_ND[sources_P], mode="drop")


def weighted_sums(weights_P: jax.Array, sources_P: jax.Array, rows: PairRows, table_ND: jax.Array) -> jax.Array:
    """out_r = sum_p weights_p table[sources_p] over the pairs of row r, which differ. -> [R, D], float32; no gradient.

    On a CPU by blocks of rows, or as the reference where there are few; elsewhere by `segments`.
    """

    def elsewhere(weights_P: jax.Array, sources_P: jax.Array, rows: PairRows, table_ND: jax.Array) -> jax.Array:
        return sum_pairs(weights_P, rows.keys, sources_P, table_ND, rows.start.shape[0])

    arrays = jnp.asarray(weights_P), jnp.asarray(sources_P), rows, jnp.asarray(table_ND)
    return jax.lax.platform_dependent(*arrays, cpu=sums_on_cpu, default=elsewhere)


def even_sums_on_cpu(weights_RK: jax.Array, sources_RK: jax.Array, table_ND: jax.Array) -> jax.Array:
    """`weighted_sums` on a CPU of rows that all have K pairs: out_r = sum_k weights_rk table[sources_rk]. -> [R, D]"""
    (n_rows, k), D = weights_RK.shape, table_ND.shape[1]
    size, n = min(n_rows, max(8, power_of_two(_PAIRS_IN_BLOCK / D))), min(k, _EVEN_AT_ONCE)
    zero = jnp.where(False, weights_RK[0, 0] + table_ND[0, 0], 0)

    def block(pairs: tuple[jax.Array, jax.Array]) -> jax.Array:
        def turn(t: jax.Array, sums_TD: jax.Array) -> jax.Array:
            weight_TU, source_TU = (jax.lax.dynamic_slice_in_dim(a, t * n, n, 1) for a in pairs)
            return _added(sums_TD, weight_TU, source_TU, table_ND)

        return jax.lax.fori_loop(0, pairs[0].shape[1] // n, turn, jnp.broadcast_to(zero, (size, D)))

    padded = [jnp.pad(a, ((0, -n_rows % size), (0, -k % n))) for a in (weights_RK, sources_RK)]
    blocks = [a.reshape(-1, size, a.shape[1]) for a in padded]
    return jax.lax.map(block, tuple(blocks)).reshape(-1, D)[:n_rows]


def _added(sums_TD: jax.Array, weight_TU: jax.Array, source_TU: jax.Array, table_ND: jax.Array) -> jax.Array:
    """sums_t + sum_u weight_tu table[source_tu], one row after another."""
    # Behind a barrier, or every entry of the sums would look for its weight and source again.
    weight_TU, source_TU = jax.lax.optimization_barrier((weight_TU, source_TU))
    for u in range(source_TU.shape[1]):
        sums_TD = sums_TD + weight_TU[:, u, None] * _gathered_rows(table_ND, source_TU[:, u])
    return sums_TD


def sums_on_cpu(weights_P: jax.Array, sources_P: jax.Array, rows: PairRows, table_ND: jax.Array) -> jax.Array:
    """`weighted_sums` on a CPU."""
    n_pairs = weights_P.shape[0]
    if rows.places is None:
        return weighted_sums_reference(weights_P, sources_P, rows.keys, table_ND, rows.start.shape[0])
    weights_P, sources_P = weights_P[rows.places], sources_P[rows.places]
    if n_pairs <= _LONG:
        return _in_blocks(weights_P, sources_P, rows.start, rows.sizes, table_ND)
    # A row that is longer than _LONG goes on in rows of its own, E at most, and adds what they come to.
    more_R = jnp.maximum(-(-rows.sizes // _LONG) - 1, 0)
    stop_R = jnp.cumsum(more_R)

    def further(number_E: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the rows that these go on, R beyond the last; what they come to)."""
        of_E = jnp.searchsorted(stop_R, number_E, side="right").astype(jnp.int32)
        done_E = _LONG * (1 + number_E - _filled(stop_R - more_R, of_E))
        size_E = jnp.clip(_filled(rows.sizes, of_E) - done_E, 0, _LONG)
        return of_E, _in_blocks(weights_P, sources_P, _filled(rows.start, of_E) + done_E, size_E, table_ND)

    most, held = n_pairs // _LONG, max(1, _HELD // table_ND.shape[1])
    sizes_R = jnp.minimum(rows.sizes, _LONG)
    if most <= held:
        _, long_ED = further(jnp.arange(most, dtype=jnp.int32))
        return _in_blocks(weights_P, sources_P, rows.start, sizes_R, table_ND, (long_ED, stop_R - more_R, more_R))

    def add(i: jax.Array, out_RD: jax.Array) -> jax.Array:
        of_E, long_ED = further(i * held + jnp.arange(held, dtype=jnp.int32))
        return out_RD.at[of_E].add(long_ED, mode="drop")

    out_RD = _in_blocks(weights_P, sources_P, rows.start, sizes_R, table_ND)
    return jax.lax.fori_loop(0, -(-stop_R[-1] // held), add, out_RD)


def _in_blocks(
    weights_P: jax.Array,
    sources_P: jax.Array,
    start_R: jax.Array,
    sizes_R: jax.Array,
    table_ND: jax.Array,
    also: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """out_r = sum_p weights_p table[sources_p] over sizes_r pairs from start_r on. -> [R, D]

    And `also` (sums [E, D], first, count [R]): as many of these sums from the first on; with them go the longest rows.
    """
    n_rows, D, n_pairs = start_R.shape[0], table_ND.shape[1], weights_P.shape[0]
    size = min(n_rows, max(8, power_of_two(_PAIRS_IN_BLOCK / D)))
    length_R, most = (sizes_R, n_pairs) if also is None else (sizes_R + also[2], _LONG + n_pairs // _LONG)
    order_R = jnp.pad(_fullest_first(length_R, most), (0, -n_rows % size), constant_values=n_rows)
    # Made of what is there, though it is 0: it then varies over devices, as what is carried must in other people's
    # shard_map, and XLA fills each sum where it lies. Of zeros that it knew it would make one array, and copy that.
    zero = jnp.minimum(start_R[0], 0).astype(table_ND.dtype)

    def block(i: jax.Array, out_RD: jax.Array) -> jax.Array:
        rows_T = jax.lax.dynamic_slice_in_dim(order_R, i * size, size)
        start_T, count_T = _filled(start_R, rows_T), _filled(sizes_R, rows_T)

        def turn(t: jax.Array, sums_TD: jax.Array) -> jax.Array:
            rank_TU = t * _ROWS_AT_ONCE + jnp.arange(_ROWS_AT_ONCE, dtype=jnp.int32)[None]
            at_TU = jnp.minimum(start_T[:, None] + rank_TU, n_pairs - 1)
            weight_TU = jnp.where(rank_TU < count_T[:, None], weights_P[at_TU], 0)
            return _added(sums_TD, weight_TU, sources_P[at_TU], table_ND)

        turns = -(-count_T.max() // _ROWS_AT_ONCE)
        sums_TD = jax.lax.fori_loop(0, turns, turn, jnp.broadcast_to(zero, (size, D)))
        if also is not None:
            long_ED, (first_T, more_T) = also[0], (_filled(a, rows_T) for a in also[1:])

            def add(t: jax.Array, sums_TD: jax.Array) -> jax.Array:
                return sums_TD + jnp.where((t < more_T)[:, None], _gathered_rows(long_ED, first_T + t), 0)

            sums_TD = jax.lax.fori_loop(0, more_T.max(), add, sums_TD)
        return out_RD.at[rows_T].set(sums_TD, mode="drop", unique_indices=True)

    blocks = -(-(sizes_R > 0).sum(dtype=jnp.int32) // size)
    return jax.lax.fori_loop(0, blocks, block, jnp.broadcast_to(zero, (n_rows, D)))


def _filled(of_R: jax.Array, rows: jax.Array) -> jax.Array:
    """of_R[rows], 0 for rows that there are not."""
    return of_R.at[rows].get(mode="fill", fill_value=0)


def row_products_reference(g_RD: jax.Array, rows_P: jax.Array, latents_P: jax.Array, W_FD: jax.Array) -> jax.Array:
    """out_p = g[rows_p] . W[latents_p]. -> [P]"""
    return (_gathered_rows(g_RD, rows_P) * _gathered_rows(W_FD, latents_P)).sum(-1)


def row_products(tables: Sequence[tuple[jax.Array, jax.Array]], rows: PairRows, latents_P: jax.Array) -> jax.Array:
    """out_p = g_t[r] . W_t[latent_p], of tables (g_t [R, D_t], W_t [F, D_t]), for pairs whose row is t R + r. -> [P]

    A CPU takes the pairs of one table after those of another, in the order of `rows`, and none twice.
    """
    widest = max(W_FD.shape[1] for _, W_FD in tables)

    def at_once(tables: Any, rows: PairRows, latents_P: jax.Array) -> jax.Array:
        n_rows, out_P = tables[0][0].shape[0], jnp.zeros_like(tables[0][0], shape=latents_P.shape)
        for table, (g_RD, W_FD) in enumerate(tables):
            own_P = row_products_reference(g_RD, rows.keys % n_rows, latents_P, W_FD)
            out_P = jnp.where(rows.keys // n_rows == table, own_P, out_P)
        return out_P

    def in_turn(tables: Any, rows: PairRows, latents_P: jax.Array) -> jax.Array:
        if len(tables) == 1:
            return products_on_cpu(tables, rows.keys, latents_P)
        own_P = products_on_cpu(tables, rows.keys[rows.places], latents_P[rows.places])
        return jnp.zeros_like(own_P).at[rows.places].set(own_P, unique_indices=True)

    if few(latents_P.shape[0], widest):
        return at_once(tables, rows, latents_P)
    # A GPU makes one kernel of a table's products.
    return jax.lax.platform_dependent(list(tables), rows, latents_P, cpu=in_turn, default=at_once)


def products_on_cpu(
    tables: Sequence[tuple[jax.Array, jax.Array]], rows_P: jax.Array, latents_P: jax.Array
) -> jax.Array:
    """`row_products` on a CPU, by pieces of the list; of each piece the tables that it has pairs of."""
    n_pairs, n_rows = rows_P.shape[0], tables[0][0].shape[0]
    size = min(n_pairs, power_of_two(_PIECE / max(W_FD.shape[1] for _, W_FD in tables)))
    rows_P = jnp.pad(rows_P, (0, -n_pairs % size), constant_values=len(tables) * n_rows)
    latents_P = jnp.pad(latents_P, (0, -n_pairs % size))

    def piece(at: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows_C, latents_C = at
        out_C = jnp.zeros_like(tables[0][0], shape=size)
        for table, (g_RD, W_FD) in enumerate(tables):
            own_C = rows_C // n_rows == table

            def product(g_RD: jax.Array = g_RD, W_FD: jax.Array = W_FD) -> jax.Array:
                # A product with ones: XLA's own sum of each row takes twice as long.
                products_CD = _gathered_rows(g_RD, rows_C % n_rows) * _gathered_rows(W_FD, latents_C)
                ones_D, products_CD = jnp.ones_like(W_FD[0]), jax.lax.optimization_barrier(products_CD)
                return jnp.matmul(products_CD, ones_D, precision=jax.lax.Precision.HIGHEST)

            out_C = jnp.where(own_C, jax.lax.cond(own_C.any(), product, lambda out_C=out_C: out_C), out_C)
        return out_C

    return jax.lax.map(piece, (rows_P.reshape(-1, size), latents_P.reshape(-1, size))).reshape(-1)[:n_pairs]


def turned(a: jax.Array) -> jax.Array:
    """The last two axes exchanged, [..., F, D] to [..., D, F]; on a CPU in a loop over blocks of F.

    Left to XLA there, every one of the optimizer's loops turns the gradient again, in strides: five times as slow in
    all. A GPU turns it in one kernel, and would start two for each block.
    """
    n_rows = a.shape[-2]
    if n_rows % _TURN:
        return jnp.swapaxes(a, -1, -2)

    def by_blocks(a: jax.Array) -> jax.Array:
        def turn(i: jax.Array, out: jax.Array) -> jax.Array:
            piece = jax.lax.dynamic_slice_in_dim(a, i * _TURN, _TURN, a.ndim - 2)
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.swapaxes(piece, -1, -2), i * _TURN, a.ndim - 1)

        # All of it is written. It is made of `a` so that XLA cannot make it, and hold it, before `a` is there.
        start = jnp.broadcast_to(a[..., :1, :1], jnp.swapaxes(a, -1, -2).shape)
        return jax.lax.fori_loop(0, n_rows // _TURN, turn, start)

    return jax.lax.platform_dependent(a, cpu=by_blocks, default=lambda a: jnp.swapaxes(a, -1, -2))


def _gathered_rows(table_ND: jax.Array, at: jax.Array) -> jax.Array:
    return table_ND.at[at].get(mode="clip")


def _fullest_first(count_R: jax.Array, most: int) -> jax.Array:
    """The rows' numbers, by falling count."""
    n_rows = count_R.shape[0]
    if (most + 1) * n_rows <= 2**32:
        key = (most - count_R).astype(jnp.uint32) * n_rows + jnp.arange(n_rows, dtype=jnp.uint32)
        return (jnp.sort(key) % n_rows).astype(jnp.int32)
    return jnp.argsort(-count_R, stable=True).astype(jnp.int32)
