"""f = relu(pre): dense latents, made sparse by a penalty."""

import dataclasses
from typing import ClassVar

import jax

from saejax.coders.latents import Latents, Params
from saejax.coders.parts import register_sparsity
from saejax.coders.sparsity.base import Keep, Sparsity


@register_sparsity
@dataclasses.dataclass(frozen=True)
class Relu(Sparsity):
    """f = max(pre, 0)."""

    name: ClassVar[str] = "relu"
    # The penalty pushes biases down all the time (benchmarks/quality/changes.py).
    bias_rate: ClassVar[float] = 5.0

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        return Latents(jax.nn.relu(pre), None, pre.shape[-1])
