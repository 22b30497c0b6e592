"""What a sweep varies."""

import dataclasses
import math

from saejax.core.errors import ConfigError

MAX_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """The grid: the product of `points` and of all axes that are given. Empty axes stay as the experiment has them.

    Attributes:
        seeds: of the coder's start and of resampling; the order of the activations is the same for all.
        lrs: learning rates.
        sparsity_scales: multiply the weights of l1, lp, tanh, l0 and target_l0.
        presets: names of recipes.
        expansions, d_saes: widths, one or the other.
        ks: latents a token; for a coder without k, which is drawn to a target L0, the targets.
        reads: hook points, a coder of its own for each.
        points: settings that are no product, as "name: coder.expansion=4,coder.k=64,train.lr=3e-4". The keys are those
            of coder and train (no others, and of train not what decides the batches), reads, writes, hook_point and
            coder_seed.

    Seeds, learning rates and sparsity scales of otherwise equal coders train as one program (but for
    schedule_free, whose learning rate makes a program of its own). Everything else is a program of its own.
    """

    seeds: tuple[int, ...] = ()
    lrs: tuple[float, ...] = ()
    sparsity_scales: tuple[float, ...] = ()
    presets: tuple[str, ...] = ()
    expansions: tuple[int, ...] = ()
    d_saes: tuple[int, ...] = ()
    ks: tuple[int, ...] = ()
    reads: tuple[str, ...] = ()
    points: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lrs", "sparsity_scales"):
            for value in getattr(self, name):
                if not 0 < value < math.inf:
                    raise ConfigError(f"sweep.{name} holds {value}; each must be positive and finite.")
        for name in ("expansions", "d_saes", "ks"):
            for value in getattr(self, name):
                if value < 1:
                    raise ConfigError(f"sweep.{name} holds {value}; each must be at least 1.")
        for value in self.seeds:
            if not 0 <= value <= MAX_SEED:
                raise ConfigError(f"sweep.seeds holds {value}; each must be between 0 and {MAX_SEED}.")
        if self.expansions and self.d_saes:
            raise ConfigError("sweep.expansions and sweep.d_saes both set the width; give one of them.")
