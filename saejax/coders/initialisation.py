"""Initialisations of encoder and decoder by name.

An initialisation is (key, encoder shape [*in, F], decoder shape [F, *out], decoder norm) -> (W_enc, W_dec); a
latent's decoder row is all of [*out].
"""

import math
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from saejax.kernels.norms import unit_rows

Shape = tuple[int, ...]
Weights = tuple[jax.Array, jax.Array]


def random_rows(key: jax.Array, shape: Shape, norm: float) -> jax.Array:
    """Directions drawn evenly from the sphere, each of length `norm`."""
    return norm * unit_rows(jax.random.normal(key, shape, jnp.float32))


def transpose(key: jax.Array, encoder: Shape, decoder: Shape, norm: float) -> Weights:
    """Random decoder directions, and the encoder their transpose. (Gao et al. 2024; Anthropic, April 2024)"""
    W_dec = random_rows(key, decoder, norm)
    return jnp.moveaxis(W_dec, 0, -1), W_dec


def kaiming(key: jax.Array, encoder: Shape, decoder: Shape, norm: float) -> Weights:
    """He-uniform encoder, U(+-sqrt(6 / fan_in)); random decoder directions of their own. (Gemma Scope)"""
    key_enc, key_dec = jax.random.split(key)
    bound = math.sqrt(6 / math.prod(encoder[:-1]))
    return jax.random.uniform(key_enc, encoder, jnp.float32, -bound, bound), random_rows(key_dec, decoder, norm)


def uniform(key: jax.Array, encoder: Shape, decoder: Shape, norm: float) -> Weights:
    """Encoder U(+-1 / sqrt F), decoder U(+-1 / sqrt n) with n all that a row writes. (Anthropic, January 2025)"""
    key_enc, key_dec = jax.random.split(key)
    a, b = 1 / math.sqrt(encoder[-1]), 1 / math.sqrt(math.prod(decoder[1:]))
    return (
        jax.random.uniform(key_enc, encoder, jnp.float32, -a, a),
        jax.random.uniform(key_dec, decoder, jnp.float32, -b, b),
    )


def zero_decoder(key: jax.Array, encoder: Shape, decoder: Shape, norm: float) -> Weights:
    """Encoder U(+-1 / sqrt fan_in), decoder 0: a transcoder that begins at its bias. (sparsify)"""
    bound = 1 / math.sqrt(math.prod(encoder[:-1]))
    return jax.random.uniform(key, encoder, jnp.float32, -bound, bound), jnp.zeros(decoder, jnp.float32)


def reconstructing_scale(d_in: int, d_sae: int, k: int) -> float:
    """a = 1 / (1 + S / D): a times the transpose encodes so that the first reconstruction has the least squared error.

    Of unit rows, x of length sqrt(D) has pre-activations that are normal. The k largest of F have squares whose sum is
    S; their reconstruction has x.x_hat = S and |x_hat|^2 = S + S^2 / D, since rows that are chosen by x lean to x.
    (Where k are kept by absolute value, S is a little larger.)
    """
    normal = statistics.NormalDist()
    share = min(k / d_sae, 0.5)  # of the positive ones, no more than there are
    least = -normal.inv_cdf(share)
    squares = d_sae * (share + least * normal.pdf(least))
    return 1 / (1 + squares / d_in)


INITS: dict[str, Callable[[jax.Array, Shape, Shape, float], Weights]] = {
    "transpose": transpose,
    "kaiming": kaiming,
    "uniform": uniform,
    "zero_decoder": zero_decoder,
}
