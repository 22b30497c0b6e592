"""f = pre where |pre| is among the k largest of its token, else 0: latents of both signs. (arXiv:2510.00404)"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents, Params
from saejax.coders.parts import register_sparsity
from saejax.coders.sparsity.base import Keep
from saejax.coders.sparsity.topk import TopK


@register_sparsity
@dataclasses.dataclass(frozen=True)
class AbsTopK(TopK):
    """Keeps the k pre-activations of each token that are largest in absolute value, with their sign."""

    name: ClassVar[str] = "abs_topk"

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        indices = self.candidates(jnp.abs(pre))
        return Latents(self.first(keep(indices), step), indices, pre.shape[-1])

    def penalised(self, pre: jax.Array, latents: Latents, params: Params) -> jax.Array:
        return jnp.abs(latents.dense())
