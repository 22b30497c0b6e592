"""f = pre where pre > theta, else 0, with a learned threshold theta for each latent. (arXiv:2407.14435, 2408.05147)

The threshold is kept as it is, in float32: under Adam, a logarithm of it would move by lr x theta a step and freeze.
Straight-through estimators, rect(u) = 1 for |u| < 1/2:

    d f / d theta = -(theta / eps) rect((pre - theta) / eps),    d f / d pre = 1[pre > theta]
    d H / d theta = -(1 / eps) rect((pre - theta) / eps)         for H = 1[pre > theta]
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from saejax.coders.latents import Latents, Params
from saejax.coders.parts import register_sparsity
from saejax.coders.sparsity.base import Keep, Sparsity
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import for_tokens


@dataclasses.dataclass(frozen=True)
class JumpReluSettings(Settings, section="coder"):
    """The thresholds' start and gradients."""

    threshold_init: float | None = setting(None, "Where jumprelu's thresholds start.", low=0, base=0.001)
    bandwidth: float | None = setting(
        None, "Width of the window around a threshold in which it has a gradient.", above=0, base=0.01
    )
    l0_through_input: bool = setting(False, "The gradient of jumprelu's L0 also reaches the pre-activations.")


@register_sparsity
@dataclasses.dataclass(frozen=True)
class JumpRelu(Sparsity[JumpReluSettings]):
    """Attributes:
    threshold: where theta starts; a negative parameter acts as 0 and can come back.
    bandwidth: eps, the width of the window in which the threshold has a gradient, in units of pre.
    through_input: the soft count H also passes +(1 / eps) rect on to pre.
    """

    threshold: float = 0.0
    bandwidth: float = 1.0
    through_input: bool = False
    name: ClassVar[str] = "jumprelu"
    settings: ClassVar[type[Settings]] = JumpReluSettings
    provides: ClassVar[frozenset[str]] = frozenset({"dense", "threshold"})
    like_latents: ClassVar[tuple[str, ...]] = ("threshold",)

    def __call__(self, pre: jax.Array, keep: Keep, params: Params, step: jax.Array | int) -> Latents:
        theta, move = self._theta(pre, params)
        window = self._window(pre, theta)
        return Latents(jnp.where(pre > theta, pre, 0) - window * theta * move, None, pre.shape[-1])

    def soft_l0(self, pre: jax.Array, params: Params) -> jax.Array:
        """H = 1[pre > theta] with the gradient above, [..., F]."""
        theta, move = self._theta(pre, params)
        window = self._window(pre, theta)
        enter = pre - jax.lax.stop_gradient(pre) if self.through_input else 0.0
        return (pre > theta).astype(jnp.float32) + window * (enter - move)

    def below(self, pre: jax.Array, params: Params) -> jax.Array:
        """relu(theta - pre), [..., F]: how far a latent is from firing, with its plain derivatives."""
        return jax.nn.relu(for_tokens(jax.nn.relu(params["threshold"]), len(pre)) - pre)

    def short_of(self, highest: jax.Array, params: Params) -> jax.Array:
        """The thresholds as well: relu(theta - highest), so that those which nothing reaches come down."""
        return super().short_of(highest, params) + self.below(highest[None], params)[0]

    def parameters(self) -> dict[str, float]:
        return {"threshold": self.threshold}

    def _theta(self, pre: jax.Array, params: Params) -> tuple[jax.Array, jax.Array]:
        """(theta >= 0 without gradient, a zero that carries the gradient of theta), both of the shape of pre."""
        raw = for_tokens(params["threshold"], len(pre))
        return jax.lax.stop_gradient(jax.nn.relu(raw)), raw - jax.lax.stop_gradient(raw)

    def _window(self, pre: jax.Array, theta: jax.Array) -> jax.Array:
        """(1 / eps) rect((pre - theta) / eps)"""
        inside = jnp.abs(jax.lax.stop_gradient(pre) - theta) < self.bandwidth / 2
        return inside.astype(jnp.float32) / self.bandwidth
