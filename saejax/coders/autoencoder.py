"""Topology: autoencoder.  x [B, D] -> latents [B, F] -> x_hat [B, D].

pre   = (x - b_dec) W_enc + b_enc
x_hat = f W_dec + b_dec
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.dictionary import Dictionary
from saejax.kernels.dense import EXACT

Params = dict[str, Any]


class Autoencoder(Dictionary):
    """Reads and writes one hook point; the encoder sees x - b_dec."""

    tied: ClassVar[bool] = True

    @nn.nowrap
    def encoder_input(self, params: Params, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) - jax.lax.stop_gradient(params["b_dec"])[None]

    @nn.nowrap
    def encoder_bias(self, params: Params) -> jax.Array:
        """b_enc, plus a zero that carries the gradient of -b_dec W_enc to b_dec.

        Through the centred input that gradient would cost a product [B, F] x [F, D]; here it is one [F] x [F, D].
        """
        b_dec = params["b_dec"]
        zero_D = b_dec - jax.lax.stop_gradient(b_dec)
        return params["b_enc"] - jnp.matmul(zero_D, jax.lax.stop_gradient(params["W_enc"]), precision=EXACT)
