"""f = relu(pre): dense latents, made sparse by a penalty."""

import dataclasses

import jax

from saejax.coders.latents import Latents
from saejax.coders.sparsity.base import Keep, Params, Sparsity


@dataclasses.dataclass(frozen=True)
class Relu(Sparsity):
    """f = max(pre, 0)."""

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        return Latents(jax.nn.relu(pre), None, pre.shape[-1])
