"""Second reconstructions of a batch: through the gate alone, and from more latents."""

import dataclasses
from typing import ClassVar, Self

import jax

from saejax.coders.latents import Latents
from saejax.coders.parts import register_term
from saejax.coders.ramp import At, Ramp
from saejax.coders.term import Context, Term, squared_error, weight
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class GateSettings(Settings, section="coder"):
    gate_coefficient: float | None = weight("Weight of the reconstruction through the gate (gated).")


@register_term
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


@register_term
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
