"""Every coder on the embedded demo model: one preset for each recipe, each trained in about a minute on 2 CPU cores.

    saejax pipeline --config=coders:jumprelu
    saejax pipeline --config=coders:jumprelu+thorough

Presets: every name of saejax.coders.RECIPES (docs/coders.md), alone or with one of saejax.training.TRAINING_RECIPES
(`+fast`, `+thorough`). Presets of one kind share a store: the residual stream after block 3; what the MLP of block 3
reads and writes; the residual stream after blocks 1 to 4; the MLPs of all six blocks.
"""

from ml_collections import config_dict

from saejax.coders import RECIPES, TOPOLOGIES, CoderConfig
from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.experiment import default_config
from saejax.training import apply_training_recipe

# Penalties weighed so that L0 comes out near k at this width and length of training, where the preset's own, made for
# wide models and long runs, would leave next to nothing.
_PENALTIES = {
    "standard": {"l1_coefficient": 2.0},
    "ghost": {"l1_coefficient": 2.0},
    "p_anneal": {"lp_coefficient": 0.5},
    "gated": {"l1_coefficient": 2.0},
    "jumprelu_tanh": {"tanh_coefficient": 0.2},
}
_RESIDUAL = ("blocks.3.resid_post",)
_ONE_MLP = ("blocks.3.mlp_in", "blocks.3.mlp_out")
_LAYERS = tuple(f"blocks.{i}.resid_post" for i in (1, 2, 3, 4))
_MLPS_IN = tuple(f"blocks.{i}.mlp_in" for i in range(6))
_MLPS_OUT = tuple(f"blocks.{i}.mlp_out" for i in range(6))
PRESETS = tuple(RECIPES)


def get_config(name: str = "topk") -> config_dict.ConfigDict:
    preset, _, training = name.partition("+")
    if preset not in RECIPES:
        raise ConfigError(f"configs/coders.py has no preset {preset!r}.{nearest(preset, RECIPES)}")
    c = default_config()
    c.name = f"coders-{name}".replace("+", "-")
    c.capture.tokens = 400_000
    c.capture.heldout_tokens = 16_384
    c.coder.preset = preset
    c.coder.k = 24
    c.coder.target_l0 = 24.0
    c.coder.update(_PENALTIES.get(preset, {}))
    c.train.tokens = 1_024_000
    c.train.batch_size = 1024
    c.train.checkpoint_every = 500
    c.eval.tokens = 32_768
    c.report.tokens = 65_536
    # What an activation and a latent cost depends on the kind of coder: the bars of the quickstart are not theirs.
    c.gates.r2, c.gates.r2_step = 0.3, 500
    c.gates.relative_error = 0.6
    c.gates.loss_recovered = 0.5
    c.gates.zero_fraction = 0.5
    c.gates.runtime = 1.0
    if RECIPES[preset].settings.get("contrastive_coefficient"):
        c.train.neighbours = 2
    _sites(c, preset)
    if training:
        apply_training_recipe(c.train, training)
    return c


def _sites(c: config_dict.ConfigDict, preset: str) -> None:
    """The hook points that the recipe's topology needs."""
    topology = TOPOLOGIES[CoderConfig(preset=preset).resolved().topology]
    if not topology.stacked:
        c.store, c.capture.hook_points = ("coders", _RESIDUAL) if topology.tied else ("coders-mlp", _ONE_MLP)
    elif topology.tied:
        c.store, c.capture.hook_points = "coders-layers", _LAYERS
    else:
        c.store, c.capture.hook_points = "coders-mlps", (*_MLPS_IN, *_MLPS_OUT)
        c.reads, c.writes = _MLPS_IN, _MLPS_OUT
        c.coder.expansion = 4
        c.coder.k = 8
        c.train.tokens = 512_000
