"""f = relu(pre) where pre is among the k largest of its token, else 0. (Gao et al. 2024, arXiv:2406.04093)"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents
from saejax.coders.ramp import Ramp
from saejax.coders.sparsity.base import Keep, Params, Sparsity
from saejax.kernels.selection import largest_of_rows


@dataclasses.dataclass(frozen=True)
class TopK(Sparsity):
    """Keeps the k largest pre-activations of each token (and group); ties go to the lower index.

    While k falls during training, `Ramp.largest` candidates are found and the first k(step) of them used.
    """

    k: Ramp
    sparse: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"k"})

    @classmethod
    def build(cls, settings: Any, steps: int) -> Self:
        return cls(settings.k_ramp(steps))

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        indices = self.candidates(pre)
        return Latents(self.first(jax.nn.relu(keep(indices)), step), indices, pre.shape[-1])

    def candidates(self, score: jax.Array) -> jax.Array:
        """Indices of the largest scores, falling; [..., K]."""
        return largest_of_rows(jax.lax.stop_gradient(score), min(round(self.k.largest), score.shape[-1]))

    def first(self, values: jax.Array, step: jax.Array | int) -> jax.Array:
        """The values of the first k(step) candidates, 0 for the rest; all of them where k is constant."""
        if not self.k.over:
            return values
        ranks = jax.lax.broadcasted_iota(jnp.float32, values.shape, values.ndim - 1)
        return jnp.where(ranks < jnp.round(self.k(step)), values, 0)

    def inference(self, params: Params, stats: dict[str, jax.Array], shape: tuple[int, ...]) -> tuple[Any, Params]:
        return dataclasses.replace(self, k=Ramp.constant(self.k.end)), params
