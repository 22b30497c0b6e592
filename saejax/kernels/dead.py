"""Reconstruction from dead latents: the k largest of each token, in time and memory that follow their number.

A device's dead latents are taken in blocks of C, as dense products, in loops with as many turns as there are blocks:
none where none is dead. Which are a token's k largest matters only where it has more than k that are positive. It is
then found by halving, as in `selection`, but row by row. Over devices travel counts [B, G] and one sum of [B, R]; the
gradient of a weight stays where the weight is, summed over the devices that hold other tokens, once.

Shape letters: B tokens, G groups, F latents, C latents of a block, P of all blocks, N width read, R width written.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from saejax.kernels.batch import greatest_of_batch, over_tokens
from saejax.kernels.dense import product
from saejax.kernels.groups import Groups
from saejax.kernels.shards import Shards, shards_of

# Turns of a loop over all latents, where there are enough. A block that is filled up with nothing then costs at most a
# twelfth of the encoder's product; on 2 CPU cores products of 128 columns run at the rate of wide ones.
TURNS, LEAST_BLOCK = 48, 128
_TOKENS_A_TURN, _WIDE = 8, 2**14

# [B, F] of each group. As one array [B, G, F] XLA makes a copy of it, dead latents or not.
Pre = tuple[jax.Array, ...]


def decode_largest_reference(pre_BGF: jax.Array, dead_GF: jax.Array, rows: Groups, k: int) -> jax.Array:
    """`decode_largest`, by sorting; differentiable in `pre_BGF` and `rows`."""
    score_BGF = jnp.where(dead_GF[None], pre_BGF, -jnp.inf)
    rank_BGF = jnp.argsort(jnp.argsort(-score_BGF, axis=-1, stable=True), axis=-1)
    f_BGF = jnp.where((rank_BGF < k) & dead_GF[None], jax.nn.relu(pre_BGF), 0)
    return rows.added_up([f_BGF[:, group] @ W_FR for group, W_FR in enumerate(rows)])


def greatest_token(pre: jax.Array) -> jax.Array:
    """max_b pre[b] over all tokens of the batch, [B, ..., F] -> [..., F]; no gradient.

    Of wide arrays on a CPU by eight tokens a turn: XLA's own maximum of [2048, 49152] takes 211 ms there, this 20.
    """

    def in_turns(own: jax.Array) -> jax.Array:
        n = math.gcd(len(own), _TOKENS_A_TURN)

        def turn(i: jax.Array, greatest: jax.Array) -> jax.Array:
            return functools.reduce(jnp.maximum, [*jax.lax.dynamic_slice_in_dim(own, i * n, n)], greatest)

        return jax.lax.fori_loop(0, len(own) // n, turn, own[0])[None]

    def local(own: jax.Array) -> jax.Array:
        at_once = functools.partial(jnp.max, axis=0, keepdims=True)
        return jax.lax.platform_dependent(own, cpu=in_turns if own[0].size > _WIDE else at_once, default=at_once)

    layout = "B" + "G" * (pre.ndim - 2) + "F"
    return greatest_of_batch(shards_of(len(pre), pre.shape[-1]).run(local, layout, layout)(pre).max(0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def decode_largest(
    x_BGN: jax.Array,
    W_GFN: jax.Array,
    b_GF: jax.Array,
    pre: Pre,
    dead_GF: jax.Array,
    rows: Groups,
    k: int,
    dtype: str,
    block: int | None = None,
) -> jax.Array:
    """out_b = sum_g relu(p) rows_g over the k largest p of pre_g,b among the dead of group g, float32 [B, R].

    Among equal pre-activations the lower latents win. Each group adds at its columns. Operands are rounded to `dtype`,
    as in `dense.product`.

    pre = x W + b is known already: `pre`, [B, F] of each group, serves the values alone, x, W and b the gradient, which
    goes to W, b and `rows`, and to none of x and pre. `block` is C, for tests.
    """
    return _dead_fwd(x_BGN, W_GFN, b_GF, pre, dead_GF, rows, k, dtype, block)[0]


# Of each token and group: the bits of the least pre-activation that is chosen, and the latent from which on those
# that equal it are not.
Cut = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Dead:
    """A group's dead latents on this device, in rising order, in blocks.

    Attributes:
        pre_BF: pre-activations of all latents.
        at_P: places of the dead among them; F after the last.
        n: how many there are.
        block: C.
    """

    pre_BF: jax.Array
    at_P: jax.Array
    n: jax.Array
    block: int

    @classmethod
    def of(cls, pre_BF: jax.Array, dead_F: jax.Array, block: int | None) -> "_Dead":
        n_latents = dead_F.shape[0]
        block = _block_of(n_latents, block)
        (at_P,) = jnp.nonzero(dead_F, size=-(-n_latents // block) * block, fill_value=n_latents)
        return cls(pre_BF, at_P, dead_F.sum(dtype=jnp.int32), block)

    @property
    def n_blocks(self) -> jax.Array:
        return _largest_dead(-(-self.n // self.block))

    def at(self, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(self.at_P, (i * self.block,), (self.block,))

    def pre(self, i: jax.Array) -> jax.Array:
        """Pre-activations of block i, [B, C]; 0 after the last."""
        at_1C = self.at(i)[None]
        # As entries of rows: of whole columns XLA's CPU compiler makes [C, B] first, which takes three times as long.
        pre_BC = jnp.take_along_axis(
            self.pre_BF, jnp.broadcast_to(at_1C, (self.pre_BF.shape[0], self.block)), axis=1, mode="clip"
        )
        return jnp.where(at_1C < self.pre_BF.shape[1], pre_BC, 0)

    def of_rows(self, W_FR: jax.Array, i: jax.Array) -> jax.Array:
        return W_FR.at[self.at(i)].get(mode="clip")

    def chosen(
        self, i: jax.Array, pre_BC: jax.Array, cut: Cut, group: int, shards: Shards
    ) -> tuple[jax.Array, jax.Array]:
        """(f, whether it is among the k largest) of block i, [B, C]."""
        latent_C = self.at(i) + shards.first_latent(self.pre_BF.shape[1])
        chosen_BC = _chosen_dead(_ordered_bits(pre_BC), latent_C, cut[0][:, group], cut[1][:, group])
        return jnp.where(chosen_BC, pre_BC, 0), chosen_BC

    def bits(self) -> jax.Array:
        start = jnp.zeros((self.at_P.shape[0] // self.block, self.pre_BF.shape[0], self.block), jnp.int32)
        return jax.lax.fori_loop(0, self.n_blocks, lambda i, bits: bits.at[i].set(_ordered_bits(self.pre(i))), start)


def _block_of(n_latents: int, block: int | None) -> int:
    return min(block or max(LEAST_BLOCK, n_latents // TURNS // LEAST_BLOCK * LEAST_BLOCK), n_latents)


def _ordered_bits(pre: jax.Array) -> jax.Array:
    """int32, ordered as the positive pre-activations are, above 0; of the others negative or 0."""
    return jax.lax.bitcast_convert_type(pre, jnp.int32)


def _chosen_dead(bits_BC: jax.Array, latent_C: jax.Array, least_B: jax.Array, stop_B: jax.Array) -> jax.Array:
    tie_BC = (bits_BC == least_B[:, None]) & (latent_C[None] < stop_B[:, None])
    return (bits_BC > 0) & ((bits_BC > least_B[:, None]) | tie_BC)


def _dead_fwd(*arguments: Any) -> tuple[jax.Array, Any]:
    """For the way back: cut, and some [rows of devices, G, F], the dead that are above 0 for a token of these."""
    x_BGN, _, _, pre, dead_GF, rows, k, dtype, block = arguments
    shards = shards_of(*pre[0].shape)

    def local(pre: Pre, dead_GF: jax.Array, rows: Groups) -> Any:
        # Nothing comes of the others. To look costs a reading of all pre-activations: it waits for a second block.
        many = _largest_dead(dead_GF.sum(-1).max() > _block_of(dead_GF.shape[-1], block))
        some_GF = jax.lax.cond(
            many, lambda: dead_GF & jnp.stack([(pre_BF > 0).any(0) for pre_BF in pre]), lambda: dead_GF
        )
        groups = [_Dead.of(pre[g], some_GF[g], block) for g in range(len(rows))]
        n_G = shards.over_latents(jnp.stack([dead.n for dead in groups]))

        def all_of_them() -> tuple[jax.Array, Cut]:
            """Everything that is above 0: the cut is below it."""
            shape = (pre[0].shape[0], len(rows))
            cut = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32)
            return _decode_dead(groups, [dead.pre for dead in groups], cut, rows, dtype, shards), cut

        def some_of_them() -> tuple[jax.Array, Cut]:
            # Gathering a number takes as long as counting it ten times: it is done once.
            bits = [dead.bits() for dead in groups]
            cut = _find_cut(groups, bits, k, pre[0].shape[1] * shards.n_along_latents, shards)
            pre_of = [lambda i, each=each: jax.lax.bitcast_convert_type(each[i], jnp.float32) for each in bits]
            return _decode_dead(groups, pre_of, cut, rows, dtype, shards), cut

        out_BR, cut = jax.lax.cond(_anywhere(n_G > k, shards), some_of_them, all_of_them)
        # Without dead latents it is 0 everywhere, and nothing is sent.
        out_BR = jax.lax.cond(_anywhere(some_GF, shards), shards.over_latents, lambda out: out, out_BR)
        return out_BR, cut, some_GF[None]

    out_BR, cut, some = shards.run(local, "BF GF FR", "BR BG BGF")(pre, dead_GF, rows)
    return out_BR, (x_BGN, pre, rows, cut, some)


def _decode_dead(
    groups: list[_Dead],
    pre: Sequence[Callable[[jax.Array], jax.Array]],
    cut: Cut,
    rows: Groups,
    dtype: str,
    shards: Shards,
) -> jax.Array:
    """Of this device's latents alone, [B, R]; a group's pre(block) is [B, C]."""
    out_BR = jnp.zeros((cut[0].shape[0], rows.width), jnp.float32)
    for group, (dead, at) in enumerate(zip(groups, rows.columns, strict=True)):

        def add(i: jax.Array, out_BR: jax.Array, group: int = group, dead: _Dead = dead, at: slice = at) -> Any:
            f_BC, _ = dead.chosen(i, pre[group](i), cut, group, shards)
            return out_BR.at[:, at].add(product(f_BC, dead.of_rows(rows[group], i), dtype))

        out_BR = jax.lax.fori_loop(0, dead.n_blocks, add, out_BR)
    return out_BR


def _dead_bwd(k: int, dtype: str, block: int | None, residuals: Any, g_BR: jax.Array) -> Any:
    """The gradients of W, b and rows."""
    shards = shards_of(*residuals[1][0].shape)

    def local(x_BGN: jax.Array, pre: Pre, rows: Groups, cut: Cut, some: jax.Array, g_BR: jax.Array) -> Any:
        def of_group(group: int) -> list[jax.Array]:
            """[F, N], [F] and [F, R], of this device's tokens alone."""
            W_FR, (n_latents, R) = rows[group], rows[group].shape
            dead = _Dead.of(pre[group], some[0, group], block)
            g_own, x_BN = g_BR[:, rows.columns[group]], x_BGN[:, group]

            def put(i: jax.Array, gradients: list[jax.Array]) -> list[jax.Array]:
                """With those of the latents of block i."""
                f_BC, chosen_BC = dead.chosen(i, dead.pre(i), cut, group, shards)
                decode = functools.partial(product, dtype=dtype)
                of_f_BC, of_rows_CR = jax.vjp(decode, f_BC, dead.of_rows(W_FR, i))[1](g_own)
                of_pre_BC = jnp.where(chosen_BC, of_f_BC, 0)
                # Of a product the gradient by one operand needs the other alone.
                any_NC = jnp.zeros((x_BN.shape[1], dead.block), jnp.float32)
                (of_W_NC,) = jax.vjp(lambda W_NC: product(x_BN, W_NC, dtype), any_NC)[1](of_pre_BC)
                parts, at_C = (of_W_NC.T, over_tokens(of_pre_BC), of_rows_CR), dead.at(i)
                return [
                    whole.at[at_C].set(part, mode="drop", unique_indices=True)
                    for whole, part in zip(gradients, parts, strict=True)
                ]

            start = [jnp.zeros((n_latents, *width), jnp.float32) for width in ((x_BN.shape[1],), (), (R,))]
            return jax.lax.fori_loop(0, dead.n_blocks, put, start)

        def of_some() -> tuple[jax.Array, jax.Array, Groups]:
            of_W, of_b, of_rows = zip(*map(of_group, range(len(rows))), strict=True)
            own = jnp.stack(of_W), jnp.stack(of_b), Groups(of_rows, rows.starts)
            return jax.tree.map(shards.over_rows, own)

        # Most steps have no dead latent: then nothing is sent.
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(of_some))
        return jax.lax.cond(_anywhere(some, shards), of_some, lambda: none)

    of_W, of_b, of_rows = shards.run(local, "BGN BF FR BG BGF BR", "GFN GF FR")(*residuals, g_BR)
    return None, of_W, of_b, None, None, of_rows


decode_largest.defvjp(_dead_fwd, _dead_bwd)


def _find_cut(dead: list[_Dead], bits: list[jax.Array], k: int, n_latents: int, shards: Shards) -> Cut:
    """The smallest of each token's k largest; below all that is above 0 where there are no more than k such."""

    def reach(least_BG: jax.Array) -> jax.Array:
        return _count(dead, shards, lambda g, i: bits[g][i] >= least_BG[:, g, None])

    def before(stop_BG: jax.Array) -> jax.Array:
        def chosen(g: int, i: jax.Array) -> jax.Array:
            latent_C = dead[g].at(i) + shards.first_latent(dead[g].pre_BF.shape[1])
            return _chosen_dead(bits[g][i], latent_C, least_BG[:, g], stop_BG[:, g])

        return _count(dead, shards, chosen)

    def largest(fits: Callable[[jax.Array], jax.Array], n_bits: int, any_above: jax.Array, known_BG: jax.Array) -> Any:
        def halve(i: jax.Array, known_BG: jax.Array) -> jax.Array:
            candidate_BG = known_BG | (jnp.int32(1) << (n_bits - 1 - i))
            return jnp.where(fits(candidate_BG), candidate_BG, known_BG)

        return jax.lax.fori_loop(0, jnp.where(any_above, n_bits, 0), halve, known_BG)

    none_BG = jnp.zeros((dead[0].pre_BF.shape[0], len(dead)), jnp.int32)
    many = _anywhere(reach(none_BG + 1) > k, shards)
    least_BG = largest(lambda least_BG: reach(least_BG) >= k, 31, many, none_BG)
    ties = _anywhere(reach(jnp.maximum(least_BG, 1)) > k, shards)
    start_BG = jnp.where(ties, none_BG, n_latents)
    return least_BG, largest(lambda stop_BG: before(stop_BG) <= k, n_latents.bit_length(), ties, start_BG)


def _count(dead: list[_Dead], shards: Shards, chosen: Callable[[int, jax.Array], jax.Array]) -> jax.Array:
    """int32 [B, G]: how many of a token's dead latents, on all devices, are chosen(group, block) [B, C]."""
    counts = []
    for g, group in enumerate(dead):
        n_tokens, lanes = group.pre_BF.shape[0], math.gcd(group.block, 16)

        def add(i: jax.Array, n_BL: jax.Array, g: int = g, lanes: int = lanes) -> jax.Array:
            # By lanes: XLA's CPU compiler fuses this, three times as fast as a sum over C.
            return n_BL + chosen(g, i).reshape(n_BL.shape[0], -1, lanes).sum(1, dtype=jnp.int32)

        counts.append(jax.lax.fori_loop(0, group.n_blocks, add, jnp.zeros((n_tokens, lanes), jnp.int32)).sum(1))
    return shards.over_latents(jnp.stack(counts, axis=1))


def _anywhere(flags: jax.Array, shards: Shards) -> jax.Array:
    """True if any is set, on any device, for any member of a vmap: so all go the same way."""
    return _largest_dead(shards.over_all(flags.any().astype(jnp.int32))) > 0


@custom_vmap
def _largest_dead(value: jax.Array) -> jax.Array:
    """The value; under vmap the largest of all members', so that their loops and branches are one for all."""
    return value


@_largest_dead.def_vmap
def _largest_of_members(axis_size: int, in_batched: Any, value: jax.Array) -> tuple[jax.Array, bool]:
    return (value.max(0) if in_batched[0] else value), False
