"""A latent prefix in minutes: two small frozen models answer questions about a record that they do not see.

    saejax prefix --config=latentwire_quickstart

The record has six fields, `r = {"width": 41, ...}`. An encoder turns its 27 tokens into eight latents, and the models
`recall` and `demo`, which have different tokenizers, are asked for one field. Eight tokens of the text hold one field.
"""

from ml_collections import config_dict

from saejax.experiment import default_config


def get_config() -> config_dict.ConfigDict:
    c = default_config()
    c.name = "latentwire_quickstart"
    c.lm.model = "recall"
    p = c.prefix
    p.source = "recall"
    p.second = "demo"
    p.prompt = "{question}"
    p.answer = " {answer}\n"
    p.samples, p.heldout = 50_000, 300
    p.latents, p.d_latent = 8, 128
    p.encoder, p.length = "tokens", 32
    p.d_encoder, p.n_layer, p.n_pool, p.n_head = 128, 0, 2, 4
    p.answer_tokens = 6
    p.eval_rows = 50
    c.train.batch_size = 32
    c.train.tokens = 32 * 3000
    c.train.lr = 1e-3
    c.train.checkpoint_every = 1000
    c.train.validate_every = 100
    return c
