"""Topology: autoencoder.  x [B, D] -> latents [B, F] -> x_hat [B, D].

    pre   = (x - b_dec) W_enc + b_enc
    x_hat = f W_dec + b_dec

Flax declares the parameters, with their logical axes; everything else is a function of (params, x). The
parameter names and layouts are those of SAELens: W_enc [D, F], b_enc [F], W_dec [F, D], b_dec [D].
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents
from saejax.kernels.sparse import decode_rows, kept_pre_activations

Params = dict[str, Any]


class Autoencoder(nn.Module):
    """Parameters and products of an autoencoder.

    Attributes:
        d_in, d_sae: D and F.
        decoder_norm: length of each decoder row at initialisation; the encoder starts as its transpose.
        matmul_dtype: dtype of the operands of the dense products; they accumulate in float32.
    """

    d_in: int
    d_sae: int
    decoder_norm: float = 1.0
    matmul_dtype: str = "bfloat16"

    def setup(self) -> None:
        def decoder_init(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
            W_FD = jax.random.normal(key, shape, jnp.float32)
            return self.decoder_norm * W_FD / jnp.linalg.norm(W_FD, axis=1, keepdims=True)

        W_dec: Any = self.param(
            "W_dec", nn.with_logical_partitioning(decoder_init, ("latent", "d_in")), (self.d_sae, self.d_in)
        )
        self.param("W_enc", nn.with_logical_partitioning(lambda _: W_dec.T, ("d_in", "latent")))
        self.param("b_enc", nn.with_logical_partitioning(nn.initializers.zeros, ("latent",)), (self.d_sae,))
        self.param("b_dec", nn.with_logical_partitioning(nn.initializers.zeros, ("d_in",)), (self.d_in,))

    def __call__(self) -> None:
        """Nothing to run: the module only declares parameters."""

    @nn.nowrap
    def pre_activations(self, params: Params, x_BD: jax.Array) -> jax.Array:
        """pre = (x - b_dec) W_enc + b_enc, float32 [B, F]."""
        return self._product(_centred(params, x_BD), params["W_enc"]) + _bias(params)[None]

    @nn.nowrap
    def kept(self, params: Params, x_BD: jax.Array, pre_BF: jax.Array, indices_BK: jax.Array) -> jax.Array:
        """pre at `indices`, [B, K], where pre is known already; its gradient stays sparse (and skips x)."""
        centred_BD = _centred(params, x_BD)
        raw_BF = jax.lax.stop_gradient(pre_BF - _bias(params)[None])
        kept_BK = kept_pre_activations(centred_BD, params["W_enc"], raw_BF, indices_BK)
        return kept_BK + _bias(params)[indices_BK]

    @nn.nowrap
    def decode(self, params: Params, latents: Latents) -> jax.Array:
        """x_hat = f W_dec + b_dec, float32 [B, D]."""
        return self.decode_without_bias(params, latents) + params["b_dec"][None]

    @nn.nowrap
    def decode_without_bias(self, params: Params, latents: Latents) -> jax.Array:
        """f W_dec, float32 [B, D]."""
        if latents.indices is None:
            return self._product(latents.values, params["W_dec"])
        return decode_rows(latents.values, latents.indices, params["W_dec"])

    @nn.nowrap
    def restrict(self, params: Params, indices_K: jax.Array) -> Params:
        """Parameters of the smaller autoencoder that has only the latents at `indices`."""
        return params | {
            "W_enc": params["W_enc"][:, indices_K],
            "b_enc": params["b_enc"][indices_K],
            "W_dec": params["W_dec"][indices_K],
        }

    @nn.nowrap
    def decoder_norms(self, params: Params) -> jax.Array:
        """Length of each latent's decoder row, [F]."""
        return jnp.linalg.norm(params["W_dec"], axis=1)

    @nn.nowrap
    def _product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = jnp.dtype(self.matmul_dtype)
        return jnp.matmul(a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32)


def _centred(params: Params, x_BD: jax.Array) -> jax.Array:
    return x_BD.astype(jnp.float32) - jax.lax.stop_gradient(params["b_dec"])[None]


def _bias(params: Params) -> jax.Array:
    """b_enc, plus a zero that carries the gradient of -b_dec W_enc to b_dec.

    Through the centred input that gradient would cost a product [B, F] x [F, D]; here it is one [F] x [F, D].
    """
    b_dec = params["b_dec"]
    zero_D = b_dec - jax.lax.stop_gradient(b_dec)
    return params["b_enc"] - zero_D @ jax.lax.stop_gradient(params["W_enc"])


def fold_input_scale(params: Params, scale: float) -> Params:
    """Parameters for raw activations from parameters trained on `scale * x`; the latents stay the same.

    (s x - b_dec) W_enc + b_enc = (x - b_dec/s) (s W_enc) + b_enc, and x_hat = (f W_dec + b_dec) / s.
    """
    return params | {
        "W_enc": params["W_enc"] * scale,
        "W_dec": params["W_dec"] / scale,
        "b_dec": params["b_dec"] / scale,
    }
