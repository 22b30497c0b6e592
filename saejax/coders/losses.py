"""Loss terms: each a small frozen object, `term(context) -> scalar`; a coder adds up weight x term.

Sums run over the model width (and sites), means over tokens, so that a coefficient means the same for every batch size.
The reconstruction stands in `error.py` and `nested.py`, what penalises latents in `penalties.py`, the others here. A
new term is a class, the dataclass of its settings and a line in `TERMS`, which makes them keys of `coder`.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from saejax.coders.auxk import AuxK
from saejax.coders.context import Context, squared_error
from saejax.coders.latents import Latents
from saejax.coders.lift import Lift
from saejax.coders.penalties import L0, AnnealedLp, FiringFrequency, NormWeightedL1, PreActivation, Tanh, TargetL0
from saejax.coders.ramp import At, Ramp
from saejax.coders.temporal import Contrastive
from saejax.coders.term import Term, weight
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.kernels.dense import EXACT
from saejax.kernels.norms import unit_rows

# --- second reconstructions --------------------------------------------------------------------------------


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
    FiringFrequency,
    PreActivation,
    GateReconstruction,
    MultiTopK,
    AuxK,
    Lift,
    GhostGradients,
    Contrastive,
    Decorrelation,
]
