"""AuxK: dead latents learn what the reconstruction leaves."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.parts import register_term
from saejax.coders.ramp import At, Ramp
from saejax.coders.term import Context, Term, squared_error, total_variance, weight
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.kernels.dead import decode_largest


@dataclasses.dataclass(frozen=True)
class AuxKSettings(Settings, section="coder"):
    auxk_coefficient: float | None = weight("Weight of AuxK: what dead latents could explain of the residual.")
    auxk_k: int = setting(0, "Dead latents that AuxK may use for a token; 0 means d_in / 2.", low=0)


@register_term
@dataclasses.dataclass(frozen=True)
class AuxK(Term[AuxKSettings]):
    """sum (e - e_hat)^2 / sum (e - mean e)^2: what dead latents could explain of the residual e = y - y_hat.

    e_hat = decode, without bias, of relu of the k largest pre-activations among dead latents (of each group). e is a
    constant here: the gradient reaches the encoder and decoder rows of the dead latents and nothing else, nor b_dec.
    0 while none is dead. Behind that relu, a latent that is negative for every token gets no gradient.
    (Gao et al. 2024, arXiv:2406.04093, appendix A.2)
    """

    k: int = 512
    name: ClassVar[str] = "auxk"
    settings: ClassVar[type[Settings]] = AuxKSettings

    @classmethod
    def build(cls, coefficient: Ramp, settings: AuxKSettings, at: At) -> Self:
        if settings.auxk_k > at.width:
            raise ConfigError(f"coder.auxk_k is {settings.auxk_k} but there are only {at.width} latents; lower it.")
        return cls(coefficient, settings.auxk_k or min(max(1, at.d_in // 2), at.width))

    def __call__(self, c: Context) -> jax.Array:
        e = jax.lax.stop_gradient(c.y - c.y_hat)
        # Without dead latents e_hat is 0, and costs next to nothing.
        return jnp.where(c.dead.any(), squared_error(e, self._e_hat(c)) / total_variance(e), 0)

    def _e_hat(self, c: Context) -> jax.Array:
        """[B, *out]. Every latent reads b_dec, but `encoder_input` keeps the gradient from it, and b_enc stands here
        as it is: else the dead would pull at what the live ones rest on."""
        rows, constant = c.topology.decoder_rows(c.params), jax.lax.stop_gradient
        x_BGN, _ = c.topology.encoders(c.params, c.encoded)
        W_GFN = c.topology.encoder_rows(c.params) if c.rows is None else c.rows
        groups, n_latents, _ = W_GFN.shape
        b_GF, dead_GF = (a.reshape(groups, n_latents) for a in (c.params["b_enc"], c.dead))
        pre = (c.pre,) if c.pre.ndim == 2 else tuple(c.pre[:, g] for g in range(groups))
        out_BR = decode_largest(
            constant(x_BGN), W_GFN, b_GF, constant(pre), dead_GF, rows, min(self.k, n_latents), c.topology.matmul_dtype
        )
        return c.topology.written_by(c.params, out_BR, c.x)
