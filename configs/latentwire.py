"""LatentWire: 32 latents in place of a text, for Llama-3.1-8B and Qwen2.5-7B, on SQuAD.

    saejax prefix --config=latentwire --config.lm.revision=... --config.prefix.second_revision=...

5,000 samples, 8 epochs, batches of 4. Both models are gated or large: one GPU with 40 GB or more, and a hub login that
has accepted Llama's licence. Pin the revisions, also --config.text.revision, to the commits that the hub shows. Tested
with two small random models and a few records in their place; not measured with the models themselves. A run whose
prefix answers no better than truncated text is what the published form of this recipe did (docs/latentwire.md).
"""

from ml_collections import config_dict

from saejax.experiment import default_config


def get_config() -> config_dict.ConfigDict:
    c = default_config()
    c.name = "latentwire"
    c.lm.model = "meta-llama/Llama-3.1-8B"
    c.lm.dtype = "bfloat16"
    c.text.source = "hub"
    c.text.dataset = "rajpurkar/squad"
    p = c.prefix
    p.source = "text"
    p.second = "Qwen/Qwen2.5-7B"
    p.samples, p.heldout = 5000, 500
    p.latents, p.d_latent = 32, 256
    p.d_encoder, p.length = 768, 2048
    p.answer_tokens = 24
    p.first_token_weight = 2.0
    p.eval_rows = 8
    c.train.batch_size = 4
    c.train.tokens = 8 * 5000
    c.train.optimizer = "adamw"
    c.train.weight_decay = 0.01
    c.train.lr = 1e-4
    c.train.checkpoint_every = 1000
    c.train.validate_every = 500
    return c
