"""Tokens that are no example of what a model computes: the first of a text, and those with a massive activation."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sinks:
    """position < first, or ||x|| > ratio * median ||x'|| at any hook point, over the candidates x' of the same row.

    The first token of a text reads nothing but itself, and models rest their attention on it and on a few others (Xiao
    et al., arXiv 2309.17453). Their activations are so long there that they decide a mean squared error by themselves
    (Sun et al., arXiv 2402.17762). A row's median is the same however many rows are in a batch.

    Attributes:
        first: positions at the front of each piece of a text; 0 for none.
        ratio: 0 for any norm.
    """

    first: int = 0
    ratio: float = 0.0

    def among(self, activations: Mapping[str, Any], candidates_RS: Any, positions_RS: Any) -> tuple[Any, Any]:
        """(candidates that stand first, other candidates whose activation is massive), bool [R, S].

        NumPy's from NumPy arrays; JAX's, pure, from JAX's.

        Args:
            activations: hook point -> [R, S, d].
            candidates_RS: bool; false where nothing is to be looked at.
        """
        front = candidates_RS & (positions_RS < self.first)
        rest = candidates_RS & ~front
        return front, outliers(activations, rest, self.ratio) if self.ratio else rest & False

    def without(
        self, activations: Mapping[str, jax.Array], candidates_RS: jax.Array, positions_RS: jax.Array
    ) -> jax.Array:
        """The candidates that are `finite` and no sinks, bool [R, S]; pure."""
        good_RS = candidates_RS & finite(activations)
        front, massive = self.among(activations, good_RS, positions_RS)
        return good_RS & ~front & ~massive


ALL_TOKENS = Sinks()


def outliers(activations: Mapping[str, Any], candidates_RS: Any, ratio: float) -> Any:
    """||x_n|| > ratio * median_m ||x_m|| at any hook point, m over the candidates of the same row; bool [R, S].

    False where there is no candidate. The median of an even number is the lower of the two in the middle; a median of
    zero filters nothing.

    Args:
        activations: hook point -> [R, S, d], read as float32.
        candidates_RS: bool, NumPy's or JAX's (then pure).
    """
    xp: Any = np if isinstance(candidates_RS, np.ndarray) else jnp
    far_RS = xp.zeros_like(candidates_RS)
    middle_R1 = xp.maximum(candidates_RS.sum(-1, keepdims=True) - 1, 0) // 2
    for values_RSD in activations.values():
        x_RSD = xp.where(candidates_RS[..., None], values_RSD, 0).astype(np.float32)
        norm_RS = xp.sqrt(xp.einsum("rsd,rsd->rs", x_RSD, x_RSD))  # NumPy's has no BLAS: the same on any core count
        ordered_RS = xp.sort(xp.where(candidates_RS, norm_RS, np.inf), axis=-1)
        usual_R1 = xp.take_along_axis(ordered_RS, middle_R1, axis=-1)
        far_RS = far_RS | (candidates_RS & (usual_R1 > 0) & (norm_RS > ratio * usual_R1))
    return far_RS


def finite(activations: Mapping[str, jax.Array]) -> jax.Array:
    """Mask of tokens that are finite at every hook point: {hook point: [..., d]} -> bool [...]. Pure."""
    return functools.reduce(jnp.logical_and, (jnp.isfinite(x).all(-1) for x in activations.values()))
