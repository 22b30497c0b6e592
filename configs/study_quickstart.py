"""From two behaviours of the demo model to the features that cause them, in minutes on 2 CPU cores.

    saejax study --config=study_quickstart

The demo model knows Python: it closes brackets and quotes. A cross-layer transcoder over the MLPs of its six blocks is
trained first. Presets:
    study_quickstart:tiny    a smoke test; its dictionary explains little
"""

from ml_collections import config_dict

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.experiment import default_config

PRESETS = ("", "tiny")


def get_config(preset: str = "") -> config_dict.ConfigDict:
    if preset not in PRESETS:
        raise ConfigError(f"configs/study_quickstart.py has no preset {preset!r}.{nearest(preset, PRESETS[1:])}")
    c = default_config()
    c.name = f"study-quickstart-{preset}" if preset else "study-quickstart"
    c.store = "coders-mlps"
    c.reads = tuple(f"blocks.{i}.mlp_in" for i in range(6))
    c.writes = tuple(f"blocks.{i}.mlp_out" for i in range(6))
    c.capture.hook_points = (*c.reads, *c.writes)
    c.capture.tokens = 400_000
    c.capture.heldout_tokens = 16_384
    c.coder.preset = "clt"
    c.coder.expansion = 4
    c.coder.k = 8
    c.train.tokens = 512_000
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
    c.study.behaviours = ("bracket", "quote")
    c.attribution.max_features = 500
    if preset == "tiny":
        _shrink(c)
    return c


def _shrink(c: config_dict.ConfigDict) -> None:
    c.store = "study-quickstart-tiny"
    c.capture.tokens = 16_384
    c.capture.heldout_tokens = 2_048
    c.capture.shard_rows = 4_096
    c.coder.expansion = 1
    c.train.tokens = 64 * 256
    c.train.batch_size = 256
    c.train.validate_every = 32
    c.eval.tokens = 2_048
    c.report.tokens = 4_096
    c.gates.r2_step = 64
    c.gates.relative_error = 1.0
    c.gates.loss_recovered = 0.0
    c.gates.runtime = 100.0
    c.study.train_pairs, c.study.test_pairs = 6, 4
    c.study.graphs, c.study.groups, c.study.group_size, c.study.controls = 2, 2, 2, 2
    c.study.positions, c.study.resamples, c.study.singles, c.study.every = 2, 1, 3, 8
    c.attribution.max_features = 60
