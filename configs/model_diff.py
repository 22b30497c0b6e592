"""What two models have in common and what each has alone: a crosscoder over GPT-2 small and DistilGPT-2.

    saejax pipeline --config=model_diff

The residual stream in the middle of both (block 6 of 12, block 3 of 6), BatchTopK over the sum of both encoders. Any
two models with one tokenizer will do: --config.lm.model, --config.lm.second. A latent whose decoder row is long at one
site and short at the other belongs to one model: rows are params["W_dec"][latent, site]. Needs the network or cached
copies; pin --config.lm.second_revision. Tested with two small random models in their place; not measured with the
real ones.
"""

from ml_collections import config_dict

from saejax.experiment import default_config


def get_config() -> config_dict.ConfigDict:
    c = default_config()
    c.name = "model_diff"
    c.lm.model = "openai-community/gpt2"
    c.lm.revision = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
    c.lm.second = "distilbert/distilgpt2"
    c.text.source = "hub"
    c.text.dataset = "HuggingFaceFW/fineweb"
    c.text.subset = "sample-10BT"
    c.text.revision = "cd85054"
    c.text.heldout_fraction = 0.02
    c.text.context_length = 512
    c.capture.hook_points = ("blocks.6.resid_pre", "second.blocks.3.resid_pre")
    c.capture.tokens = 20_000_000
    c.capture.heldout_tokens = 131_072
    c.coder.preset = "crosscoder_batchtopk"
    c.coder.expansion = 16
    c.coder.k = 48
    c.train.tokens = 40_000_000
    c.train.lr = 1e-4
    return c
