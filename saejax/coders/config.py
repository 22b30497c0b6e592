"""What a coder may be told. A key left at its default takes the preset's value; `resolved` fills them in."""

import dataclasses
import math
from typing import Any

from saejax.coders.initialisation import INITS
from saejax.coders.ramp import Ramp
from saejax.coders.recipes import BASE, RECIPES
from saejax.coders.sparsity import SPARSITIES
from saejax.coders.topologies import TOPOLOGIES
from saejax.core.config import in_float32, nearest
from saejax.core.errors import ConfigError

NORMALIZATIONS = ("mean_norm", "mean_square", "none")
RECONSTRUCTIONS = ("fvu", "mse")
CENTRES = ("mean", "geometric_median", "zeros")
# Where the counter of tokens since a latent fired stops, so that it cannot overflow int32.
LONG_AGO = 2**30


@dataclasses.dataclass(frozen=True)
class CoderConfig:
    """Which sparse dictionary to train: a preset, and what of it to change.

    Keys that are empty or None by default come from the preset (`recipes.py`); those set here win.

    Attributes:
        preset: a name of RECIPES, as topk, batchtopk, jumprelu, gated, matryoshka, transcoder, crosscoder, clt.
        topology: autoencoder, transcoder, skip_transcoder, crosscoder or clt.
        sparsity: relu, gated, topk, abs_topk, batchtopk or jumprelu.
        d_sae: number of latents (of each layer, for a clt); 0 means expansion x d_in.
        expansion: latents for each input dimension, where d_sae is 0.
        k: latents kept for a token (topk, abs_topk, batchtopk); for a clt, for a token and layer.
        k_start, k_anneal_fraction: k falls from k_start (0: no annealing) over this first share of training.
        threshold_decay: of the moving average behind batchtopk's threshold.
        threshold_init, bandwidth: where jumprelu's threshold starts; the window in which it has a gradient.
        l0_through_input: the gradient of jumprelu's L0 also reaches the pre-activations.
        reconstruction: fvu (variance unexplained) or mse (sum over the width).
        prefixes: matryoshka: the loss is the mean over the first n latents, for each n here (a count, or a share of
            the latents where at most 1); rising, and ending with all latents. Empty: only all latents.
        l1_coefficient: weight of sum f ||W_dec||.
        lp_coefficient, lp_end, lp_updates, lp_after_fraction: weight of sum (f ||W_dec||)^p; p falls from 1 to lp_end
            in lp_updates steps after this share of training.
        tanh_coefficient, tanh_scale: weight of sum tanh(scale f ||W_dec||).
        l0_coefficient: weight of jumprelu's L0.
        target_l0_coefficient, target_l0: weight of (L0 / target - 1)^2 (jumprelu).
        pre_activation_coefficient, pre_activation_dead_only: weight of sum relu(theta - pre) ||W_dec|| (jumprelu).
        sparsity_warmup_fraction: share of training over which the weights of l1, lp, tanh and l0 rise from 0.
        gate_coefficient: weight of the reconstruction through the gate (gated).
        multi_topk_coefficient, multi_topk_factor: weight of a second reconstruction with factor x k latents.
        auxk_coefficient: weight of AuxK.
        auxk_k: dead latents it may use for a token; 0 means d_in / 2.
        ghost_coefficient: weight of ghost gradients for dead latents.
        decorrelation_coefficient: weight of the mean squared cosine between decoder rows.
        dead_after_tokens: a latent that has not fired for this long is dead.
        init: transpose, kaiming, uniform or zero_decoder.
        decoder_norm: length of decoder rows at the start.
        encoder_scale: W_enc starts at this times what `init` gives. A selection of the k largest is the same at every
            scale, but latents that start small may be lost. 0 means the scale at which the first reconstruction is
            best, which follows from k and the widths where k latents are kept and init=transpose
            (`initialisation.reconstructing_scale`), and 1 elsewhere.
        unit_decoder_every: decoder rows go back to length 1 after every so many steps, and gradients lose their part
            along the rows; 0 leaves them free.
        b_dec_init: mean, geometric_median (of the stored targets) or zeros.
        firing_rate_init: b_enc starts so that each latent fires on this share of tokens; 0 starts it at 0.
        normalize: `mean_norm` scales each site so that its mean norm is sqrt(d_in), `mean_square` so that its mean
            squared norm is 1, `none` leaves it. The scales are constants from the store, and `saejax.load` folds them
            into the weights.
        matmul_dtype: operands of the forward pass's dense products, `bfloat16` or `float32`; sums and gradients are
            float32 always. The gradients' own products take float32 operands; an NVIDIA card rounds these to TF32 and a
            TPU splits them into three of bfloat16, unless this is float32: then no product rounds.
    """

    preset: str = "topk"
    topology: str = ""
    sparsity: str = ""
    d_sae: int = 0
    expansion: int = 8
    k: int = 32
    k_start: int = 0
    k_anneal_fraction: float = 0.1
    threshold_decay: float = 0.99
    threshold_init: float | None = None
    bandwidth: float | None = None
    l0_through_input: bool = False
    reconstruction: str = ""
    prefixes: tuple[float, ...] = ()
    l1_coefficient: float | None = None
    lp_coefficient: float | None = None
    lp_end: float = 0.2
    lp_updates: int = 10
    lp_after_fraction: float = 0.2
    tanh_coefficient: float | None = None
    tanh_scale: float = 4.0
    l0_coefficient: float | None = None
    target_l0_coefficient: float | None = None
    target_l0: float = 32.0
    pre_activation_coefficient: float | None = None
    pre_activation_dead_only: bool = False
    sparsity_warmup_fraction: float | None = None
    gate_coefficient: float | None = None
    multi_topk_coefficient: float | None = None
    multi_topk_factor: int = 4
    auxk_coefficient: float | None = None
    auxk_k: int = 0
    ghost_coefficient: float | None = None
    decorrelation_coefficient: float | None = None
    dead_after_tokens: int = 10_000_000
    init: str = ""
    decoder_norm: float | None = None
    encoder_scale: float | None = None
    unit_decoder_every: int | None = None
    b_dec_init: str = "mean"
    firing_rate_init: float = 0.0
    normalize: str = ""
    matmul_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _one_of("preset", self.preset, RECIPES)
        for name, known in _NAMES.items():
            if getattr(self, name) or name in ("b_dec_init", "matmul_dtype"):
                _one_of(name, getattr(self, name), known)
        for name in ("expansion", "k", "dead_after_tokens", "lp_updates", "multi_topk_factor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"coder.{name} is {getattr(self, name)}; it must be at least 1.")
        for field in dataclasses.fields(self):
            value = in_float32(getattr(self, field.name))
            if isinstance(value, float | int) and not (0 <= value < math.inf):
                raise ConfigError(
                    f"coder.{field.name} is {getattr(self, field.name)}; it must be finite in float32, not negative."
                )
            if isinstance(value, int) and value >= 2**31:
                raise ConfigError(f"coder.{field.name} is {value}; it must be at most {2**31 - 1}.")
            if field.name.endswith("_fraction") and value is not None and value > 1:
                raise ConfigError(f"coder.{field.name} is {value}; it must be at most 1.")
        # 0 is a scale's own word; a number that float32 has as 0 is none.
        for name in ("bandwidth", "tanh_scale", "target_l0", *(["encoder_scale"] if self.encoder_scale else [])):
            if in_float32(getattr(self, name)) == 0:
                raise ConfigError(f"coder.{name} is {getattr(self, name)}; it must be positive in float32.")
        if not 0 < in_float32(self.lp_end) <= 1:
            raise ConfigError(f"coder.lp_end is {self.lp_end}; it must be above 0 and at most 1.")
        for name in ("threshold_decay", "firing_rate_init"):
            if in_float32(getattr(self, name)) >= 1:
                raise ConfigError(f"coder.{name} is {getattr(self, name)}; it must be below 1.")
        if 0 < self.k_start < self.k:
            raise ConfigError(f"coder.k_start is {self.k_start}, below coder.k = {self.k}; k falls from k_start to k.")
        if self.dead_after_tokens > LONG_AGO:
            raise ConfigError(f"coder.dead_after_tokens is {self.dead_after_tokens}; it must be at most {LONG_AGO}.")

    def resolved(self) -> "CoderConfig":
        """The same with the preset's value for every key that was left to it."""
        recipe: dict[str, Any] = BASE | RECIPES[self.preset].settings
        return dataclasses.replace(
            self, **{key: v for key, v in recipe.items() if getattr(self, key) in (None, "", ())}
        )

    def width(self, d_in: int) -> int:
        """F for an input of width D."""
        return self.d_sae or self.expansion * d_in

    def k_ramp(self, steps: int) -> Ramp:
        """k over a training of `steps` steps."""
        if not self.k_start:
            return Ramp.constant(self.k)
        return Ramp(self.k_start, self.k, max(1, round(self.k_anneal_fraction * steps)))


_NAMES = {
    "topology": TOPOLOGIES,
    "sparsity": SPARSITIES,
    "init": INITS,
    "reconstruction": RECONSTRUCTIONS,
    "b_dec_init": CENTRES,
    "normalize": NORMALIZATIONS,
    "matmul_dtype": ("bfloat16", "float32"),
}


def _one_of(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise ConfigError(f"coder.{name} is {value!r}.{nearest(value, known)}")
