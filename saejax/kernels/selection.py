"""The largest of many numbers, exactly: k of all of them, or k of each row; as a mask, or as a list.

The bits of a non-negative float32, read as an integer, are ordered as the float is. So the k-th largest is the
largest bit pattern that at least k numbers reach, found by two bits a turn; of few numbers on a GPU by four.
Over devices (see `shards`) only counts travel; for the k largest of each row, each device's own k largest.

Lists are found in two rounds. The k largest numbers lie in the k groups of neighbours whose maxima are largest, among
equal maxima the first: each group before the last one that is taken has a number of its own that comes before that
one's. So k groups are found among the maxima, and then k numbers among the members of these groups. What is searched is
small, every pass is one loop that all cores share, and what is chosen goes to its place by its rank.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from saejax.kernels.shards import Shards, shards_of, shards_of_batch

_LANES, _DEPTH = 32, 24
_SPAN, _BITS = 128, 16
_WORDS = np.eye(_SPAN // _BITS).repeat(_BITS, 0)
# [entries, 8 + 8 + 1]: an entry's bit in its word, 1 for each word after its own, 1.
_BIT, _LATER = 2.0 ** (np.arange(_SPAN)[:, None] % _BITS), np.triu(np.ones((_SPAN // _BITS, _SPAN // _BITS)), 1)
_OF_WORDS = np.hstack([_WORDS * _BIT, _WORDS @ _LATER, np.ones((_SPAN, 1))]).astype(np.float32)
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

    They come with falling values, among equals the lower first; or with rising indices.
    """
    shards = shards_of(values.shape[0], values.shape[-1])

    def local(own: jax.Array) -> jax.Array:
        # What is among the k largest of all is among the k largest of its device. These are side by side in the order
        # of the latents, so that among equals the first place is the lowest index.
        best, at = quick_top_k(own, min(k, own.shape[-1]))
        best, at = shards.beside(best), shards.beside(at + shards.first_latent(own.shape[-1]))
        if falling or best.shape[-1] > k:
            at = jnp.take_along_axis(at, top_k(best, k)[1], axis=-1)
            at = at if falling else jnp.sort(at, axis=-1)
        return at

    middle = "G" * (values.ndim - 2)
    return shards.run(local, f"B{middle}F", f"B{middle}K")(values)


def top_k(values: jax.Array, k: int) -> list[jax.Array]:
    """`jax.lax.top_k`, out of reach of what follows: XLA makes a sort of a top_k whose results are then sliced."""
    # A barrier for each: one around the pair makes the compiler of jax 0.10.2 abort.
    return [jax.lax.optimization_barrier(array) for array in jax.lax.top_k(values, k)]


def quick_top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The selection of `top_k`, in the order of the indices: in two rounds where they pay."""
    shape, size = (*values.shape[:-1], k), _group_size(values.shape[-1], k)
    grouped = _groups(values.reshape(-1, values.shape[-1]), size, -jnp.inf)
    at = _chosen_columns(_sort_keys(grouped).max(-1), k)  # [R, k], of groups
    best = jnp.take_along_axis(grouped, at[..., None], axis=1).reshape(len(grouped), -1)  # all their members
    if size > 1:
        within = _chosen_columns(_sort_keys(best), k)
        best = jnp.take_along_axis(best, within, axis=1)
        at = jnp.take_along_axis(at, within // size, axis=1) * size + within % size
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
    return max((size for size in (4, 8, 16, 32) if size <= 1.5 * best), default=1)


def _groups(rows: jax.Array, size: int, fill: float | bool) -> jax.Array:
    """[R, F] as [R, groups, size], the last group filled up."""
    missing = -rows.shape[1] % size
    if missing:
        rows = jnp.pad(rows, ((0, 0), (0, missing)), constant_values=fill)
    return rows.reshape(rows.shape[0], -1, size)


def _rows_mask(key: jax.Array, k: int) -> jax.Array:
    """bool [R, N]: the k largest of each row of `_sort_keys`, exactly k; among equals at the border the first."""
    kth = _kth(key, lambda n_RC: n_RC >= k)[:, None]
    reached = key >= kth

    def without_some() -> jax.Array:
        above, ties = key > kth, key == kth
        return above | (ties & (jnp.cumsum(ties, axis=1) <= k - above.sum(1, keepdims=True)))

    return jax.lax.cond((_row_counts(reached) > k).any(), without_some, lambda: reached)


def _row_counts(mask: jax.Array) -> jax.Array:
    """uint32 [R]: the true entries of each row of [R, N]. By lanes first: a CPU then counts on all cores."""
    return _by_lanes(mask).sum(2, dtype=jnp.uint32).reshape(mask.shape[0], -1).sum(1, dtype=jnp.uint32)


def _chosen_columns(key: jax.Array, k: int) -> jax.Array:
    """int32 [R, k]: the columns of the k largest of each row of [R, N], rising."""
    n_rows, n = key.shape
    # The n-th of all that are chosen is entry n mod k of row n // k.
    return _ranked(_rows_mask(key, k).reshape(-1), n_rows * k).reshape(n_rows, k) % n


def _ranked(mask: jax.Array, most: int) -> jax.Array:
    """int32 [most]: the places of the true entries of [N], of which there are at most so many; N for what is left.

    A scatter, which a CPU does on one core, puts down words of 16 entries, not entries.
    """
    padded = jnp.pad(mask, (0, -mask.size % _SPAN)).reshape(-1, _SPAN)
    # A piece's words, how many are true before each, and in all: one product, exact in float32.
    about = jnp.matmul(padded.astype(jnp.float32), _OF_WORDS, precision=jax.lax.Precision.HIGHEST).astype(jnp.int32)
    words, within, total = jnp.split(about, (_SPAN // _BITS, 2 * _SPAN // _BITS), axis=1)
    words, before = words.reshape(-1), (jnp.cumsum(total)[:, None] - total + within).reshape(-1)
    first = jnp.where(words > 0, before, most)
    number = jnp.arange(words.size, dtype=jnp.int32)
    of_word = jax.lax.cummax(jnp.zeros(most, jnp.int32).at[first].set(number, mode="drop"))
    rank = jnp.arange(most, dtype=jnp.int32)
    place = of_word * _BITS + _bit_of_rank(words[of_word], rank - before[of_word])
    return jnp.where(rank < total.sum(), place, mask.size)


def _bit_of_rank(words: jax.Array, rank: jax.Array) -> jax.Array:
    """int32: the place of each word's bit that has so many bits below it, by halving."""
    place = jnp.zeros_like(rank)
    for half in (8, 4, 2, 1):
        below = jax.lax.population_count(words >> place & (1 << half) - 1)
        rank, place = jnp.where(rank >= below, rank - below, rank), jnp.where(rank >= below, place + half, place)
    return place


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
    """The largest pattern that at least k entries reach; 0 where fewer than k are at least 0, 2^31 - 1 for k 0."""
    own_1N = jnp.maximum(bits, 0).astype(jnp.uint32).reshape(1, -1)
    kth_1 = _kth(own_1N, lambda n_1C: _sum_reaches(n_1C, k, shards.over_all))
    return jnp.minimum(kth_1[0], 2**31 - 1).astype(jnp.int32)


def _kth(key_RN: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """uint32 [R]: the largest pattern that enough numbers of a row reach, found by two bits a turn.

    `enough` says of counts [R, C] whether they are; it holds at 0 and, once it fails, for no larger pattern. A GPU
    starts kernels for every turn, and a train step of a small coder was bound by that: 4.1 ms with 31 turns on an H100.
    There few numbers are found by four bits a turn, and every number is read for each of 15 candidates.
    """
    n_rows = key_RN.shape[0]

    def by_two() -> jax.Array:
        blocks = _by_lanes(key_RN)
        return _by_digits(lambda c_R3: enough(_counts_of_three(blocks, c_R3)), n_rows, 2)

    def by_four() -> jax.Array:
        def counts(c_RC: jax.Array) -> jax.Array:
            return (key_RN[:, None] >= c_RC[..., None]).sum(-1, dtype=jnp.uint32)

        return _by_digits(lambda c_RC: enough(counts(c_RC)), n_rows, 4)

    return jax.lax.platform_dependent(cpu=by_two, default=by_four if key_RN.size <= _FEW else by_two)


def _by_digits(reached: Callable[[jax.Array], jax.Array], n_rows: int, n_bits: int) -> jax.Array:
    """uint32 [n_rows]: the largest pattern that is `reached`, which says it of candidates [n_rows, 2^n_bits - 1]."""

    def turn(i: int, known_R: jax.Array) -> jax.Array:
        shift = jnp.asarray(32 - n_bits * (i + 1), jnp.uint32)
        c_RC = known_R[:, None] | (jnp.arange(1, 2**n_bits, dtype=jnp.uint32)[None] << shift)
        return known_R | (reached(c_RC).sum(-1, dtype=jnp.uint32) << shift)

    # In other people's shard_map what is carried must vary over devices from the start.
    return jax.lax.fori_loop(1, 32 // n_bits, turn, turn(0, jnp.zeros(n_rows, jnp.uint32)))


def _by_lanes(of_RN: jax.Array) -> jax.Array:
    """[R, C, depth, lanes] of [R, N], and 0: XLA makes a CPU's fast code of a sum over a depth, unless that is long."""
    n_rows, n = of_RN.shape
    n_blocks = -(-n // (_LANES * _DEPTH))
    depth = -(-n // (_LANES * n_blocks))
    return jnp.pad(of_RN, ((0, 0), (0, n_blocks * depth * _LANES - n))).reshape(n_rows, n_blocks, depth, _LANES)


def _counts_of_three(blocks_RCDL: jax.Array, c_R3: jax.Array) -> jax.Array:
    """uint32 [R, 3]: how many numbers of a row reach each of three rising candidates above 0, read once.

    The three counts over the depth have ten bits each of one number.
    """
    one, two, three = (c_R3[:, c, None, None, None] for c in range(3))
    counted = jnp.where(blocks_RCDL >= two, jnp.where(blocks_RCDL >= three, 0x100401, 0x401), blocks_RCDL >= one)
    sums_RN = counted.astype(jnp.uint32).sum(2, dtype=jnp.uint32).reshape(blocks_RCDL.shape[0], -1)
    return jnp.stack([(sums_RN >> 10 * c & 0x3FF).sum(1, dtype=jnp.uint32) for c in range(3)], axis=1)


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
    """uint32: how many are true."""
    return _row_counts(mask.reshape(1, -1))[0]


def _sum_reaches(own: jax.Array, k: jax.Array, over: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """True if the devices' counts add up to k >= 0. The sum may pass 2^32, so it travels as two halves."""
    halves = over(jnp.stack([own >> 16, own & 0xFFFF]))
    high, low = halves[0] + (halves[1] >> 16), halves[1] & 0xFFFF
    k = k.astype(jnp.uint32)
    return (high > k >> 16) | ((high == k >> 16) & (low >= k & 0xFFFF))
