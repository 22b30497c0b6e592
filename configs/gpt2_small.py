"""GPT-2 small, residual stream entering block 6, 768 -> 6,144 latents, TopK.

    saejax pipeline --config=gpt2_small

Needs the network (or a cached copy) for openai-community/gpt2 and for the text. It is Config C of the RTX 6000
report: 8x expansion, learning rate 1e-4, 512-token contexts; trained here on 50 million activations instead of
378 short steps. The store takes about 77 GB of disk (50 million x 768 x 2 bytes). Tested with a small random model in
place of GPT-2; with the real weights its time and quality are not measured yet.
Presets:
    gpt2_small:fast       a quarter of the training (saejax.training.TRAINING_RECIPES)
    gpt2_small:thorough   three times the training, averaged weights
"""

from ml_collections import config_dict

from saejax.experiment import default_config
from saejax.training import TRAINING_RECIPES, apply_training_recipe

PRESETS = ("", *TRAINING_RECIPES)


def get_config(preset: str = "") -> config_dict.ConfigDict:
    c = default_config()
    c.name = f"gpt2_small-{preset}" if preset else "gpt2_small"
    c.store = "gpt2_small"
    c.lm.model = "openai-community/gpt2"
    c.lm.revision = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    c.text.source = "hub"
    c.text.dataset = "HuggingFaceFW/fineweb"
    c.text.subset = "sample-10BT"
    c.text.revision = "cd85054"
    c.text.heldout_fraction = 0.02
    c.text.context_length = 512
    c.capture.hook_points = ("blocks.6.resid_pre",)
    c.capture.tokens = 50_000_000
    c.capture.heldout_tokens = 262_144
    c.coder.preset = "topk"
    c.coder.expansion = 8
    c.coder.k = 32
    c.train.tokens = 50_000_000
    c.train.batch_size = 4096
    c.train.lr = 1e-4
    if preset:
        apply_training_recipe(c.train, preset)
    return c
