"""The contract of a loss term: a small frozen object, `term(context) -> scalar`, and its settings."""

import dataclasses
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax

from saejax.coders.context import Context
from saejax.coders.ramp import At, Ramp
from saejax.core.settings import Settings, setting, settings_of

ONE = Ramp.constant(1.0)
TermSettings = TypeVar("TermSettings", bound=Settings)


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
