"""Loss terms that ask for fewer latents, and for more where a threshold keeps them silent.

Means over tokens, so that a coefficient means the same for every batch size.
"""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.parts import register_term
from saejax.coders.ramp import At, Ramp
from saejax.coders.term import ONE, Context, Term, weight
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import for_tokens, mean_token, per_token


@dataclasses.dataclass(frozen=True)
class L1Settings(Settings, section="coder"):
    l1_coefficient: float | None = weight("Weight of sum f ||W_dec||.", sparsity=True)


@register_term
@dataclasses.dataclass(frozen=True)
class NormWeightedL1(Term[L1Settings]):
    """mean_b sum_f f ||W_dec,f||

    Weighted by the decoder norm, so that shrinking latents and growing decoder rows does not pay.
    (Anthropic, Circuits Updates April 2024)
    """

    name: ClassVar[str] = "l1"
    settings: ClassVar[type[Settings]] = L1Settings

    def __call__(self, c: Context) -> jax.Array:
        return per_token(_weighted(c))


@dataclasses.dataclass(frozen=True)
class LpSettings(Settings, section="coder"):
    lp_coefficient: float | None = weight("Weight of sum (f ||W_dec||)^p.", sparsity=True)
    lp_end: float = setting(0.2, "p falls from 1 to this.", above=0, high=1)
    lp_updates: int = setting(10, "The number of equal steps in which p falls.", low=1)
    lp_after_fraction: float = setting(0.2, "The share of training after which p falls.", low=0, high=1)


@register_term
@dataclasses.dataclass(frozen=True)
class AnnealedLp(Term[LpSettings]):
    """s mean_b sum_f (f ||W_dec,f||)^p, p falling from 1 in `updates` equal steps while s keeps the term as large.

    At each update s is multiplied by the batch's sum at the old p over that at the new one, so that the falling
    power changes the shape of the penalty and not its weight. A batch of zeros leaves s as it is.
    (Karvonen et al. 2024, arXiv:2408.00113)
    """

    p: Ramp = ONE
    updates: int = 10
    name: ClassVar[str] = "lp"
    settings: ClassVar[type[Settings]] = LpSettings

    @classmethod
    def build(cls, coefficient: Ramp, settings: LpSettings, at: At) -> Self:
        after = round(settings.lp_after_fraction * at.steps)
        return cls(coefficient, Ramp(1.0, settings.lp_end, max(1, at.steps - after), after), settings.lp_updates)

    def __call__(self, c: Context) -> jax.Array:
        return c.stats["lp_scale"] * per_token(self._powers(c, self._power(c.step)))

    def statistics(self) -> dict[str, float]:
        return {"lp_scale": 1.0}

    def seen(self, c: Context) -> dict[str, jax.Array]:
        """The batch's sums at the power of this step and of the next; 1 and 1 where they are the same power."""
        now, after = self._power(c.step), self._power(c.step + 1)
        ones_B = jnp.ones(c.x.shape[0], jnp.float32)
        # Sums over a batch stay out of the branch, as in AuxK.
        sums = jax.lax.cond(
            now != after,
            lambda: [self._powers(c, p).reshape(*ones_B.shape, -1).sum(-1) for p in (now, after)],
            lambda: [ones_B, ones_B],
        )
        return dict(zip(("lp", "lp_next"), (per_token(jax.lax.stop_gradient(sum_B)) for sum_B in sums), strict=True))

    def follow(self, stats: dict[str, jax.Array], seen: dict[str, jax.Array]) -> dict[str, jax.Array]:
        some = seen["lp_next"] > 0
        ratio = jnp.where(some, seen["lp"] / jnp.where(some, seen["lp_next"], 1), 1)
        return {"lp_scale": stats["lp_scale"] * ratio}

    def _power(self, step: jax.Array) -> jax.Array:
        """p at `step`: the ramp, held between updates."""
        return self.p.at(jnp.floor(self.p.done(step) * self.updates + 1e-4) / self.updates)

    def _powers(self, c: Context, p: jax.Array) -> jax.Array:
        """(f ||W_dec,f||)^p, [B, F] or [B, L, F]."""
        # Below 1 the power has an infinite slope at 0: what is 0 stays out, what is tiny counts as 1e-6.
        f = _weighted(c)
        return jnp.where(f > 0, jnp.power(jnp.maximum(f, 1e-6), p), 0)


@dataclasses.dataclass(frozen=True)
class TanhSettings(Settings, section="coder"):
    tanh_coefficient: float | None = weight("Weight of sum tanh(tanh_scale f ||W_dec||).", sparsity=True)
    tanh_scale: float = setting(4.0, "Slope of the tanh at 0.", above=0)


@register_term
@dataclasses.dataclass(frozen=True)
class Tanh(Term[TanhSettings]):
    """mean_b sum_f tanh(scale f ||W_dec,f||): a count that saturates. (Anthropic, January 2025)"""

    scale: float = 4.0
    name: ClassVar[str] = "tanh"
    settings: ClassVar[type[Settings]] = TanhSettings

    def __call__(self, c: Context) -> jax.Array:
        return per_token(jnp.tanh(self.scale * _weighted(c)))


@dataclasses.dataclass(frozen=True)
class L0Settings(Settings, section="coder"):
    l0_coefficient: float | None = weight("Weight of the number of latents that fire (jumprelu).", sparsity=True)


@register_term
@dataclasses.dataclass(frozen=True)
class L0(Term[L0Settings]):
    """mean_b sum_f 1[pre > theta], with the straight-through gradient of `JumpRelu.soft_l0`. (arXiv:2407.14435)"""

    name: ClassVar[str] = "l0_loss"
    needs: ClassVar[frozenset[str]] = frozenset({"threshold"})
    settings: ClassVar[type[Settings]] = L0Settings

    def __call__(self, c: Context) -> jax.Array:
        return per_token(_fires(c))


@dataclasses.dataclass(frozen=True)
class TargetL0Settings(Settings, section="coder"):
    target_l0_coefficient: float | None = weight("Weight of (L0 / target_l0 - 1)^2 (jumprelu).", sparsity=True)
    target_l0: float = setting(32.0, "The number of latents a token that the thresholds are drawn to.", above=0)
    target_l0_of: str = setting(
        "",
        "Whose L0 that is: batch, the mean of all tokens; or token, each token's own, and the mean of the squares.",
        choices=("batch", "token"),
        base="batch",
    )
    target_l0_start: float | None = setting(
        None,
        "b_enc starts so that this times target_l0 latents fire for a token, each equally often; 0 leaves it to "
        "firing_rate_init, which goes before.",
        low=0,
        base=0.0,
    )


@register_term
@dataclasses.dataclass(frozen=True)
class TargetL0(Term[TargetL0Settings]):
    """(L0 / T - 1)^2 of the batch's mean L0, or mean_b (L0_b / T - 1)^2 of each token's: the sparsity is chosen.

    Of the batch: arXiv:2407.14435, appendix. Of each token: Gemma Scope 2, technical report, section 2.3, equation 5,
    lambda (2 / T) (L0_b - T)^2, which is this with the coefficient 2 lambda T. It also asks tokens for equal counts.
    """

    target: float = 32.0
    each: bool = False
    name: ClassVar[str] = "target_l0"
    needs: ClassVar[frozenset[str]] = frozenset({"threshold"})
    settings: ClassVar[type[Settings]] = TargetL0Settings

    @classmethod
    def build(cls, coefficient: Ramp, settings: TargetL0Settings, at: At) -> Self:
        return cls(coefficient, settings.target_l0, settings.target_l0_of == "token")

    def __call__(self, c: Context) -> jax.Array:
        fires = _fires(c)
        if not self.each:
            return jnp.square(per_token(fires) / self.target - 1)
        return per_token(jnp.square(fires.sum(tuple(range(1, fires.ndim))) / self.target - 1))


@dataclasses.dataclass(frozen=True)
class FrequencySettings(Settings, section="coder"):
    frequency_coefficient: float | None = weight("Weight of sum p^2 / frequency_scale (jumprelu).", sparsity=True)
    frequency_scale: float = setting(
        0.1, "The share of tokens at which that sum costs a latent as much as a plain count of it.", above=0, high=1
    )


@register_term
@dataclasses.dataclass(frozen=True)
class FiringFrequency(Term[FrequencySettings]):
    """sum_f p_f^2 / s,   p_f = mean_b 1[pre > theta]: a price on latents that fire often, in latents a token.

    Beside L0 = sum_f p_f it is small for a latent that fires on fewer tokens than s, and larger beyond. The gradient is
    that of `JumpRelu.soft_l0`. p_f is of the whole batch; of a part of it where a batch is computed in parts.

    It is the second term of the "quadratic-frequency" penalty L0 + sum_f p_f^2 / s, with s near 0.1 (Google DeepMind,
    "Negative Results for SAEs On Downstream Tasks", March 2025, "Removing High Frequency Latents": the formula is given
    in words there, as the copy read had lost its symbols). Gemma Scope 2 (technical report, section 2.3) adds a penalty
    on frequency to the quadratic L0 without saying its form: that it is this one is our choice.
    """

    scale: float = 0.1
    name: ClassVar[str] = "frequency"
    needs: ClassVar[frozenset[str]] = frozenset({"threshold"})
    settings: ClassVar[type[Settings]] = FrequencySettings

    def __call__(self, c: Context) -> jax.Array:
        return jnp.square(mean_token(_fires(c))).sum() / self.scale


@dataclasses.dataclass(frozen=True)
class PreActivationSettings(Settings, section="coder"):
    pre_activation_coefficient: float | None = weight("Weight of sum relu(theta - pre) ||W_dec|| (jumprelu).")
    pre_activation_dead_only: bool = setting(False, "That sum runs over dead latents alone.")


@register_term
@dataclasses.dataclass(frozen=True)
class PreActivation(Term[PreActivationSettings]):
    """mean_b sum_f relu(theta - pre) ||W_dec,f||: draws latents that do not fire towards firing.

    The gradient reaches the encoder, the thresholds and the decoder rows. `dead_only`: the sum runs over dead latents
    (SAELens); else over all (Anthropic, Circuits Updates January 2025).
    """

    dead_only: bool = False
    name: ClassVar[str] = "pre_activation"
    needs: ClassVar[frozenset[str]] = frozenset({"threshold"})
    settings: ClassVar[type[Settings]] = PreActivationSettings

    def __call__(self, c: Context) -> jax.Array:
        # build() has seen that it provides it
        distance = c.sparsity.below(c.pre, c.params)  # type: ignore[attr-defined]
        distance = distance * for_tokens(c.topology.decoder_norms(c.params), len(distance))
        return per_token(jnp.where(c.dead[None] | (not self.dead_only), distance, 0))


def _weighted(c: Context) -> jax.Array:
    """f ||W_dec,f||, [B, F]."""
    f = c.sparsity.penalised(c.pre, c.latents, c.params)
    return f * for_tokens(c.topology.decoder_norms(c.params), len(f))


def _fires(c: Context) -> jax.Array:
    """1[pre > theta] with its straight-through gradient, [B, F]."""
    # build() has seen that it provides it
    fires: jax.Array = c.sparsity.soft_l0(c.pre, c.params)  # type: ignore[attr-defined]
    return fires
