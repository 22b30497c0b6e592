"""Topologies: transcoder, with and without a linear skip.  x [B, D_in] -> latents [B, F] -> y_hat [B, D_out].

    pre   = x W_enc + b_enc
    y_hat = f W_dec + b_dec  (+ x W_skip)

(Dunefsky et al. 2024, arXiv:2406.11944; the skip: Paulo et al. 2025, arXiv:2501.18823)
"""

import flax.linen as nn
import jax

from saejax.coders.latents import Latents, Params
from saejax.coders.topology import Topology
from saejax.core.errors import DataError
from saejax.kernels.dense import product


class Transcoder(Topology):
    """Reads one hook point and writes another, as an MLP's input and output."""


class SkipTranscoder(Topology):
    """A transcoder with W_skip [D_in, D_out], which starts at 0."""

    def setup(self) -> None:
        super().setup()
        W_skip = nn.with_logical_partitioning(nn.initializers.zeros, ("d_in", None))
        self.param("W_skip", W_skip, (*self.in_shape, *self.out_shape))

    @nn.nowrap
    def decode(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """y_hat = f W_dec + b_dec + x W_skip, float32 [B, D_out].

        Raises:
            DataError: without x.
        """
        if x is None:
            raise DataError("A coder with a skip connection decodes with its input: give x.")
        skip_BD = product(x, params["W_skip"], self.matmul_dtype)
        return self.decode_without_bias(params, latents, x) + params["b_dec"][None] + skip_BD

    @nn.nowrap
    def fold(self, params: Params, read_scales: tuple[float, ...], write_scales: tuple[float, ...]) -> Params:
        folded = super().fold(params, read_scales, write_scales)
        return folded | {"W_skip": params["W_skip"] * (read_scales[0] / write_scales[0])}
