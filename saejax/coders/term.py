"""The contract of a loss term: a small frozen object, `term(context) -> scalar`, and its settings."""

import dataclasses
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents
from saejax.coders.ramp import At, Ramp
from saejax.coders.sparsity.base import Keep, Sparsity
from saejax.coders.topology import Topology
from saejax.core.settings import Settings, setting, settings_of
from saejax.kernels.batch import mean_token, per_token

ONE = Ramp.constant(1.0)
TermSettings = TypeVar("TermSettings", bound=Settings)


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
        into: what the encoder reads, where it is not x (`encoded`).
        rows: `Topology.encoder_rows`, one for all whose gradients stay sparse.
        earlier: latents of an unrolled encoder's steps before the last (`lista`).
    """

    topology: Topology
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
    into: jax.Array | None = None
    rows: jax.Array | None = None
    earlier: tuple[Latents, ...] = ()

    @property
    def encoded(self) -> jax.Array:
        """[B, ...]: what `pre` are the pre-activations of."""
        return self.x if self.into is None else self.into

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


def weight(doc: str, sparsity: bool = False, **known: Any) -> Any:
    """The key of a term's coefficient: None is the preset's, 0 leaves the term out.

    A weight of `sparsity` rises from 0 during the warm-up, and a sweep over sparsity weights multiplies it. `known` are
    further attributes of `Setting`.
    """
    return setting(None, doc, low=0, base=0.0, sparsity_weight=sparsity, **known)


@dataclasses.dataclass(frozen=True)
class Term(Generic[TermSettings]):
    """A summand of the loss, under its `name` in the metrics: coefficient(step) x term(context).

    Attributes:
        needs: what the sparsity must provide for this term to make sense.
        settings: TermSettings, for those who have the class alone. Its first key is the term's `weight`.
    """

    coefficient: Ramp = ONE
    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    settings: ClassVar[type[Settings]] = Settings

    @classmethod
    def key(cls) -> str:
        return next(iter(settings_of(cls.settings)))

    @classmethod
    def is_sparsity_weight(cls) -> bool:
        """True if a sweep over sparsity weights multiplies the coefficient."""
        return any(known.sparsity_weight for known in settings_of(cls.settings).values())

    @classmethod
    def build(cls, coefficient: Ramp, settings: TermSettings, at: At) -> Self:
        """The term with these settings, in which the preset's values are filled in: its fields are their keys.

        Raises:
            ConfigError: they do not fit.
        """
        fields = list(settings_of(cls.settings))[1:]
        return cls(coefficient, *(getattr(settings, field) for field in fields))

    def __call__(self, c: Context) -> jax.Array:
        raise NotImplementedError

    def statistics(self) -> dict[str, float]:
        """Scalars that the term follows during training, by name, with the value they start at."""
        return {}

    def seen(self, c: Context) -> dict[str, jax.Array]:
        """Numbers of a batch that the statistics need; they add up over its parts."""
        return {}

    def follow(self, stats: dict[str, jax.Array], seen: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The statistics after a batch, from what was `seen` of all of it."""
        return {}
