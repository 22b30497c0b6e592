"""The batch as a loss term sees it, and the measures of error that several terms share."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents
from saejax.coders.sparsity.base import Keep, Sparsity
from saejax.kernels.batch import mean_token, per_token

if TYPE_CHECKING:
    from saejax.coders.topology import Topology


@dataclasses.dataclass(frozen=True)
class Context:
    """The arguments of a loss term, for a batch of B tokens ([B, G, F] where there are groups).

    Attributes:
        x: [B, ...] input; y: [B, ...] target; y_hat: reconstruction.
        pre: [B, F] pre-activations, without gradient for sparse activations.
        keep: indices [B, K] -> pre there, with its gradient.
        dead: bool [F], latents that have not fired for `dead_after_tokens`.
        stats: statistics before this batch.
        step: int32, number of finished steps.
        whole_variance: `total_variance` of the targets of the whole batch, where these tokens are a part of it.
    """

    topology: "Topology"
    sparsity: Sparsity
    params: dict[str, Any]
    x: jax.Array
    y: jax.Array
    y_hat: jax.Array
    pre: jax.Array
    keep: Keep
    latents: Latents
    dead: jax.Array
    stats: dict[str, jax.Array]
    step: jax.Array
    whole_variance: jax.Array | None = None

    @property
    def variance(self) -> jax.Array:
        """`total_variance` of the targets: what a fraction of variance unexplained is a fraction of."""
        return total_variance(self.y) if self.whole_variance is None else self.whole_variance


def squared_error(y: jax.Array, y_hat: jax.Array) -> jax.Array:
    """mean_b sum_d (y - y_hat)^2, over all sites together."""
    return per_token(jnp.square(y - y_hat))


def total_variance(y: jax.Array) -> jax.Array:
    """mean_b sum_d (y - mean_b y)^2, at least 1e-12: a batch without variance gives a large loss, not NaN."""
    return jnp.maximum(squared_error(y, mean_token(y)), 1e-12)
