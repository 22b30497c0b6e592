"""Settings of a coder: the keys here, and those of every sparsity and loss term, which stand with them."""

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from saejax.coders.initialisation import INITS
from saejax.coders.lista import MOST_STEPS
from saejax.coders.parts import SPARSITIES, with_parts
from saejax.coders.recipes import RECIPES
from saejax.coders.reconstruction import ReconstructionSettings
from saejax.coders.topologies import TOPOLOGIES
from saejax.core.config import in_float32
from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting, settings_of

NORMALIZATIONS = ("mean_norm", "mean_square", "none")
CENTRES = ("mean", "geometric_median", "zeros")
# Where the counter of tokens since a latent fired stops, so that it cannot overflow int32.
LONG_AGO = 2**30
# What a training's tokens are multiplied by, where nobody says when a latent is dead (benchmarks/quality/changes.md).
_DEAD_SHARE, _DEAD_AT_MOST = 0.003, 10_000_000


@dataclasses.dataclass(frozen=True)
class CoderKeys(Settings, section="coder"):
    """The keys that every coder has."""

    preset: str = setting("topk", "The coder's name; keys that are empty or None take its values.", choices=RECIPES)
    topology: str = setting("", "What is read and written.", choices=TOPOLOGIES, base="autoencoder")
    sparsity: str = setting("", "How pre-activations become latents.", choices=SPARSITIES, base="topk")
    d_sae: int = setting(0, "The number of latents (of each layer, for a clt); 0 means expansion x d_in.", low=0)
    expansion: int = setting(8, "Latents for each input dimension, where d_sae is 0.", low=1)
    sparsity_warmup_fraction: float | None = setting(
        None, "The share of training over which sparsity weights rise from 0.", low=0, high=1, base=0.05
    )
    dead_after_tokens: int = setting(
        0,
        "A latent is dead after this many tokens without firing. 0 means three thousandths of train.tokens, at most "
        "10,000,000.",
        low=0,
        high=LONG_AGO,
    )
    init: str = setting("", "How encoder and decoder start.", choices=INITS, base="transpose")
    decoder_norm: float | None = setting(None, "Length of decoder rows at the start.", low=0, base=1.0)
    encoder_scale: float | None = setting(
        None,
        "W_enc starts at this times what `init` gives. A selection of the k largest is the same at every scale, but "
        "latents that start small may be lost. 0 means the scale at which the first reconstruction is best, which "
        "follows from k and the widths where k latents are kept and init=transpose, and 1 elsewhere.",
        low=0,
        base=1.0,
    )
    unit_decoder_every: int | None = setting(
        None,
        "Every n-th step sets decoder rows back to length 1, and gradients lose their part along the rows; 0 "
        "leaves them free.",
        low=0,
        base=0,
    )
    encoder_centre: bool | None = setting(
        None,
        "In training the encoder sees x less the store's mean, a constant that `saejax.load` folds into b_enc; else "
        "an autoencoder's encoder sees x - b_dec, and every other one x. Without it latents die at large rates. A "
        "layernorm_autoencoder has none.",
        base=True,
    )
    lista_steps: int | None = setting(
        None,
        "The encoder runs this many more times. Before each, what the decoder left over is added to x (LISTA). Each "
        "costs a dense product and a decoding. 0 is a linear encoder. The coder must write what it reads. Attribution "
        "and the formats of other projects refuse such a coder.",
        low=0,
        high=MOST_STEPS,
        base=0,
    )
    lista_rate: float = setting(
        0.3, "What the encoder reads gains this share of the error before it looks again.", above=0, high=2
    )
    b_dec_init: str = setting("mean", "Where b_dec starts among the stored targets.", choices=CENTRES)
    firing_rate_init: float = setting(
        0.0, "b_enc starts so that each latent fires on this share of tokens; 0 starts it at 0.", low=0, below=1
    )
    normalize: str = setting(
        "",
        "mean_norm scales each site so that its mean norm is sqrt(d_in), mean_square so that its mean squared norm is "
        "1, none leaves it. The scales are constants from the store, and `saejax.load` folds them into the weights.",
        choices=NORMALIZATIONS,
        base="mean_norm",
    )
    matmul_dtype: str = setting(
        "auto",
        "Operands of the forward pass's dense products; sums and gradients are float32 always. auto is what the device "
        "is quickest with: float32 on a CPU, bfloat16 elsewhere. The gradients' own products take float32 operands; an "
        "NVIDIA card rounds these to TF32 and a TPU splits them into three of bfloat16, unless this is float32: then "
        "no product rounds.",
        choices=("auto", "bfloat16", "float32"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # 0 is the scale's own word; a number that float32 has as 0 is none.
        if self.encoder_scale and not in_float32(self.encoder_scale):
            raise ConfigError(f"coder.encoder_scale is {self.encoder_scale}; it must be positive in float32.")

    def resolved(self) -> Self:
        """The same with the preset's value for every key that was left to it."""
        recipe = RECIPES[self.preset].settings
        values = {key: recipe.get(key, known.base) for key, known in settings_of(type(self)).items()}
        silent = {key: value for key, value in values.items() if getattr(self, key) in (None, "", ())}
        return dataclasses.replace(self, **{key: value for key, value in silent.items() if value is not None})

    def dead_after(self, tokens: int) -> int:
        """Tokens without firing after which a latent is dead, of a training on `tokens` (0: not known)."""
        by_share = max(1, round(_DEAD_SHARE * tokens)) if tokens else _DEAD_AT_MOST
        return self.dead_after_tokens or min(_DEAD_AT_MOST, by_share)

    def width(self, d_in: int) -> int:
        return self.d_sae or self.expansion * d_in


@with_parts
@dataclasses.dataclass(frozen=True)
class CoderConfig(ReconstructionSettings, CoderKeys):
    """Settings of a sparse dictionary: a preset, and what of it to change.

    Keys that are empty or None by default come from the preset (`recipes.py`), or from the key's own `base` where
    the preset is silent; those set here win. Every registered sparsity and loss term adds its keys.
    """

    if TYPE_CHECKING:

        def __init__(self, preset: str = ..., **keys: Any) -> None: ...

        def __getattr__(self, key: str) -> Any: ...
