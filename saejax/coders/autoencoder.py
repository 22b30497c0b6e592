"""Topology: autoencoder.  x [B, D] -> latents [B, F] -> x_hat [B, D].

pre   = (x - b_dec) W_enc + b_enc
x_hat = f W_dec + b_dec

A coder that is `centred` sees x - centre while it is trained, and x - b_dec afterwards (`Topology`).
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.latents import Params
from saejax.coders.topology import Topology, less_centre
from saejax.kernels.dense import EXACT


class Autoencoder(Topology):
    """Reads and writes one hook point; the encoder sees x - b_dec."""

    tied: ClassVar[bool] = True

    @nn.nowrap
    def encoder_input(self, params: Params, x: jax.Array) -> jax.Array:
        if "centre" in params:
            return less_centre(params, x)
        return x.astype(jnp.float32) - jax.lax.stop_gradient(params["b_dec"])[None]

    @nn.nowrap
    def encoder_bias(self, params: Params) -> jax.Array:
        """b_enc, plus a zero that carries the gradient of -b_dec W_enc to b_dec.

        Through the centred input that gradient would cost a product [B, F] x [F, D]; here it is one [F] x [F, D].
        """
        if "centre" in params:
            return params["b_enc"]
        b_dec = params["b_dec"]
        zero_D = b_dec - jax.lax.stop_gradient(b_dec)
        return params["b_enc"] - jnp.matmul(zero_D, jax.lax.stop_gradient(params["W_enc"]), precision=EXACT)

    @nn.nowrap
    def uncentred(self, params: Params) -> tuple[Params, jax.Array]:
        rest, gain_F = super().uncentred(params)
        return rest, gain_F + jnp.matmul(params["b_dec"], params["W_enc"], precision=EXACT)
