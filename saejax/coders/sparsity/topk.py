"""f = relu(pre) where pre is among the k largest of its token, else 0. (Gao et al. 2024, arXiv:2406.04093)"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents, Params
from saejax.coders.parts import register_sparsity
from saejax.coders.ramp import At, Ramp
from saejax.coders.sparsity.base import Keep, Sparsity
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.kernels.selection import largest_of_rows


@dataclasses.dataclass(frozen=True)
class KSettings(Settings, section="coder"):
    """Of sparsities that keep a number of latents."""

    k: int = setting(32, "Latents kept for a token; for a clt, for a token and layer.", low=1)
    k_start: int = setting(0, "k falls from this number at the start of training; 0 keeps k constant.", low=0)
    k_anneal_fraction: float = setting(0.1, "The share of training over which k falls from k_start.", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.k_start < self.k:
            raise ConfigError(f"coder.k_start is {self.k_start}, below coder.k = {self.k}; k falls from k_start to k.")

    def ramp(self, at: At) -> Ramp:
        """k over the training.

        Raises:
            ConfigError: more than there are latents.
        """
        name = "k_start" if self.k_start > self.k else "k"
        if (largest := getattr(self, name)) > at.width:
            raise ConfigError(
                f"coder.{name} is {largest} but there are only {at.width} latents; lower it or raise d_sae."
            )
        if not self.k_start:
            return Ramp.constant(self.k)
        return Ramp(self.k_start, self.k, max(1, round(self.k_anneal_fraction * at.steps)))


@register_sparsity
@dataclasses.dataclass(frozen=True)
class TopK(Sparsity[KSettings]):
    """Keeps the k largest pre-activations of each token (and group); ties go to the lower index.

    While k falls during training, `Ramp.largest` candidates are found and the first k(step) of them used.
    """

    k: Ramp
    name: ClassVar[str] = "topk"
    settings: ClassVar[type[Settings]] = KSettings
    sparse: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"k", "ranks"})

    @classmethod
    def build(cls, settings: KSettings, at: At) -> Self:
        return cls(settings.ramp(at))

    @property
    def kept(self) -> int:
        return round(self.k.largest)

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        indices = self.candidates(pre)
        return Latents(self.first(jax.nn.relu(keep(indices)), step), indices, pre.shape[-1])

    def candidates(self, score: jax.Array) -> jax.Array:
        """Indices of the largest scores, [..., K]; falling while k changes, for `first`."""
        return largest_of_rows(jax.lax.stop_gradient(score), min(self.kept, score.shape[-1]), bool(self.k.over))

    def first(self, values: jax.Array, step: jax.Array | int) -> jax.Array:
        """The values of the first k(step) candidates, 0 for the rest; all of them where k is constant."""
        if not self.k.over:
            return values
        ranks = jax.lax.broadcasted_iota(jnp.float32, values.shape, values.ndim - 1)
        return jnp.where(ranks < jnp.round(self.k(step)), values, 0)

    def inference(self, params: Params, stats: dict[str, jax.Array], shape: tuple[int, ...]) -> tuple[Any, Params]:
        return dataclasses.replace(self, k=Ramp.constant(self.k.end)), params
