"""The settings of a world whose features are known, after SynthSAEBench (Chanin and Garriga-Alonso, arXiv 2602.14687).

    x = a D + b,   a_i = relu(mean_i + std_i n_i) where feature i fires, else 0

The names of the parts are those of the paper; SAELens has them in `sae_lens.synthetic`.
"""

import dataclasses
import functools

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, section, setting

FIRING = ("zipfian", "linear", "random", "constant")
KINDS = ("constant", "linear", "exponential", "folded_normal")

_positive = functools.partial(setting, above=0)


@dataclasses.dataclass(frozen=True)
class Magnitudes(Settings):
    """A number for each feature: constant, along the features from first to last, or drawn."""

    kind: str = setting(
        "constant",
        "constant: `first` for all. linear, exponential: from `first`, of the first feature, to `last`. folded_normal: "
        "|`centre` + `spread` n| with n drawn from a normal distribution for each feature.",
        choices=KINDS,
    )
    first: float = setting(1.0, "Of the first feature; of all where they are constant.", low=0)
    last: float = setting(1.0, "Of the last feature.", low=0)
    centre: float = setting(0.5, "Of the folded normal distribution.")
    spread: float = _positive(0.5, "Standard deviation of the normal distribution that is folded.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind in ("linear", "exponential") and not (self.first > 0 and self.last > 0):
            raise ConfigError(
                f"{self.section}.first is {self.first}, last is {self.last}; where kind is {self.kind} both must be "
                "positive."
            )


@dataclasses.dataclass(frozen=True)
class Means(Magnitudes, section="truth.mean"):
    """Of the features' magnitudes."""

    first: float = _positive(1.0, "Of the first feature; of all where they are constant.")


@dataclasses.dataclass(frozen=True)
class Spreads(Magnitudes, section="truth.std"):
    """Standard deviations of the features' magnitudes."""

    first: float = setting(0.0, "Of the first feature; of all where they are constant.", low=0)


@dataclasses.dataclass(frozen=True)
class World(Settings, section="truth"):
    """The planted world. All of it is a function of these settings, or what the folder `source` holds."""

    source: str = setting(
        "",
        "Folder of a world that SAELens saved (SyntheticModel.save). Its features are planted in place of those that "
        "the other settings would make; d_in and n_features follow.",
        decides=False,
        place="path",
    )
    n_features: int = setting(1024, "True features.", low=1)
    d_in: int = setting(256, "Width of the activations.", low=1)
    firing: str = setting(
        "zipfian",
        "How often features fire. zipfian: 1 / rank^exponent, stretched to the range from p_max to p_min. linear: from "
        "p_max to p_min. random: drawn evenly between them. constant: p_max.",
        choices=FIRING,
    )
    exponent: float = _positive(0.5, "Of the Zipf distribution.")
    p_max: float = _positive(0.3, "Probability of the feature that fires most.", high=1)
    p_min: float = _positive(0.001, "Probability of the feature that fires least.", high=1)
    mean: Means = section(Means, "Mean magnitude of each feature where it fires.")
    std: Spreads = section(Spreads, "Standard deviation of its magnitude.")
    roots: int = setting(0, "Features without parents that have children; 0 for no hierarchy.", low=0)
    branching: int = setting(4, "Children of a parent.", low=2)
    depth: int = setting(2, "Generations below the roots. What is left of the features is in no tree.", low=1)
    exclusive: float = setting(0.0, "Share of the parents of whose children at most one fires.", low=0, high=1)
    scale_by_parent: bool = setting(
        False, "A child's magnitude is multiplied by its parent's over the parent's mean; else it fires or does not."
    )
    compensate: bool = setting(
        False, "Children draw with higher probabilities, so that they fire about as often as without a hierarchy."
    )
    rank: int = setting(0, "Common causes that correlate which features fire; 0 for none.", low=0)
    correlation: float = setting(0.1, "Scale of each feature's weights on the common causes.", low=0)
    orthogonal_steps: int = setting(200, "Adam steps that push the directions apart; 0 leaves them random.", low=0)
    orthogonal_lr: float = _positive(0.01, "Their learning rate.")
    bias: float = setting(1.0, "Length of b, which is added to every activation.", low=0)
    seed: int = setting(0, "Of directions, magnitudes, correlations and hierarchy; not of the samples.", low=0)
    score_samples: int = setting(
        100_000, "Fresh samples that a dictionary is scored on, in 100 blocks.", low=100, decides=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p_min > self.p_max:
            raise ConfigError(f"truth.p_min is {self.p_min}, more than truth.p_max, {self.p_max}.")
