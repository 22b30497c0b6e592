"""Decoder rows that point in different directions."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.parts import register_term
from saejax.coders.term import Context, Term, weight
from saejax.core.settings import Settings
from saejax.kernels.dense import EXACT
from saejax.kernels.norms import unit_rows


@dataclasses.dataclass(frozen=True)
class DecorrelationSettings(Settings, section="coder"):
    decorrelation_coefficient: float | None = weight("Weight of the mean squared cosine between decoder rows.")


@register_term
@dataclasses.dataclass(frozen=True)
class Decorrelation(Term[DecorrelationSettings]):
    """mean over i != j of (d_i . d_j)^2, d the decoder rows at length 1: the Gram matrix's off-diagonal.

    Through the smaller product: sum_ij (d_i . d_j)^2 = ||d^T d||_F^2. Groups are averaged.
    """

    name: ClassVar[str] = "decorrelation"
    settings: ClassVar[type[Settings]] = DecorrelationSettings

    def __call__(self, c: Context) -> jax.Array:
        groups = c.topology.decoder_rows(c.params)
        return jnp.stack([self._of(rows_FR) for rows_FR in groups]).mean()

    def _of(self, rows_FR: jax.Array) -> jax.Array:
        n, d_FR = rows_FR.shape[0], unit_rows(rows_FR)
        small_SL = d_FR.T if n > rows_FR.shape[1] else d_FR
        small = jnp.matmul(small_SL, small_SL.T, precision=EXACT)
        # A row of zeros has no cosine with itself either.
        diagonal = jnp.square(jnp.square(d_FR).sum(1)).sum()
        return (jnp.square(small).sum() - diagonal) / max(1, n * (n - 1))
