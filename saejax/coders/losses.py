"""Loss terms: each a small frozen object, `term(context) -> scalar`; a coder adds up weight x term.

Sums run over the model width, means over tokens, so that a coefficient means the same for every batch size.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from saejax.coders.autoencoder import Autoencoder
from saejax.coders.latents import Latents


@dataclasses.dataclass(frozen=True)
class Context:
    """What a term may look at, for a batch of B tokens.

    Attributes:
        x: [B, D] input; y: [B, D] target; y_hat: [B, D] reconstruction.
        pre: [B, F] pre-activations, without gradient for sparse activations.
        dead: bool [F], latents that have not fired for `dead_after_tokens`.
        step: int32, number of finished steps.
    """

    topology: Autoencoder
    params: dict[str, Any]
    x: jax.Array
    y: jax.Array
    y_hat: jax.Array
    pre: jax.Array
    latents: Latents
    dead: jax.Array
    step: jax.Array


class Term(Protocol):
    """A summand of the loss, under its name in the metrics."""

    @property
    def name(self) -> str: ...

    def __call__(self, c: Context) -> jax.Array: ...

    def weight(self, step: jax.Array) -> jax.Array: ...


def squared_error(y_BD: jax.Array, y_hat_BD: jax.Array) -> jax.Array:
    """mean_b sum_d (y - y_hat)^2"""
    return jnp.square(y_BD - y_hat_BD).sum(-1).mean()


def total_variance(y_BD: jax.Array) -> jax.Array:
    """mean_b sum_d (y - mean_b y)^2, at least 1e-12: a batch without variance gives a large loss, not NaN."""
    return jnp.maximum(jnp.square(y_BD - y_BD.mean(0, keepdims=True)).sum(-1).mean(), 1e-12)


@dataclasses.dataclass(frozen=True)
class Mse:
    """mean_b sum_d (y - y_hat)^2"""

    name: str = "mse"

    def __call__(self, c: Context) -> jax.Array:
        return squared_error(c.y, c.y_hat)

    def weight(self, step: jax.Array) -> jax.Array:
        return jnp.float32(1)


@dataclasses.dataclass(frozen=True)
class Fvu:
    """sum (y - y_hat)^2 / sum (y - mean y)^2 over the batch: 1 - FVE."""

    name: str = "fvu"

    def __call__(self, c: Context) -> jax.Array:
        return squared_error(c.y, c.y_hat) / total_variance(c.y)

    def weight(self, step: jax.Array) -> jax.Array:
        return jnp.float32(1)


@dataclasses.dataclass(frozen=True)
class NormWeightedL1:
    """mean_b sum_f f ||W_dec,f||, its coefficient rising linearly over the first `warmup_steps`.

    Weighted by the decoder norm, so that shrinking latents and growing decoder rows does not pay.
    (Anthropic, Circuits Updates April 2024)
    """

    coefficient: float
    warmup_steps: int
    name: str = "l1"

    def __call__(self, c: Context) -> jax.Array:
        return (c.latents.dense() * c.topology.decoder_norms(c.params)[None]).sum(-1).mean()

    def weight(self, step: jax.Array) -> jax.Array:
        ramp = jnp.minimum(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return jnp.float32(self.coefficient) * ramp


@dataclasses.dataclass(frozen=True)
class AuxK:
    """sum (e - e_hat)^2 / sum (e - mean e)^2: what dead latents could explain of the residual e = y - y_hat.

    e_hat = decode, without bias, of relu of the k largest pre-activations among dead latents. e is a constant
    here: the gradient reaches the encoder and decoder rows of the dead latents and nothing else, nor b_dec.
    0 while none is dead. Behind that relu, a latent that is negative for every token gets no gradient.
    (Gao et al. 2024, arXiv:2406.04093, appendix A.2)
    """

    coefficient: float
    k: int
    name: str = "auxk"

    def __call__(self, c: Context) -> jax.Array:
        e_BD = jax.lax.stop_gradient(c.y - c.y_hat)
        # Every latent reads b_dec, so without this the dead ones would pull at what the live ones rest on.
        params = c.params | {"b_dec": jax.lax.stop_gradient(c.params["b_dec"])}

        def few() -> jax.Array:
            """At most k are dead: all take part, as a small dense dictionary of their own."""
            is_dead_K, indices_K = jax.lax.top_k(c.dead.astype(jnp.float32), self.k)
            own = c.topology.restrict(params, indices_K)
            values_BK = jax.nn.relu(c.topology.pre_activations(own, c.x)) * is_dead_K[None]
            return unexplained(c.topology.decode_without_bias(own, Latents(values_BK, None, self.k)))

        def many() -> jax.Array:
            """More than k are dead: each token has its own k."""
            dead_pre_BF = jnp.where(c.dead[None], jax.lax.stop_gradient(c.pre), -jnp.inf)
            _, indices_BK = jax.lax.top_k(dead_pre_BF, self.k)
            values_BK = jax.nn.relu(c.topology.kept(params, c.x, c.pre, indices_BK))
            return unexplained(c.topology.decode_without_bias(params, Latents(values_BK, indices_BK, c.latents.d_sae)))

        def unexplained(e_hat_BD: jax.Array) -> jax.Array:
            return squared_error(e_BD, e_hat_BD) / total_variance(e_BD)

        n_dead = c.dead.sum()
        # Most of a run has none or few: then AuxK costs next to nothing.
        return jax.lax.switch((n_dead > 0) + (n_dead > self.k).astype(int), [lambda: jnp.float32(0), few, many])

    def weight(self, step: jax.Array) -> jax.Array:
        return jnp.float32(self.coefficient)
