"""Sparsities: from pre-activations to latents. One file each; a new one is a new file and a line here."""

from collections.abc import Callable
from typing import ClassVar, Protocol

import jax

from saejax.coders.latents import Latents
from saejax.coders.sparsity.relu import Relu
from saejax.coders.sparsity.topk import TopK


class Sparsity(Protocol):
    """(pre [B, F], keep) -> Latents.

    `keep(indices [B, K]) -> pre at the indices [B, K]` gives a sparse activation its values with a gradient
    that never builds [B, F]; a dense activation ignores it and differentiates through `pre`.
    """

    sparse: ClassVar[bool]

    def __call__(self, pre_BF: jax.Array, keep: Callable[[jax.Array], jax.Array]) -> Latents: ...


__all__ = ["Relu", "Sparsity", "TopK"]
