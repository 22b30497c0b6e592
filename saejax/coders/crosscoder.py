"""Topology: crosscoder.  x [B, S, D] -> latents [B, F] -> x_hat [B, S, D].

    pre     = sum_s x_s W_enc,s + b_enc
    x_hat_s = f W_dec,s + b_dec,s

Sites are layers of one model, or the same hook point of two models (model diffing).
(Anthropic, "Sparse Crosscoders for Cross-Layer Features and Model Diffing", October 2024)
"""

from typing import ClassVar

import flax.linen as nn
import jax

from saejax.coders.latents import Params
from saejax.coders.topology import Topology
from saejax.kernels.norms import norms


class Crosscoder(Topology):
    """W_enc [S, D, F], W_dec [F, S, D], b_dec [S, D]."""

    stacked: ClassVar[bool] = True
    tied: ClassVar[bool] = True

    @nn.nowrap
    def decoder_norms(self, params: Params) -> jax.Array:
        """sum_s ||W_dec,f,s||, [F]: the sum over sites lets a latent be of few sites without a price."""
        return norms(params["W_dec"], axis=2).sum(1)
