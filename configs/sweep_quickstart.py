"""Three sparsities times two seeds on the quickstart's store, trained together: an L0-FVE curve in a few minutes.

    saejax sweep --config=sweep_quickstart

TopK at k 12, 24 and 48. Presets:
    sweep_quickstart:standard   relu + L1 at three weights: all six coders are one program
"""

from ml_collections import config_dict

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.experiment import shipped

PRESETS = ("", "standard")


def get_config(preset: str = "") -> config_dict.ConfigDict:
    if preset not in PRESETS:
        raise ConfigError(f"configs/sweep_quickstart.py has no preset {preset!r}.{nearest(preset, PRESETS[1:])}")
    c = shipped("quickstart", preset)
    c.name = f"sweep-quickstart-{preset}" if preset else "sweep-quickstart"
    c.train.tokens = 1_024_000
    c.sweep.seeds = (0, 1)
    if preset == "standard":
        c.sweep.sparsity_scales = (0.5, 1.0, 2.0)
    else:
        c.sweep.ks = (12, 24, 48)
    return c
