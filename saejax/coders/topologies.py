"""The topologies by name, and those with one group of latents."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.cross_layer import (
    CausalCrosscoder,
    CrossLayerTranscoder,
    PerLayerAutoencoder,
    PerLayerTranscoder,
    SkipCrossLayerTranscoder,
)
from saejax.coders.latents import Latents, Params
from saejax.coders.topology import Axes, Topology, Transcoder, less_centre
from saejax.core.errors import DataError
from saejax.kernels.dense import EXACT, product
from saejax.kernels.norms import norms, unit_rows

EPS = 1e-5


class Autoencoder(Topology):
    """Reads and writes one hook point.

    pre   = (x - b_dec) W_enc + b_enc
    x_hat = f W_dec + b_dec

    One that is `centred` sees x - centre while it is trained, and x - b_dec afterwards (`Topology`).
    """

    tied: ClassVar[bool] = True

    def encoder_input(self, params: Params, x: jax.Array) -> jax.Array:
        if "centre" in params:
            return less_centre(params, x)
        return x.astype(jnp.float32) - jax.lax.stop_gradient(params["b_dec"])[None]

    def encoder_bias(self, params: Params) -> jax.Array:
        """b_enc, plus a zero that carries the gradient of -b_dec W_enc to b_dec.

        Through the centred input that gradient would cost a product [B, F] x [F, D]; here it is one [F] x [F, D].
        """
        if "centre" in params:
            return params["b_enc"]
        zero_D = params["b_dec"] - jax.lax.stop_gradient(params["b_dec"])
        return params["b_enc"] - jnp.matmul(zero_D, jax.lax.stop_gradient(params["W_enc"]), precision=EXACT)

    def uncentred(self, params: Params) -> tuple[Params, jax.Array]:
        rest, gain_F = super().uncentred(params)
        return rest, gain_F + jnp.matmul(params["b_dec"], params["W_enc"], precision=EXACT)


class LayerNormAutoencoder(Autoencoder):
    """An autoencoder of layer-normalised activations z: its weights and b_dec are in units of z.

    z     = (x - mean x) / (std x + eps)          over the D entries of each token; std with D - 1, as PyTorch's
    pre   = (z - b_dec) W_enc + b_enc
    x_hat = std x (f W_dec + b_dec) + mean x

    (openai/sparse_autoencoder, model.py, normalize=True; SAELens, normalize_activations="layer_norm")

    `ln_eps` [1] is eps, a constant among the parameters. Activations times s have the z of those with eps / s. So
    `fold` scales eps and nothing else, exactly.
    """

    # What its encoder sees is normalised token by token, and has a mean that no store knows.
    centrable: ClassVar[bool] = False

    def start(self, key: jax.Array) -> dict[str, tuple[Axes, jax.Array]]:
        return super().start(key) | {"ln_eps": ((None,), jnp.full(1, EPS, jnp.float32))}

    def encoder_input(self, params: Params, x: jax.Array) -> jax.Array:
        mean_B1, std_B1 = _moments(x)
        z_BD = (x.astype(jnp.float32) - mean_B1) / (std_B1 + jax.lax.stop_gradient(params["ln_eps"])[None])
        return super().encoder_input(params, z_BD)

    def decode(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """x_hat = std x (f W_dec + b_dec) + mean x, float32 [B, D].

        Raises:
            DataError: without x.
        """
        mean_B1, std_B1 = _moments(x)
        return self.decode_without_bias(params, latents, x) + std_B1 * params["b_dec"][None] + mean_B1

    def written_by(self, params: Params, out_BR: jax.Array, x: jax.Array | None) -> jax.Array:
        return _moments(x)[1] * super().written_by(params, out_BR, x)

    def fold(self, params: Params, read_scales: tuple[float, ...], write_scales: tuple[float, ...]) -> Params:
        return params | {"ln_eps": params["ln_eps"] / read_scales[0]}

    def aim(self, params: Params, x_F: jax.Array, y_F: jax.Array) -> Params:
        into, out = (unit_rows(self.encoder_input(params, tokens)) for tokens in (x_F, y_F))
        return {"W_enc": into.T, "W_dec": out}


def _moments(x: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(mean, standard deviation) of each token's entries, [B, 1]; a token of equal entries has 0, with gradient 0."""
    if x is None:
        raise DataError("A coder of layer-normalised activations decodes with its input: give x.")
    x = x.astype(jnp.float32)
    mean_B1 = x.mean(-1, keepdims=True)
    var_B1 = jnp.square(x - mean_B1).sum(-1, keepdims=True) / max(1, x.shape[-1] - 1)
    some = var_B1 > 0
    return mean_B1, jnp.where(some, jnp.sqrt(jnp.where(some, var_B1, 1)), 0)


class SkipTranscoder(Topology):
    """A transcoder with W_skip [D_in, D_out], which starts at 0. (Paulo et al. 2025, arXiv:2501.18823)"""

    def start(self, key: jax.Array) -> dict[str, tuple[Axes, jax.Array]]:
        return super().start(key) | {"W_skip": (("d_in", None), jnp.zeros((*self.in_shape, *self.out_shape)))}

    def decode(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """y_hat = f W_dec + b_dec + x W_skip, float32 [B, D_out].

        Raises:
            DataError: without x.
        """
        if x is None:
            raise DataError("A coder with a skip connection decodes with its input: give x.")
        return super().decode(params, latents, x) + product(x, params["W_skip"], self.matmul_dtype)

    def fold(self, params: Params, read_scales: tuple[float, ...], write_scales: tuple[float, ...]) -> Params:
        folded = super().fold(params, read_scales, write_scales)
        return folded | {"W_skip": params["W_skip"] * (read_scales[0] / write_scales[0])}


class Crosscoder(Topology):
    """x [B, S, D] -> latents [B, F] -> x_hat [B, S, D], with W_enc [S, D, F], W_dec [F, S, D], b_dec [S, D].

    pre     = sum_s x_s W_enc,s + b_enc
    x_hat_s = f W_dec,s + b_dec,s

    Sites are layers of one model, or the same hook point of two models (model diffing).
    (Anthropic, "Sparse Crosscoders for Cross-Layer Features and Model Diffing", October 2024)
    """

    stacked: ClassVar[bool] = True
    tied: ClassVar[bool] = True

    def decoder_norms(self, params: Params) -> jax.Array:
        """sum_s ||W_dec,f,s||, [F]: the sum over sites lets a latent be of few sites without a price."""
        return norms(params["W_dec"], axis=2).sum(1)


TOPOLOGIES: dict[str, type[Topology]] = {
    "autoencoder": Autoencoder,
    "transcoder": Transcoder,
    "skip_transcoder": SkipTranscoder,
    "crosscoder": Crosscoder,
    "clt": CrossLayerTranscoder,
    "skip_clt": SkipCrossLayerTranscoder,
    "layernorm_autoencoder": LayerNormAutoencoder,
    "causal_crosscoder": CausalCrosscoder,
    "per_layer_autoencoder": PerLayerAutoencoder,
    "per_layer_transcoder": PerLayerTranscoder,
}
