"""f = relu(pre): dense latents, made sparse by a penalty."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from saejax.coders.latents import Latents


@dataclasses.dataclass(frozen=True)
class Relu:
    """f = max(pre, 0)."""

    sparse: ClassVar[bool] = False

    def __call__(self, pre_BF: jax.Array, keep: Callable[[jax.Array], jax.Array]) -> Latents:
        return Latents(jax.nn.relu(pre_BF), None, pre_BF.shape[1])
