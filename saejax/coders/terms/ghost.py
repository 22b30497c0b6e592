"""Ghost gradients: dead latents learn the residual through exp(pre)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents
from saejax.coders.parts import register_term
from saejax.coders.term import Context, Term, squared_error, weight
from saejax.core.settings import Settings


@dataclasses.dataclass(frozen=True)
class GhostSettings(Settings, section="coder"):
    ghost_coefficient: float | None = weight("Weight of ghost gradients for dead latents.")


@register_term
@dataclasses.dataclass(frozen=True)
class GhostGradients(Term[GhostSettings]):
    """a mean_b sum_d (e - s g)^2 for the residual e = y - y_hat, with g = exp(pre) W_dec of the dead latents alone.

    s makes each token's g half as long as its e, a makes the term as large as the reconstruction error; e, s and a
    are constants. Gradients reach the dead latents (and b_dec, where the encoder reads it); 0 while
    none is dead. (Anthropic, Circuits Updates January 2024)
    """

    name: ClassVar[str] = "ghost"
    needs: ClassVar[frozenset[str]] = frozenset({"dense"})
    settings: ClassVar[type[Settings]] = GhostSettings

    def __call__(self, c: Context) -> jax.Array:
        constant, axes = jax.lax.stop_gradient, tuple(range(1, c.y.ndim))
        e = constant(c.y - c.y_hat)

        def ghost() -> jax.Array:
            # s gives g its length, so a factor for each token is free: with the largest pre taken off, exp cannot
            # overflow, nor vanish as a whole.
            dead_pre = jnp.where(c.dead[None], c.pre, -jnp.inf)
            largest = constant(dead_pre.max(tuple(range(1, c.pre.ndim)), keepdims=True))
            values = jnp.exp(dead_pre - largest)
            return c.topology.decode_without_bias(c.params, Latents(values, None, c.latents.d_sae), c.x)

        g = jax.lax.cond(c.dead.any(), ghost, lambda: jnp.zeros_like(e))
        lengths = [jnp.sqrt(jnp.square(a).sum(axes, keepdims=True)) for a in (e, g)]
        error = squared_error(e, g * constant(lengths[0] / (2 * lengths[1] + 1e-6)))
        return jnp.where(c.dead.any(), error * constant(squared_error(c.y, c.y_hat) / (error + 1e-6)), 0)
