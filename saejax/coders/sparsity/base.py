"""The contract of a sparsity: from pre-activations to latents."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar

import jax

from saejax.coders.latents import Latents, Params
from saejax.coders.ramp import At
from saejax.core.settings import Settings, settings_of

Keep = Callable[..., jax.Array]
S = TypeVar("S", bound=Settings)


def gradient_alone(parameter: jax.Array) -> jax.Array:
    """Zeros that carry the parameter's gradient."""
    return parameter - jax.lax.stop_gradient(parameter)


class Sparsity(Generic[S]):
    """(pre [..., F], keep, params, step) -> Latents; the leading axes are tokens (and groups).

    `keep(indices [..., K]) -> pre at the indices [..., K]` gives a sparse activation its values with a gradient
    that never builds [..., F]; a dense activation ignores it and differentiates through `pre`. Of a list for the batch
    `keep(indices [P], rows [P])` gives [P].

    A sparsity is a frozen dataclass with this contract and the dataclass of its settings, S, under
    `register_sparsity`, which makes these keys of `coder`.

    Attributes:
        name: as in `coder.sparsity=name`.
        settings: S, for those who have the class alone.
        sparse: latents are (values, indices).
        provides: what loss terms may ask for: `threshold` (a learned one, with its soft count), `gate`, `k`,
            `ranks` (a list for each token, which can be ordered by size), `dense` (pre-activations with a gradient).
        like_latents: its parameters that are in the latents' unit: latents c times as large have them c times as large.
        bias_rate: at how many times the learning rate b_enc should learn at least, where the encoder has a centre.
    """

    name: ClassVar[str]
    settings: ClassVar[type[Settings]] = Settings
    sparse: ClassVar[bool] = False
    provides: ClassVar[frozenset[str]] = frozenset({"dense"})
    like_latents: ClassVar[tuple[str, ...]] = ()
    bias_rate: ClassVar[float] = 2.0

    @classmethod
    def build(cls, settings: S, at: At) -> Self:
        """The sparsity with these settings, in which the preset's values are filled in: its fields are their keys.

        Raises:
            ConfigError: they do not fit.
        """
        return cls(*(getattr(settings, field) for field in settings_of(cls.settings)))

    def for_loss(self, needs: frozenset[str]) -> "Sparsity":
        """The same selection in the form that a loss is quickest with, whose terms need `needs` of it."""
        return self

    @property
    def kept(self) -> int:
        """The most latents that are kept for a token; 0 where no number of them is."""
        return 0

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        raise NotImplementedError

    def parameters(self) -> dict[str, float]:
        """Learned numbers of each latent, by name, with the value they start at."""
        return {}

    def statistics(self) -> dict[str, float]:
        """Scalars that are followed during training, by name, with the value they start at."""
        return {}

    def seen(self, latents: Latents) -> dict[str, jax.Array]:
        """Numbers of a batch that the statistics need; they add up over its parts."""
        return {}

    def follow(
        self, stats: dict[str, jax.Array], seen: dict[str, jax.Array], step: jax.Array | int
    ) -> dict[str, jax.Array]:
        """The statistics after a batch, from what was `seen` of all of it; `step` counts the steps before it."""
        return {}

    def inference(self, params: Params, stats: dict[str, jax.Array], shape: tuple[int, ...]) -> tuple[Any, Params]:
        """(sparsity, params) for single tokens after training; `shape` is that of one token's latents."""
        return self, params

    def biased(self, params: Params, gain: jax.Array) -> Params:
        """Parameters with the same latents where x' W_enc is `gain` less, [F] or [G, F]."""
        return params | {"b_enc": params["b_enc"] + gain}

    def short_of(self, highest: jax.Array, params: Params) -> jax.Array:
        """[F] or [G, F] >= 0: how far below 0 latents are whose largest pre-activation is `highest`, a constant.

        The derivatives by the parameters say what raises them (`lift.Lift`).
        """
        return jax.nn.relu(-highest - gradient_alone(params["b_enc"]))

    def penalised(self, pre: jax.Array, latents: Latents, params: Params) -> jax.Array:
        """[..., F] >= 0: what a sparsity penalty is about."""
        return latents.dense()
