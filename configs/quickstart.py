"""From text to an evaluated SAE with nothing but this package, in a few minutes on 2 CPU cores.

    saejax pipeline --config=quickstart

The embedded demo language model, the residual stream after its block 3 (width 128), a TopK SAE.
Presets:
    quickstart:tiny       a smoke test of seconds; too short to pass most gates, so they are lowered
    quickstart:standard   relu + norm-weighted L1 instead of TopK
    quickstart:fast       a quarter of the training (saejax.training.TRAINING_RECIPES)
    quickstart:through    half of the training, its last 80 steps with the language model's loss as well
    quickstart:thorough   three times the training, averaged weights
"""

from ml_collections import config_dict

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.experiment import default_config
from saejax.training import TRAINING_RECIPES, apply_training_recipe

PRESETS = ("", "tiny", "standard", "through", *TRAINING_RECIPES)


def get_config(preset: str = "") -> config_dict.ConfigDict:
    c = default_config()
    c.name = f"quickstart-{preset}" if preset else "quickstart"
    c.store = "quickstart"
    c.lm.model = "demo"
    c.capture.hook_points = ("blocks.3.resid_post",)
    c.capture.tokens = 1_000_000
    c.capture.heldout_tokens = 32_768
    c.coder.preset = "topk"
    c.coder.expansion = 8
    c.coder.k = 24
    c.train.tokens = 4_096_000
    c.train.batch_size = 2048
    c.train.checkpoint_every = 500
    c.eval.tokens = 65_536
    c.report.tokens = 131_072
    if preset == "tiny":
        _shrink(c)
    elif preset == "standard":
        c.coder.preset = "standard"
        c.coder.l1_coefficient = 0.8
    elif preset == "through":
        c.train.tokens = 2_048_000
        c.train.through, c.train.through_from = "kl", 0.92
    elif preset in TRAINING_RECIPES:
        apply_training_recipe(c.train, preset)
    elif preset not in PRESETS:
        raise ConfigError(f"configs/quickstart.py has no preset {preset!r}.{nearest(preset, PRESETS[1:])}")
    return c


def _shrink(c: config_dict.ConfigDict) -> None:
    c.store = "quickstart-tiny"
    c.capture.tokens = 32_768
    c.capture.heldout_tokens = 4_096
    c.capture.shard_rows = 8_192
    c.train.tokens = 128 * 512
    c.train.batch_size = 512
    c.train.checkpoint_every = 50
    c.train.validate_every = 64
    c.eval.tokens = 4_096
    c.report.tokens = 8_192
    # A run of seconds has no pace of its own, and has not converged.
    c.gates.runtime = 10.0
    c.gates.r2, c.gates.r2_step = 0.3, 100
    c.gates.relative_error, c.gates.loss_recovered = 0.5, 0.5
