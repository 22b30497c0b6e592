"""Dense products: a W, and with dense latents in groups out_b = sum_g values_bg rows_g.

Shape letters: B tokens, G groups, F latents, D width of all that is written, R of what one group writes.

Precision is said of every product, since what a device does unasked is not float32 everywhere: an NVIDIA card rounds
operands to TF32 (10 bits of mantissa), a TPU to bfloat16.
"""

import functools

import jax
import jax.numpy as jnp

from saejax.kernels.groups import Groups
from saejax.kernels.shards import shards_of

# Of float32 operands: float32 on every device.
EXACT = jax.lax.Precision.HIGHEST
# Of the gradients of a product with rounded operands, whose own operands are float32: float32 on a CPU, TF32 on an
# NVIDIA card, three passes of bfloat16 on a TPU.
_BACKWARD = jax.lax.Precision.HIGH
# Of `auto`, but on a CPU: 2,048 x 768 x 6,144 took 0.21 s there in bfloat16, 0.13 s in float32 (2 cores, AVX2).
_QUICK = "bfloat16"


def product(a_BN: jax.Array, W_NM: jax.Array, dtype: str) -> jax.Array:
    """a W, float32 [B, M]: operands rounded to `dtype`, sums in float32.

    `auto` rounds to bfloat16 where that is quicker, and not on a CPU. Gradients are those of the product without
    rounding, a^T g and g W^T, in float32: JAX's own would pass through the rounding of an operand, and come out
    rounded.
    """
    a_BN, W_NM = a_BN.astype(jnp.float32), W_NM.astype(jnp.float32)
    if dtype == "float32":
        return jnp.matmul(a_BN, W_NM, precision=EXACT)  # nothing is rounded, and JAX's gradients keep the precision
    return _rounded_to(a_BN, W_NM, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rounded_to(a_BN: jax.Array, W_NM: jax.Array, dtype: str) -> jax.Array:
    if dtype == "auto":
        return jax.lax.platform_dependent(
            a_BN,
            W_NM,
            cpu=functools.partial(jnp.matmul, precision=EXACT),
            default=lambda a, W: _rounded_to(a, W, _QUICK),
        )
    a_BN, W_NM = a_BN.astype(dtype), W_NM.astype(dtype)
    return jnp.matmul(a_BN, W_NM, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)


def _rounded_fwd(a_BN: jax.Array, W_NM: jax.Array, dtype: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rounded_to(a_BN, W_NM, dtype), (a_BN, W_NM)


def _rounded_bwd(dtype: str, residuals: tuple[jax.Array, jax.Array], g_BM: jax.Array) -> tuple[jax.Array, jax.Array]:
    a_BN, W_NM = residuals
    times = functools.partial(jnp.matmul, precision=_BACKWARD)
    return times(g_BM, W_NM.T), times(a_BN.T, g_BM)


_rounded_to.defvjp(_rounded_fwd, _rounded_bwd)


def computed_once(values: jax.Array, step: jax.Array) -> jax.Array:
    """The values, computed once and not again by some of those who read them. `step` is any number from 0 on.

    XLA's CPU backend drops barriers before it fuses operations, and then keeps what the values are made of as well, as
    large as they are. It keeps a loop that never turns, for it does not know that.
    """

    def behind_a_loop(values: jax.Array, step: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, (step < 0).astype(jnp.int32), lambda _, values: -values, values)

    return jax.lax.platform_dependent(
        values, jnp.asarray(step), cpu=behind_a_loop, default=lambda values, _: jax.lax.optimization_barrier(values)
    )


def decode_dense(values_BGF: jax.Array, rows: Groups, dtype: str) -> jax.Array:
    """out_b = sum_g values_bg rows_g at the group's columns, float32 [B, D], multiplied in `dtype`."""
    return rows.added_up([product(values_BGF[:, group], W_FR, dtype) for group, W_FR in enumerate(rows)])


def decode_dense_split(values_BGF: jax.Array, rows: Groups, dtype: str) -> jax.Array:
    """`decode_dense` of latents that may be split over devices: one sum of [B, D] over them, after that of the groups.

    Left to the compiler there is a sum over devices for each group. Latents that are not split are left to it: it need
    not have the rows of all groups at once where parameters are spread over "data".
    """
    if shards_of(values_BGF.shape[0], values_BGF.shape[-1]).n_along_latents == 1:
        return decode_dense(values_BGF, rows, dtype)
    return _decode_dense(values_BGF, rows, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _decode_dense(values_BGF: jax.Array, rows: Groups, dtype: str) -> jax.Array:
    shards = shards_of(values_BGF.shape[0], values_BGF.shape[-1])

    def local(values_BGF: jax.Array, rows: Groups) -> jax.Array:
        return shards.over_latents(decode_dense(values_BGF, rows, dtype))

    return shards.run(local, "BGF FR", "BD")(values_BGF, rows)


def _dense_fwd(values_BGF: jax.Array, rows: Groups, dtype: str) -> tuple[jax.Array, tuple[jax.Array, Groups]]:
    return _decode_dense(values_BGF, rows, dtype), (values_BGF, rows)


def _dense_bwd(dtype: str, residuals: tuple[jax.Array, Groups], g_BD: jax.Array) -> tuple[jax.Array, Groups]:
    values_BGF, rows = residuals
    shards = shards_of(values_BGF.shape[0], values_BGF.shape[-1])

    def local(values_BGF: jax.Array, rows: Groups, g_BD: jax.Array) -> tuple[jax.Array, Groups]:
        of_values, of_rows = jax.vjp(lambda v, r: decode_dense(v, r, dtype), values_BGF, rows)[1](g_BD)
        return of_values, jax.tree.map(shards.over_rows, of_rows)

    of_values, of_rows = shards.run(local, "BGF FR BD", "BGF FR")(values_BGF, rows, g_BD)
    return of_values, of_rows


_decode_dense.defvjp(_dense_fwd, _dense_bwd)
