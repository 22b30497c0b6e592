"""Sums of x and x^2 from which a variance follows, however far the mean is from 0.

    on the device   a = the mean of a block, as float32 has it;   s = sum (x - a),   q = sum (x - a)^2
    on the host     sum x = s + n a,   sum x^2 = q + 2 a s + n a^2,   in float64

Both are exact for any a, so that a need not be the mean to the last bit. In float32, sums of x^2 about 0 lose the
variance where the mean is some thousand times the deviation: of activations with a bias of 30,000 nothing is left.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.kernels.dense import EXACT


def centred_sums(x_BD: jax.Array, keep_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(a, s, q), float32 [D] each, over the rows to keep; those of no row are 0. Pure."""
    w_B = keep_B.astype(jnp.float32)

    def over(values_BD: jax.Array) -> jax.Array:
        return jnp.matmul(w_B, values_BD, precision=EXACT)

    at_D = over(jnp.where(keep_B[:, None], x_BD, 0)) / jnp.maximum(w_B.sum(), 1)
    away_BD = jnp.where(keep_B[:, None], x_BD - at_D[None], 0)
    return at_D, over(away_BD), over(jnp.square(away_BD))


def joined(n_K: jax.Array, at_KD: jax.Array, s_KD: jax.Array, q_KD: jax.Array) -> tuple[jax.Array, ...]:
    """(a, s, q) of K blocks together, about the mean of their origins. Pure, float32: only differences are squared."""
    at_D = jnp.matmul(n_K, at_KD, precision=EXACT) / jnp.maximum(n_K.sum(), 1)
    n_K1 = n_K[:, None]
    away_KD = jnp.where(n_K1 > 0, at_KD - at_D[None], 0)
    s_D = (s_KD + n_K1 * away_KD).sum(0)
    return at_D, s_D, (q_KD + 2 * away_KD * s_KD + n_K1 * jnp.square(away_KD)).sum(0)


def about_zero(n: Any, at_D: Any, s_D: Any, q_D: Any) -> tuple[np.ndarray, np.ndarray]:
    """(sum x, sum x^2), float64: sums that can be added up."""
    n, at_D, s_D, q_D = (np.asarray(part, np.float64) for part in (n, at_D, s_D, q_D))
    n = n[..., None]
    return s_D + n * at_D, q_D + 2 * at_D * s_D + n * np.square(at_D)


def variance(n: np.ndarray, sum_D: np.ndarray, square_D: np.ndarray) -> np.ndarray:
    """[..., D] from float64 sums about 0 and n [...]; not negative."""
    n = n[..., None]
    return np.maximum(square_D / n - np.square(sum_D / n), 0)
