"""The names people use, as products of topology, sparsity and losses. A new name is a row of `PRESETS`."""

import dataclasses
import math
from collections.abc import Callable

from saejax.coders import losses
from saejax.coders.autoencoder import Autoencoder
from saejax.coders.coder import LONG_AGO, Coder
from saejax.coders.sparsity import Relu, TopK
from saejax.core.config import nearest
from saejax.core.errors import ConfigError

NORMALIZATIONS = ("mean_norm", "none")


@dataclasses.dataclass(frozen=True)
class CoderConfig:
    """Which sparse dictionary to train.

    Attributes:
        preset: `topk` or `standard`.
        d_sae: number of latents; 0 means expansion x d_in.
        expansion: latents for each input dimension, where d_sae is 0.
        k: latents kept for a token (topk).
        l1_coefficient: weight of the norm-weighted L1 (standard).
        l1_warmup_fraction: share of training over which that weight rises from 0.
        auxk_coefficient: weight of AuxK (topk).
        auxk_k: dead latents it may use for a token; 0 means d_in / 2.
        dead_after_tokens: a latent that has not fired for this long is dead.
        normalize: `mean_norm` scales activations so that their mean norm is sqrt(d_in); `none` leaves them.
            The scale is a constant from the store, and `saejax.load` folds it into the weights.
        matmul_dtype: operands of the forward pass's dense products, `bfloat16` or `float32`; sums and gradients are
            float32 always.
    """

    preset: str = "topk"
    d_sae: int = 0
    expansion: int = 8
    k: int = 32
    l1_coefficient: float = 5.0
    l1_warmup_fraction: float = 0.05
    auxk_coefficient: float = 1 / 32
    auxk_k: int = 0
    dead_after_tokens: int = 10_000_000
    normalize: str = "mean_norm"
    matmul_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ConfigError(f"coder.preset is {self.preset!r}.{nearest(self.preset, PRESETS)}")
        if self.normalize not in NORMALIZATIONS:
            remedy = nearest(self.normalize, NORMALIZATIONS)
            raise ConfigError(f"coder.normalize is {self.normalize!r}.{remedy}")
        if self.matmul_dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"coder.matmul_dtype is {self.matmul_dtype!r}; use bfloat16 or float32.")
        for name in ("expansion", "k", "dead_after_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"coder.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("d_sae", "l1_coefficient", "auxk_coefficient", "auxk_k", "l1_warmup_fraction"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"coder.{name} is {getattr(self, name)}; it must be finite, not negative.")
        if self.l1_warmup_fraction > 1:
            raise ConfigError(f"coder.l1_warmup_fraction is {self.l1_warmup_fraction}; it must be at most 1.")
        if self.dead_after_tokens > LONG_AGO:
            raise ConfigError(f"coder.dead_after_tokens is {self.dead_after_tokens}; it must be at most {LONG_AGO}.")

    def width(self, d_in: int) -> int:
        """F for an input of width D."""
        return self.d_sae or self.expansion * d_in


def build(config: CoderConfig, d_in: int, steps: int) -> Coder:
    """The coder for activations of width `d_in`, trained for `steps` steps.

    Raises:
        ConfigError: topk with k or auxk_k larger than the number of latents.
    """
    return PRESETS[config.preset](config, d_in, steps)


def _standard(c: CoderConfig, d_in: int, steps: int) -> Coder:
    """relu + norm-weighted L1, decoder free. (Anthropic, Circuits Updates April 2024)"""
    warmup = round(c.l1_warmup_fraction * steps)
    return Coder(
        topology=Autoencoder(d_in, c.width(d_in), decoder_norm=0.1, matmul_dtype=c.matmul_dtype),
        sparsity=Relu(),
        terms=(losses.Mse(), losses.NormWeightedL1(c.l1_coefficient, warmup)),
        unit_decoder=False,
        dead_after_tokens=c.dead_after_tokens,
    )


def _topk(c: CoderConfig, d_in: int, steps: int) -> Coder:
    """k latents a token, FVU + AuxK, unit decoder. (Gao et al. 2024, arXiv:2406.04093)"""
    width = c.width(d_in)
    if c.k > width:
        raise ConfigError(f"coder.k is {c.k} but there are only {width} latents; lower k or raise d_sae.")
    if c.auxk_k > width:
        raise ConfigError(f"coder.auxk_k is {c.auxk_k} but there are only {width} latents; lower it.")
    auxk = losses.AuxK(c.auxk_coefficient, min(c.auxk_k or max(1, d_in // 2), width))
    return Coder(
        topology=Autoencoder(d_in, width, matmul_dtype=c.matmul_dtype),
        sparsity=TopK(c.k),
        terms=(losses.Fvu(), auxk) if c.auxk_coefficient else (losses.Fvu(),),
        unit_decoder=True,
        dead_after_tokens=c.dead_after_tokens,
    )


PRESETS: dict[str, Callable[[CoderConfig, int, int], Coder]] = {"standard": _standard, "topk": _topk}
