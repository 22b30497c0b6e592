"""A known truth: 1,024 planted features in 256 dimensions, of which a dictionary of 512 latents finds what it can.

    saejax truth --config=truth [--config.coder.preset=topk --config.coder.k=12]

Trees of features whose children exclude each other, common causes, a Zipf distribution of firing: the parts of
SynthSAEBench (arXiv 2602.14687) at a size for 2 CPU cores. Presets:
    truth:small               the same
    truth:large               4,096 features in 512 dimensions, 1,024 latents
    truth:synthsaebench_small SynthSAEBench's recipe at 1,024 features in 256 dimensions, 256 latents: minutes
    truth:synthsaebench_16k   SynthSAEBench's own: 16,384 features in 768 dimensions, 4,096 latents; wants a GPU
    truth:saelens             a world that SAELens saved in the folder world, or --config.truth.source=FOLDER
"""

from ml_collections import config_dict

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.experiment import default_config

PRESETS = ("", "small", "large", "synthsaebench_small", "synthsaebench_16k", "saelens")


def get_config(preset: str = "") -> config_dict.ConfigDict:
    c = default_config()
    c.name = f"truth-{preset}" if preset else "truth"
    c.lm.model = ""
    if preset == "saelens":
        c.truth.source = "world"
    else:
        _world(c.truth)
    c.coder.preset = "batchtopk"
    c.coder.d_sae = 512
    c.coder.k = 12
    c.train.tokens = 2_048_000
    c.train.batch_size = 1024
    c.train.checkpoint_every = 500
    if preset == "large":
        _large(c)
    elif preset == "synthsaebench_small":
        _synthsaebench_small(c)
    elif preset == "synthsaebench_16k":
        _synthsaebench_16k(c)
    elif preset == "saelens":
        _as_published(c)
    elif preset not in PRESETS:
        raise ConfigError(f"configs/truth.py has no preset {preset!r}.{nearest(preset, PRESETS[1:])}")
    return c


def _world(w: config_dict.ConfigDict) -> None:
    w.n_features, w.d_in = 1024, 256
    w.firing, w.exponent, w.p_max, w.p_min = "zipfian", 0.5, 0.4, 0.003
    w.roots, w.branching, w.depth = 32, 4, 2
    w.exclusive, w.scale_by_parent, w.compensate = 1.0, True, True
    w.rank, w.correlation = 8, 0.1
    w.mean.kind, w.mean.first, w.mean.last = "linear", 5.0, 4.0
    w.std.kind, w.std.centre, w.std.spread = "folded_normal", 0.5, 0.5
    w.orthogonal_steps, w.orthogonal_lr = 100, 3e-4


def _large(c: config_dict.ConfigDict) -> None:
    w = c.truth
    w.n_features, w.d_in = 4096, 512
    w.p_min = 1e-3
    w.roots, w.rank = 128, 16
    c.coder.d_sae, c.coder.k = 1024, 16


def _synthsaebench_small(c: config_dict.ConfigDict) -> None:
    """A sixteenth of the features, in a third of the width: shares of roots, trees and latents are the published."""
    w = c.truth
    w.p_min = 5e-4
    w.roots, w.depth, w.rank = 8, 3, 25
    w.bias = 0.5
    c.coder.d_sae, c.coder.k = 256, 5


def _synthsaebench_16k(c: config_dict.ConfigDict) -> None:
    w = c.truth
    w.n_features, w.d_in = 16_384, 768
    w.p_min = 5e-4
    w.roots, w.depth, w.rank = 128, 3, 25
    w.bias = 0.5
    _as_published(c)


def _as_published(c: config_dict.ConfigDict) -> None:
    c.coder.d_sae, c.coder.k = 4096, 25
    c.train.tokens = 200_000_000
    c.train.lr = 3e-4
