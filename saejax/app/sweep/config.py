"""The settings that a sweep varies."""

import dataclasses

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class SweepConfig(Settings, section="sweep"):
    """The grid: the product of `points` and of all axes that are given. Empty axes stay as the experiment has them.

    Seeds, learning rates and sparsity scales of otherwise equal coders train as one program (but for
    schedule_free, whose learning rate makes a program of its own). Everything else is a program of its own.
    """

    seeds: tuple[int, ...] = setting(
        (), "Seeds of the coder's start and of resampling; the order of the activations is the same for all.", low=0
    )
    lrs: tuple[float, ...] = setting((), "Learning rates.", above=0)
    sparsity_scales: tuple[float, ...] = setting((), "Factors of the sparsity weights.", above=0)
    presets: tuple[str, ...] = setting((), "Names of presets.")
    expansions: tuple[int, ...] = setting((), "Widths, as latents for each input dimension.", low=1)
    d_saes: tuple[int, ...] = setting((), "Widths, as numbers of latents; instead of expansions.", low=1)
    ks: tuple[int, ...] = setting(
        (), "Latents a token; for a coder without k, which is drawn to a target L0, the targets.", low=1
    )
    reads: tuple[str, ...] = setting((), "Hook points, a coder of its own for each.")
    points: tuple[str, ...] = setting(
        (),
        'Settings that are no product, as "name: coder.expansion=4,coder.k=64,train.lr=3e-4". The keys are those in '
        "which members of a sweep may differ.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expansions and self.d_saes:
            raise ConfigError("sweep.expansions and sweep.d_saes both set the width; give one of them.")
