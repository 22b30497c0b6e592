"""Lift: dead latents that no token makes fire are raised until one does."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.parts import register_term
from saejax.coders.term import Context, Term, weight
from saejax.core.settings import Settings
from saejax.kernels.dead import greatest_token


@dataclasses.dataclass(frozen=True)
class LiftSettings(Settings, section="coder"):
    lift_coefficient: float | None = weight("Weight of Lift: dead latents that are negative for every token rise.")


@register_term
@dataclasses.dataclass(frozen=True)
class Lift(Term[LiftSettings]):
    """sum over dead f of relu(-m_f), m_f = max_b pre_bf: how far a latent is below 0 for the token it is nearest to.

    Of a jumprelu's it is relu(-m_f) + relu(theta_f - m_f). The gradient reaches what m_f is compared with and nothing
    else, as 1 or -1: b_enc (of a gated coder b_mag as well) of a dead latent that is negative for every token of the
    batch, and the threshold of one that no token reaches. AuxK does not reach the former; it does from 0 on. As nothing
    else moves these parameters, the length of Adam's steps hardly depends on the weight. The batch is a part of it
    where it is computed in parts. (ours; tried in benchmarks/quality/changes.py)
    """

    name: ClassVar[str] = "lift"
    settings: ClassVar[type[Settings]] = LiftSettings

    def __call__(self, c: Context) -> jax.Array:
        highest = greatest_token(jax.lax.stop_gradient(c.pre))
        return jnp.where(c.dead, c.sparsity.short_of(highest, c.params), 0).sum()
