"""f = 1[pre > 0] relu(mag): one path decides whether a latent fires, the other how much. (arXiv:2404.16014)

pre = x' W_enc + b_enc                            the gate; b_enc is the paper's b_gate
mag = exp(r_mag) (x' W_enc) + b_mag
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents, Params
from saejax.coders.parts import register_sparsity
from saejax.coders.sparsity.base import Keep, Sparsity, gradient_alone
from saejax.kernels.batch import for_tokens


@register_sparsity
@dataclasses.dataclass(frozen=True)
class Gated(Sparsity):
    """The step has no gradient: the gate learns from the penalty on relu(pre) and from `GateReconstruction`."""

    name: ClassVar[str] = "gated"
    provides: ClassVar[frozenset[str]] = frozenset({"dense", "gate"})
    like_latents: ClassVar[tuple[str, ...]] = ("b_mag",)

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        scale, bias = (for_tokens(a, len(pre)) for a in (jnp.exp(params["r_mag"]), params["b_mag"]))
        magnitude = scale * (pre - for_tokens(params["b_enc"], len(pre))) + bias
        return Latents(jnp.where(pre > 0, jax.nn.relu(magnitude), 0), None, pre.shape[-1])

    def parameters(self) -> dict[str, float]:
        return {"r_mag": 0.0, "b_mag": 0.0}

    def biased(self, params: Params, gain: jax.Array) -> Params:
        return super().biased(params, gain) | {"b_mag": params["b_mag"] + jnp.exp(params["r_mag"]) * gain}

    def short_of(self, highest: jax.Array, params: Params) -> jax.Array:
        """Both biases: behind a gate that opens, a latent whose magnitude is negative would still be 0."""
        return super().short_of(highest + gradient_alone(params["b_mag"]), params)

    def penalised(self, pre: jax.Array, latents: Latents, params: Params) -> jax.Array:
        return jax.nn.relu(pre)
