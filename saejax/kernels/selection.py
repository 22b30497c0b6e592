"""The largest of many numbers, exactly: k of all of them, or k of each row; as a mask, or as a list.

The bits of a non-negative float32, read as an integer, are ordered as the float is. So the k-th largest is the
largest bit pattern that at least k numbers reach, found in 31 halvings; of few numbers on a GPU by four bits a turn.
Over devices (see `shards`) only counts travel; for the k largest of each row, each device's own k largest.

Lists are found in two rounds. The k largest numbers lie in the k groups of neighbours whose maxima are largest, among
equal maxima the first: each group before the last one that is taken has a number of its own that comes before that
one's. So k groups are found among the maxima, by halving, and then k numbers among the members of these groups. What is
halved is small, every pass is one loop that all cores share, and what is chosen goes to its place by its rank. On 2 CPU
cores XLA's own top_k (one core) takes twice as long at 6,144 latents and k 32, and five times at 24,576.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from saejax.kernels.shards import Shards, shards_of, shards_of_batch

_LANES, _DEPTH = 16, 32
# Numbers up to which starting kernels takes a GPU longer than reading them, by arithmetic for an H100.
_FEW = 1 << 22


def largest_mask(values: jax.Array, k: jax.Array | int) -> jax.Array:
    """bool: the k largest entries of a non-negative array [B, ..., F], over all of it; zeros are never chosen.

    Exactly k of them (or all that are positive, when fewer): among equal numbers at the border the first in
    row-major order win, however tokens and latents lie on devices. XLA may compute `values` again for the mask, so they
    must come out alike: give it no product and sum that one place could contract into one operation and another not.
    """
    rows = jnp.atleast_2d(values)
    shards = shards_of_batch(rows.shape[0], rows.shape[-1])
    layout = "B" + "G" * (rows.ndim - 2) + "F"
    mask = shards.run(lambda own, k: _mask(_sortable_bits(own), k, shards), f"{layout} -", layout)(rows, jnp.int32(k))
    return mask.reshape(jnp.shape(values))


def largest_of_rows(values: jax.Array, k: int, falling: bool = True) -> jax.Array:
    """int32 [B, ..., k]: indices of the k largest of [B, ..., F] along F; of equals at the border the lower are in.

    They come with falling values, among equals the lower first; or with rising indices, which is quicker.
    """
    shards = shards_of(values.shape[0], values.shape[-1])
    find = top_k if falling else quick_top_k

    def local(own: jax.Array) -> jax.Array:
        if shards.n_along_latents == 1:
            return find(own, k)[1]
        # What is among the k largest of all is among the k largest of its device. These are side by side in the order
        # of the latents, so that among equals the first place is the lowest index.
        best, at = find(own, min(k, own.shape[-1]))
        best, at = shards.beside(best), shards.beside(at + shards.first_latent(own.shape[-1]))
        at = jnp.take_along_axis(at, top_k(best, k)[1], axis=-1)
        return at if falling else jnp.sort(at, axis=-1)

    middle = "G" * (values.ndim - 2)
    return shards.run(local, f"B{middle}F", f"B{middle}K")(values)


def top_k(values: jax.Array, k: int) -> list[jax.Array]:
    """`jax.lax.top_k`, out of reach of what follows: XLA makes a sort of a top_k whose results are then sliced."""
    # A barrier for each: one around the pair makes the compiler of jax 0.10.2 abort.
    return [jax.lax.optimization_barrier(array) for array in jax.lax.top_k(values, k)]


def quick_top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The selection of `top_k`, in the order of the indices: two rounds of `_rows_mask` where they pay."""
    size = _group_size(values.shape[-1], k)
    if size == 1:
        best, at = top_k(values, k)
        # A device's candidates must come in the order of the latents where there are equals.
        at = jnp.sort(at, axis=-1)
        return jnp.take_along_axis(values, at, axis=-1), at
    rows = values.reshape(-1, values.shape[-1])
    grouped = _groups(rows, size, -jnp.inf)
    of_group = _set_places(_rows_mask(_sort_keys(grouped).max(-1), k), k)  # [R, k]
    members = jnp.take_along_axis(grouped, of_group[..., None], axis=1).reshape(len(rows), -1)
    within = _set_places(_rows_mask(_sort_keys(members), k), k)
    best = jnp.take_along_axis(members, within, axis=1)
    at = jnp.take_along_axis(of_group, within // size, axis=1) * size + within % size
    shape = (*values.shape[:-1], k)
    return best.reshape(shape), at.reshape(shape)


def largest_listed(values: jax.Array, k: jax.Array | int, most: int) -> tuple[jax.Array, jax.Array]:
    """(rows, latents), int32 [most] each: where the entries of `largest_mask(relu(values), k)` are, in row-major order.

    A row is a token, or a token and group: b G + g. k is at most `most`; what is left of the list has the row B G,
    which there is not. Over devices each has a list of its own entries, [n most] in all.
    """
    shards = shards_of_batch(values.shape[0], values.shape[-1])
    layout = "B" + "G" * (values.ndim - 2) + "F"

    def local(own: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _list_of_mask(own, k, min(most, own.size), shards)

    rows, latents = shards.run(local, f"{layout} -", "P P")(values, jnp.int32(k))
    return rows, latents


def _list_of_mask(own: jax.Array, k: jax.Array, most: int, shards: Shards) -> tuple[jax.Array, jax.Array]:
    """`largest_listed` of the whole from one device's block of it."""
    n_latents, n_rows = own.shape[-1], own.size // own.shape[-1]
    # Groups for as many numbers as a row keeps on average.
    size = _group_size(n_latents, max(1, most // n_rows))
    # Negative numbers have negative bits: they are below every other, and never chosen.
    grouped = _groups(own.reshape(n_rows, n_latents), size, 0.0)  # [R, F / size, size]
    maxima = _sortable_bits(grouped).max(-1).reshape(*own.shape[:-1], -1)
    # More groups than there are numbers to find cannot be needed on any device.
    of_group = _ranked(_mask(maxima, k, shards).reshape(-1), most)  # [most], of R F / size
    groups = grouped.reshape(-1, size)
    bits = _sortable_bits(groups.at[of_group].get(mode="fill", fill_value=0.0))  # [most, size]
    kth = jnp.maximum(_kth_largest(bits, k, shards), 1)  # zeros are never chosen
    chosen = bits >= kth

    def with_ties() -> jax.Array:
        """Some equal the k-th and are not among the k: the whole mask says which. One step in ten has such."""
        whole = _mask_from(_sortable_bits(own), kth, k, shards).reshape(n_rows, n_latents)
        whole = _groups(whole, size, False).reshape(-1, size)
        return chosen & whole.at[of_group].get(mode="fill", fill_value=False)

    chosen = jax.lax.cond(_reaches(chosen, k + 1, shards), with_ties, lambda: chosen)
    place = _ranked(chosen.reshape(-1), most)  # of most size; beyond it where there are fewer
    group = of_group.at[place // size].get(mode="fill", fill_value=0)
    per_row = grouped.shape[1]
    there = place < chosen.size
    row, nowhere = group // per_row, jnp.int32(n_rows)
    if shards.mesh:  # else rows are those of the program's own array
        row, nowhere = row + shards.first_row(own.shape[0]) * (n_rows // own.shape[0]), shards.over_rows(nowhere)
    latent = group % per_row * size + place % size + shards.first_latent(n_latents)
    return jnp.where(there, row, nowhere), jnp.where(there, latent, 0)


def _group_size(n: int, k: int) -> int:
    """Members of a group, so that the maxima of n and the members of k groups are few together; 1: no groups."""
    best = (n / k) ** 0.5
    return max((size for size in (4, 8, 16, 32, 64) if size <= 1.5 * best), default=1)


def _groups(rows: jax.Array, size: int, fill: float | bool) -> jax.Array:
    """[R, F] as [R, groups, size], the last group filled up."""
    missing = -rows.shape[1] % size
    if missing:
        rows = jnp.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
    return rows.reshape(rows.shape[0], -1, size)


def _rows_mask(key: jax.Array, k: int) -> jax.Array:
    """bool [R, N]: the k largest of each row of `_sort_keys`, exactly k; among equals at the border the first."""

    def halve(i: jax.Array, bits_so_far: jax.Array) -> jax.Array:
        candidate = bits_so_far | (jnp.uint32(1) << jnp.asarray(31 - i, jnp.uint32))
        return jnp.where(row_counts(key >= candidate[:, None]) >= k, candidate, bits_so_far)

    def by_halves() -> jax.Array:
        return jax.lax.fori_loop(0, 32, halve, jnp.zeros_like(key[:, 0]))

    def by_digits() -> jax.Array:
        return _by_digits(lambda c_RC: (key[:, None] >= c_RC[..., None]).sum(-1, dtype=jnp.int32) >= k, len(key))

    kth = _quicker(key.size, by_halves, by_digits)[:, None]
    reached = key >= kth

    def without_some() -> jax.Array:
        above, ties = key > kth, key == kth
        return above | (ties & (jnp.cumsum(ties, axis=1) <= k - above.sum(1, keepdims=True)))

    return jax.lax.cond((row_counts(reached) > k).any(), without_some, lambda: reached)


def row_counts(mask: jax.Array) -> jax.Array:
    """int32 [R]: the true entries of each row of [R, N]; by lanes first, as `_total`."""
    padded = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % _LANES)))
    return padded.reshape(mask.shape[0], -1, _LANES).sum(1, dtype=jnp.int32).sum(1)


def _set_places(mask: jax.Array, k: int) -> jax.Array:
    """int32 [R, k]: the columns of the k true entries of each row of [R, N], rising."""
    n_rows, n = mask.shape
    # The n-th of all true entries is entry n mod k of row n // k.
    return _ranked(mask.reshape(-1), n_rows * k).reshape(n_rows, k) % n


def _ranked(mask: jax.Array, most: int) -> jax.Array:
    """int32 [most]: the places of the true entries of [N], of which there are at most so many; N for what is left."""
    width = 128  # counts within a piece of so many are one product with a triangle, exact in float32
    padded = jnp.pad(mask, (0, -mask.size % width)).reshape(-1, width)
    triangle = jnp.triu(jnp.ones((width, width), jnp.float32))
    up_to = jnp.matmul(padded.astype(jnp.float32), triangle, precision=jax.lax.Precision.HIGHEST).astype(jnp.int32)
    before = jnp.cumsum(up_to[:, -1]) - up_to[:, -1]
    rank = (up_to + before[:, None]).reshape(-1)[: mask.size] - 1
    place = jnp.where(mask, rank, most)
    nowhere = jnp.full(most, mask.size, jnp.int32)
    return nowhere.at[place].set(jnp.arange(mask.size, dtype=jnp.int32), mode="drop", unique_indices=False)


def _sort_keys(values: jax.Array) -> jax.Array:
    """uint32, ordered as the values are, also among negative ones; 0 is below every number."""
    bits = _sortable_bits(values)
    return jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31))), jnp.uint32)


def _sortable_bits(values: jax.Array) -> jax.Array:
    """int32, ordered as the values are where these are not negative; a zero with a sign is negative.

    Bits are compared, and their maxima taken, not floats: a CPU takes numbers below the smallest normal one for 0.
    """
    return jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)


def _kth_largest(bits: jax.Array, k: jax.Array, shards: Shards) -> jax.Array:
    """The largest pattern that at least k entries reach; 0 where fewer than k are at least 0."""

    def halve(i: int, bits_so_far: jax.Array) -> jax.Array:
        candidate = bits_so_far | (jnp.int32(1) << (30 - i))
        return jnp.where(_reaches(bits >= candidate, k, shards), candidate, bits_so_far)

    def by_halves() -> jax.Array:
        return jax.lax.fori_loop(0, 31, halve, jnp.int32(0))

    def by_digits() -> jax.Array:
        own_1N = jnp.maximum(bits, 0).astype(jnp.uint32).reshape(1, -1)

        def reaches(c_1C: jax.Array) -> jax.Array:
            return _sum_reaches((own_1N[..., None] >= c_1C[:, None]).sum(1, dtype=jnp.uint32), k, shards.over_all)

        return _by_digits(reaches, 1)[0].astype(jnp.int32)

    return _quicker(bits.size, by_halves, by_digits)


def _quicker(size: int, by_halves: Callable[[], jax.Array], by_digits: Callable[[], jax.Array]) -> jax.Array:
    return jax.lax.platform_dependent(cpu=by_halves, default=by_digits if size <= _FEW else by_halves)


def _by_digits(reaches: Callable[[jax.Array], jax.Array], n_rows: int) -> jax.Array:
    """uint32 [n_rows]: the largest pattern that each row reaches, by four bits a turn.

    `reaches` says it of candidates [n_rows, 15]; it holds for 0 and, once it fails, for no larger pattern. A GPU starts
    kernels for every turn, and a train step of a small coder was bound by that: 4.1 ms with 31 turns on an H100. Here
    every number is read for each candidate, four times as often in all: of many numbers halving reads less.
    """

    def turn(i: int, known_R: jax.Array) -> jax.Array:
        shift = jnp.asarray(28 - 4 * i, jnp.uint32)
        c_RC = known_R[:, None] | (jnp.arange(1, 16, dtype=jnp.uint32)[None] << shift)
        return known_R | (reaches(c_RC).sum(-1, dtype=jnp.uint32) << shift)

    # In other people's shard_map what is carried must vary over devices from the start.
    return jax.lax.fori_loop(1, 8, turn, turn(0, jnp.zeros(n_rows, jnp.uint32)))


def _mask(bits: jax.Array, k: jax.Array, shards: Shards) -> jax.Array:
    """`largest_mask` of the whole from one device's block of it."""
    return _mask_from(bits, _kth_largest(bits, k, shards), k, shards)


def _mask_from(bits: jax.Array, kth: jax.Array, k: jax.Array, shards: Shards) -> jax.Array:
    above, ties = bits > kth, (bits == kth) & (bits > 0)
    room = k - shards.over_all(_total(above).astype(jnp.int32))  # fewer than k are above
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

    def halve(i: int, bits_so_far: jax.Array) -> jax.Array:
        candidate = bits_so_far | (jnp.int32(1) << (30 - i))
        return jnp.where((candidate > 0) & (candidate <= n) & fits(candidate), candidate, bits_so_far)

    return jax.lax.fori_loop(0, 31, halve, jnp.int32(0))


def _reaches(chosen: jax.Array, k: jax.Array, shards: Shards) -> jax.Array:
    """True if at least k entries are chosen, over all devices."""
    return _sum_reaches(_total(chosen), k, shards.over_all)


def _total(mask: jax.Array) -> jax.Array:
    """uint32: how many are true. By lanes first: a CPU then counts on all cores and stores no numbers."""
    if mask.size % (_LANES * _DEPTH):
        return mask.sum(dtype=jnp.uint32)
    # Few at a time: XLA makes something slower of a long sum.
    return mask.reshape(-1, _DEPTH, _LANES).sum(1, dtype=jnp.uint32).sum(dtype=jnp.uint32)


def _sum_reaches(own: jax.Array, k: jax.Array, over: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """True if the devices' counts add up to k >= 0. The sum may pass 2^32, so it travels as two halves."""
    halves = over(jnp.stack([own >> 16, own & 0xFFFF]))
    high, low = halves[0] + (halves[1] >> 16), halves[1] & 0xFFFF
    k = k.astype(jnp.uint32)
    return (high > k >> 16) | ((high == k >> 16) & (low >= k & 0xFFFF))
