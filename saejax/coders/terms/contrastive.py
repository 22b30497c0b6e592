"""The contrast of tokens that stand side by side, with which a temporal dictionary is trained."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.parts import register_term
from saejax.coders.ramp import At, Ramp
from saejax.coders.term import Context, Term, weight
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import whole_batch
from saejax.kernels.dense import EXACT
from saejax.kernels.norms import unit_rows
from saejax.kernels.shards import shards_of

SIMILARITIES = ("cosine", "dot")


@dataclasses.dataclass(frozen=True)
class ContrastiveSettings(Settings, section="coder"):
    """Of the contrast between neighbouring tokens."""

    contrastive_coefficient: float | None = weight(
        "Weight of the contrast between neighbouring tokens (temporal); it needs train.neighbours of 2 or more.",
        needs=("order",),
    )
    contrastive_share: float = setting(
        0.2, "The first latents, so large a share of them, that neighbouring tokens should share.", above=0, high=1
    )
    contrastive_similarity: str = setting(
        "cosine",
        "How two tokens are compared: the cosine of those latents, or their dot product.",
        choices=SIMILARITIES,
    )
    contrastive_temperature: float = setting(1.0, "Similarities are divided by this.", above=0)


@register_term
@dataclasses.dataclass(frozen=True)
class Contrastive(Term[ContrastiveSettings]):
    """InfoNCE of neighbours: which of a batch's W tokens stood beside this one, by its first latents alone.

    With z the first `share` of the latents and s(w, v) = cos(z[w, i], z[v, i + 1]) / temperature, for windows w and v,

        mean over i, w of  -log(exp s(w, w) / sum_v exp s(w, v)),  and the same of windows v over w, halved

    A batch [W n, ...] is W windows of n consecutive tokens. Tokens of one's own window are never among the others. With
    W windows the term is log W where all tokens look alike. A token without any of these latents has similarity 0.
    A token's other latents get no gradient. Groups of latents each have their first share. (Bhalla et al. 2025,
    arXiv:2511.05541; the authors' code takes the dot product)

    Attributes:
        first: latents (of each group) that are compared.
        window: n; 0 where nobody said.
    """

    first: int = 1
    window: int = 0
    similarity: str = "cosine"
    temperature: float = 1.0
    name: ClassVar[str] = "contrastive"
    settings: ClassVar[type[Settings]] = ContrastiveSettings

    @classmethod
    def build(cls, coefficient: Ramp, settings: ContrastiveSettings, at: At) -> Self:
        if at.neighbours == 1:
            raise ConfigError(_ALONE)
        first = max(1, round(settings.contrastive_share * at.width))
        how = settings.contrastive_similarity, settings.contrastive_temperature
        return cls(coefficient, first, at.neighbours, *how)

    def __call__(self, c: Context) -> jax.Array:
        if self.window < 2:
            raise ConfigError(_ALONE)
        z_BH = self._first(c)
        if self.similarity == "cosine":
            z_BH = unit_rows(z_BH)
        z_WNH = whole_batch(z_BH).reshape(-1, self.window, z_BH.shape[1])
        earlier, later = z_WNH[:, :-1], z_WNH[:, 1:]
        s_NWV = jnp.einsum("wnh,vnh->nwv", earlier, later, precision=EXACT) / self.temperature
        own_NW = jnp.diagonal(s_NWV, axis1=1, axis2=2)
        both = sum(jax.nn.logsumexp(s_NWV, axis=axis).mean() for axis in (1, 2))
        return both / 2 - own_NW.mean()

    def _first(self, c: Context) -> jax.Array:
        """The first latents of each token, all groups beside each other: [B, H]."""
        dense = c.latents.dense()
        if shards_of(dense.shape[0], dense.shape[-1]).n_along_latents > 1:
            # Those of latents that are split over devices lie on few of them: zeros stand for the others.
            place = jax.lax.broadcasted_iota(jnp.int32, dense.shape, dense.ndim - 1)
            return jnp.where(place < self.first, dense, 0).reshape(dense.shape[0], -1)
        return dense[..., : self.first].reshape(dense.shape[0], -1)


_ALONE = (
    "The loss contrastive compares tokens that stand side by side, and train.neighbours=1 takes every token by itself: "
    "set train.neighbours=2, or coder.contrastive_coefficient=0."
)
