"""Loss terms: each a small frozen object, `term(context) -> scalar`; a coder adds up weight x term.

Sums run over the model width (and sites), means over tokens, so that a coefficient means the same for every batch size.
A new term is a class here, the dataclass of its settings and a line in `TERMS`, which makes them keys of `coder`.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.auxk import AuxK
from saejax.coders.context import Context, squared_error
from saejax.coders.latents import Latents, ListedLatents
from saejax.coders.ramp import At, Ramp
from saejax.coders.temporal import Contrastive
from saejax.coders.term import ONE, Term, weight
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import per_token
from saejax.kernels.dense import EXACT
from saejax.kernels.listed import decode_listed
from saejax.kernels.norms import unit_rows
from saejax.kernels.shards import shards_of

# --- reconstruction ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Mse(Term):
    """mean_b sum_d (y - y_hat)^2"""

    name: ClassVar[str] = "mse"

    def __call__(self, c: Context) -> jax.Array:
        return self.of(c, c.y_hat)

    def of(self, c: Context, y_hat: jax.Array) -> jax.Array:
        return squared_error(c.y, y_hat)


@dataclasses.dataclass(frozen=True)
class Fvu(Term):
    """sum (y - y_hat)^2 / sum (y - mean y)^2 over the batch: 1 - FVE."""

    name: ClassVar[str] = "fvu"

    def __call__(self, c: Context) -> jax.Array:
        return self.of(c, c.y_hat)

    def of(self, c: Context, y_hat: jax.Array) -> jax.Array:
        return squared_error(c.y, y_hat) / c.variance


RECONSTRUCTIONS: dict[str, type[Mse | Fvu]] = {"fvu": Fvu, "mse": Mse}


@dataclasses.dataclass(frozen=True)
class ReconstructionSettings(Settings, section="coder"):
    """What the error is measured of, and how."""

    reconstruction: str = setting(
        "", "fvu (variance unexplained) or mse (sum over the width).", choices=RECONSTRUCTIONS, base="fvu"
    )
    prefixes: tuple[float, ...] = setting(
        (),
        "Matryoshka: the loss is the mean over the first n latents, for each n here (a count, or a share of the "
        "latents where at most 1); rising, and ending with all latents. Empty: only all latents.",
        low=0,
    )

    def term(self, at: At) -> "Mse | Fvu | Matryoshka":
        """The reconstruction's summand of the loss."""
        error = RECONSTRUCTIONS[self.reconstruction]()
        return Matryoshka(error=error, prefixes=self.counts(at.width)) if self.prefixes else error

    def counts(self, width: int) -> tuple[int, ...]:
        """The prefixes as numbers of latents.

        Raises:
            ConfigError: they do not rise, or do not end with all latents.
        """
        counts = tuple(round(p * width) if p <= 1 else int(p) for p in self.prefixes)
        rising = all(a < b for a, b in zip((0, *counts), counts, strict=False))
        if not rising or counts[-1] != width:
            raise ConfigError(
                f"coder.prefixes {self.prefixes} are {counts} of {width} latents; they must rise and end with {width} "
                "(or 1.0), so that each contains the one before."
            )
        return counts


@dataclasses.dataclass(frozen=True)
class Matryoshka(Term):
    """mean over prefixes m of error(y, y_hat from the first m latents alone).

    `prefixes` rise and end at F, so that the whole coder is one of them. The mean, not the sum: another number of
    prefixes does not change what AuxK weighs beside it. One selection of latents serves all prefixes.
    (Bussmann et al. 2025, arXiv:2503.17547)
    """

    error: Mse | Fvu = Mse()
    prefixes: tuple[int, ...] = ()
    name: ClassVar[str] = "matryoshka"

    def __call__(self, c: Context) -> jax.Array:
        if isinstance(c.latents, ListedLatents) and len(c.latents.leading) == 1:
            return self._of_list(c, c.latents)
        total, start, errors = c.topology.decode(c.params, _none(c.latents), c.x), 0, jnp.float32(0)
        for stop in self.prefixes:
            total = total + c.topology.decode_without_bias(*_block(c, start, stop), c.x)
            errors, start = errors + self.error.of(c, total), stop
        return errors / len(self.prefixes)

    def _of_list(self, c: Context, latents: ListedLatents) -> jax.Array:
        """Every kept latent is decoded once, into the sum of its block; the prefixes add the blocks up."""
        (rows_FR,), n = c.topology.decoder_rows(c.params), len(self.prefixes)
        block = jnp.searchsorted(jnp.asarray(self.prefixes), latents.at, side="right").astype(jnp.int32)
        # Pairs that there are not stay beyond the last row.
        sums_BMR = decode_listed(
            latents.values, latents.rows * n + block, latents.at, (rows_FR,), latents.leading[0], n
        )
        none = c.topology.decode(c.params, _none(latents), c.x)
        prefixes = jnp.cumsum(sums_BMR.reshape(latents.leading[0], n, -1), axis=1)
        errors = [self.error.of(c, none + c.topology.written_by(c.params, prefixes[:, m], c.x)) for m in range(n)]
        return jnp.stack(errors).sum() / n


def _none(latents: Latents) -> Latents:
    """One kept latent a token, of value 0: what decodes to the biases alone."""
    if isinstance(latents, ListedLatents):
        zero = jnp.zeros((*latents.leading, 1), latents.values.dtype)
    else:
        zero = jnp.zeros_like(latents.values[..., :1])
    return Latents(zero, zero.astype(jnp.int32), latents.d_sae)


def _block(c: Context, start: int, stop: int) -> tuple[dict[str, jax.Array], Latents]:
    """(params, latents) of the latents start..stop alone."""
    if c.latents.indices is None:
        if shards_of(c.x.shape[0], c.latents.d_sae).n_along_latents > 1:
            # A block of latents that are split over devices lies on few of them, and taking it would move it to all.
            place = jax.lax.broadcasted_iota(jnp.int32, c.latents.values.shape, c.latents.values.ndim - 1)
            values = jnp.where((place >= start) & (place < stop), c.latents.values, 0)
            return c.params, dataclasses.replace(c.latents, values=values)
        block = slice(start, stop)
        return c.topology.restrict(c.params, block), Latents(c.latents.values[..., block], None, stop - start)
    inside = (c.latents.indices >= start) & (c.latents.indices < stop)
    return c.params, dataclasses.replace(c.latents, values=jnp.where(inside, c.latents.values, 0))


@dataclasses.dataclass(frozen=True)
class GateSettings(Settings, section="coder"):
    gate_coefficient: float | None = weight("Weight of the reconstruction through the gate (gated).")


@dataclasses.dataclass(frozen=True)
class GateReconstruction(Term[GateSettings]):
    """mean_b sum_d (y - decode(relu(gate)))^2, decoder and biases frozen: what teaches a gate to reconstruct.

    (Rajamanoharan et al. 2024, arXiv:2404.16014, L_aux)
    """

    name: ClassVar[str] = "gate_reconstruction"
    needs: ClassVar[frozenset[str]] = frozenset({"gate"})
    settings: ClassVar[type[Settings]] = GateSettings

    def __call__(self, c: Context) -> jax.Array:
        frozen = jax.lax.stop_gradient(c.params)
        gate = Latents(jax.nn.relu(c.pre), None, c.pre.shape[-1])
        return squared_error(c.y, c.topology.decode(frozen, gate, c.x))


@dataclasses.dataclass(frozen=True)
class MultiTopKSettings(Settings, section="coder"):
    multi_topk_coefficient: float | None = weight("Weight of a second reconstruction, from more latents.")
    multi_topk_factor: int = setting(4, "The second reconstruction has this many times k latents.", low=1)


@dataclasses.dataclass(frozen=True)
class MultiTopK(Term[MultiTopKSettings]):
    """FVU of a second reconstruction, from the `factor` x k largest latents. (Gao et al. 2024, appendix A.4)"""

    factor: int = 4
    name: ClassVar[str] = "multi_topk"
    needs: ClassVar[frozenset[str]] = frozenset({"k"})
    settings: ClassVar[type[Settings]] = MultiTopKSettings

    @classmethod
    def build(cls, coefficient: Ramp, settings: MultiTopKSettings, at: At) -> Self:
        if (wide := at.kept * settings.multi_topk_factor) > at.width:
            raise ConfigError(
                f"coder.multi_topk_factor x k is {wide} but there are only {at.width} latents; lower one of them or "
                "raise d_sae."
            )
        return cls(coefficient, settings.multi_topk_factor)

    def __call__(self, c: Context) -> jax.Array:
        k: Ramp = c.sparsity.k  # type: ignore[attr-defined]  # build() has seen that it provides k
        more = dataclasses.replace(k, start=k.start * self.factor, end=k.end * self.factor)
        wide = dataclasses.replace(c.sparsity, k=more)  # type: ignore[type-var]
        latents = wide(c.pre, c.keep, c.params, c.step)
        return squared_error(c.y, c.topology.decode(c.params, latents, c.x)) / c.variance


# --- sparsity ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class L1Settings(Settings, section="coder"):
    l1_coefficient: float | None = weight("Weight of sum f ||W_dec||.", sparsity=True)


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


@dataclasses.dataclass(frozen=True)
class Tanh(Term[TanhSettings]):
    """mean_b sum_f tanh(scale f ||W_dec,f||): a count that saturates. (Anthropic, January 2025)"""

    scale: float = 4.0
    name: ClassVar[str] = "tanh"
    settings: ClassVar[type[Settings]] = TanhSettings

    @classmethod
    def build(cls, coefficient: Ramp, settings: TanhSettings, at: At) -> Self:
        return cls(coefficient, settings.tanh_scale)

    def __call__(self, c: Context) -> jax.Array:
        return per_token(jnp.tanh(self.scale * _weighted(c)))


@dataclasses.dataclass(frozen=True)
class L0Settings(Settings, section="coder"):
    l0_coefficient: float | None = weight("Weight of the number of latents that fire (jumprelu).", sparsity=True)


@dataclasses.dataclass(frozen=True)
class L0(Term[L0Settings]):
    """mean_b sum_f 1[pre > theta], with the straight-through gradient of `JumpRelu.soft_l0`. (arXiv:2407.14435)"""

    name: ClassVar[str] = "l0_loss"
    needs: ClassVar[frozenset[str]] = frozenset({"threshold"})
    settings: ClassVar[type[Settings]] = L0Settings

    def __call__(self, c: Context) -> jax.Array:
        return _soft_l0(c)


@dataclasses.dataclass(frozen=True)
class TargetL0Settings(Settings, section="coder"):
    target_l0_coefficient: float | None = weight("Weight of (L0 / target_l0 - 1)^2 (jumprelu).", sparsity=True)
    target_l0: float = setting(32.0, "The number of latents a token that the thresholds are drawn to.", above=0)


@dataclasses.dataclass(frozen=True)
class TargetL0(Term[TargetL0Settings]):
    """(L0 / target - 1)^2, so that the sparsity is chosen instead of searched for. (arXiv:2407.14435, appendix)"""

    target: float = 32.0
    name: ClassVar[str] = "target_l0"
    needs: ClassVar[frozenset[str]] = frozenset({"threshold"})
    settings: ClassVar[type[Settings]] = TargetL0Settings

    @classmethod
    def build(cls, coefficient: Ramp, settings: TargetL0Settings, at: At) -> Self:
        return cls(coefficient, settings.target_l0)

    def __call__(self, c: Context) -> jax.Array:
        return jnp.square(_soft_l0(c) / self.target - 1)


@dataclasses.dataclass(frozen=True)
class PreActivationSettings(Settings, section="coder"):
    pre_activation_coefficient: float | None = weight("Weight of sum relu(theta - pre) ||W_dec|| (jumprelu).")
    pre_activation_dead_only: bool = setting(False, "That sum runs over dead latents alone.")


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

    @classmethod
    def build(cls, coefficient: Ramp, settings: PreActivationSettings, at: At) -> Self:
        return cls(coefficient, settings.pre_activation_dead_only)

    def __call__(self, c: Context) -> jax.Array:
        norms = c.topology.decoder_norms(c.params)[None]
        distance = c.sparsity.below(c.pre, c.params) * norms  # type: ignore[attr-defined]
        return per_token(jnp.where(c.dead[None] | (not self.dead_only), distance, 0))


def _weighted(c: Context) -> jax.Array:
    """f ||W_dec,f||, [B, F]."""
    return c.sparsity.penalised(c.pre, c.latents, c.params) * c.topology.decoder_norms(c.params)[None]


def _soft_l0(c: Context) -> jax.Array:
    # build() has seen that it provides it
    return per_token(c.sparsity.soft_l0(c.pre, c.params))  # type: ignore[attr-defined]


# --- dead latents ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GhostSettings(Settings, section="coder"):
    ghost_coefficient: float | None = weight("Weight of ghost gradients for dead latents.")


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


# --- shape of the decoder ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DecorrelationSettings(Settings, section="coder"):
    decorrelation_coefficient: float | None = weight("Weight of the mean squared cosine between decoder rows.")


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


# The loss adds them up in this order, after the reconstruction. Their settings are keys of `coder`.
TERMS: list[type[Term[Any]]] = [
    NormWeightedL1,
    AnnealedLp,
    Tanh,
    L0,
    TargetL0,
    PreActivation,
    GateReconstruction,
    MultiTopK,
    AuxK,
    GhostGradients,
    Contrastive,
    Decorrelation,
]
