"""Topology: autoencoder of layer-normalised activations.  x [B, D] -> latents [B, F] -> x_hat [B, D].

    z     = (x - mean x) / (std x + eps)          over the D entries of each token; std with D - 1, as PyTorch's
    pre   = (z - b_dec) W_enc + b_enc
    x_hat = std x (f W_dec + b_dec) + mean x

(openai/sparse_autoencoder, model.py, normalize=True; SAELens, normalize_activations="layer_norm")
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from saejax.coders.autoencoder import Autoencoder
from saejax.coders.latents import Latents, Params
from saejax.core.errors import DataError
from saejax.kernels.norms import unit_rows

EPS = 1e-5


class LayerNormAutoencoder(Autoencoder):
    """An autoencoder whose weights and b_dec are in units of z; `ln_eps` [1] is eps, a constant among the parameters.

    Activations times s have the z of those with eps / s. So `fold` scales eps and nothing else, exactly.
    """

    # What its encoder sees is normalised token by token, and has a mean that no store knows.
    centrable: ClassVar[bool] = False

    def setup(self) -> None:
        super().setup()
        ln_eps = nn.with_logical_partitioning(nn.initializers.constant(EPS), (None,))
        self.param("ln_eps", ln_eps, (1,))

    @nn.nowrap
    def encoder_input(self, params: Params, x: jax.Array) -> jax.Array:
        mean_B1, std_B1 = _moments(x)
        z_BD = (x.astype(jnp.float32) - mean_B1) / (std_B1 + jax.lax.stop_gradient(params["ln_eps"])[None])
        return super().encoder_input(params, z_BD)

    @nn.nowrap
    def decode(self, params: Params, latents: Latents, x: jax.Array | None) -> jax.Array:
        """x_hat = std x (f W_dec + b_dec) + mean x, float32 [B, D].

        Raises:
            DataError: without x.
        """
        mean_B1, std_B1 = _moments(x)
        return self.decode_without_bias(params, latents, x) + std_B1 * params["b_dec"][None] + mean_B1

    @nn.nowrap
    def written_by(self, params: Params, out_BR: jax.Array, x: jax.Array | None) -> jax.Array:
        return _moments(x)[1] * super().written_by(params, out_BR, x)

    @nn.nowrap
    def fold(self, params: Params, read_scales: tuple[float, ...], write_scales: tuple[float, ...]) -> Params:
        return params | {"ln_eps": params["ln_eps"] / read_scales[0]}

    @nn.nowrap
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
