"""f = relu(pre) where pre is among the k largest of its token, else 0. (Gao et al. 2024, arXiv:2406.04093)"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from saejax.coders.latents import Latents


@dataclasses.dataclass(frozen=True)
class TopK:
    """Keeps the k largest pre-activations of each token; ties go to the lower index."""

    k: int
    sparse: ClassVar[bool] = True

    def __call__(self, pre_BF: jax.Array, keep: Callable[[jax.Array], jax.Array]) -> Latents:
        _, indices_BK = jax.lax.top_k(jax.lax.stop_gradient(pre_BF), self.k)
        return Latents(jax.nn.relu(keep(indices_BK)), indices_BK, pre_BF.shape[1])
