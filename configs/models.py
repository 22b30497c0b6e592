"""One experiment for each of seven published models: a TopK SAE of 8 x the width of the residual stream in its middle.

    saejax pipeline --config=models:pythia-1.4b
    saejax hooks pythia-1.4b                 what the model is, and its hook points; fetches config.json alone

                                    hook points                width  store of training activations
    models:gpt2                     blocks.6.resid_pre           768   76.80 GB
    models:gpt2-medium              blocks.12.resid_pre        1,024   81.92 GB
    models:pythia-1.4b              blocks.12.resid_pre        2,048   81.92 GB
    models:gemma-2b                 blocks.9.resid_pre         2,048   81.92 GB
    models:llama-3-8b               blocks.16.resid_pre        4,096   81.92 GB
    models:phi-2                    blocks.16.resid_pre        2,560   81.92 GB
    models:qwen2.5-3b-instruct      blocks.{10..24}.resid_post 2,048  245.76 GB, fifteen layers

A store takes capture.tokens x hook points x width x 2 bytes; --config.capture.tokens=2000000 makes a smaller one.
Six of them read FineWeb. The last one reads mathematics as conversations (MetaMathQA, by the model's own chat template)
and trains on block 17 of the fifteen that it stores; --config.hook_point=blocks.12.resid_post takes another.

Needs the network (or cached copies), the `data` extra, for conversations the `chat` extra, and for Gemma and Llama a
login that has accepted the licence. A revision that we do not know is empty, and the newest is taken: before a result
is to be repeated, pin --config.lm.revision and --config.text.revision to the commits that the hub shows.
Shapes and parameter counts are tested against the published config.json, and each experiment captures with a shrunk
random model; with the real weights nothing is measured yet.
"""

from typing import NamedTuple

from ml_collections import config_dict

from saejax.core.errors import ConfigError
from saejax.experiment import default_config


class Row(NamedTuple):
    """One model: its id and commit on the hub, what is captured, and how the model is run."""

    model: str
    hook_points: str
    tokens: int  # activations to store and, but for the last model, to train on once
    context: int  # tokens in a row
    batch_rows: int  # rows in a forward pass
    k: int
    dtype: str = "bfloat16"
    revision: str = ""


MODELS = {
    "gpt2": Row(
        *("openai-community/gpt2", "blocks.6.resid_pre", 50_000_000, 512, 32, 32, "float32"),
        revision="607a30d783dfa663caf39e06633721c8d4cfcd7e",
    ),
    "gpt2-medium": Row("openai-community/gpt2-medium", "blocks.12.resid_pre", 40_000_000, 512, 32, 32, "float32"),
    "pythia-1.4b": Row("EleutherAI/pythia-1.4b", "blocks.12.resid_pre", 20_000_000, 1024, 16, 64),
    "gemma-2b": Row("google/gemma-2b", "blocks.9.resid_pre", 20_000_000, 1024, 16, 64),
    "llama-3-8b": Row("meta-llama/Meta-Llama-3-8B", "blocks.16.resid_pre", 10_000_000, 1024, 8, 64),
    "phi-2": Row("microsoft/phi-2", "blocks.16.resid_pre", 16_000_000, 1024, 8, 64),
    "qwen2.5-3b-instruct": Row("Qwen/Qwen2.5-3B-Instruct", "blocks.{10..24}.resid_post", 4_000_000, 1024, 8, 64),
}
PRESETS = tuple(MODELS)


def get_config(name: str = "gpt2") -> config_dict.ConfigDict:
    if name not in MODELS:
        raise ConfigError(f"configs/models.py has no model {name!r}. There are: {', '.join(MODELS)}.")
    row = MODELS[name]
    c = default_config()
    c.name = f"models-{name}"
    c.lm.model, c.lm.revision, c.lm.dtype = row.model, row.revision, row.dtype
    c.text.source = "hub"
    c.text.heldout_fraction = 0.02
    c.text.context_length = row.context
    c.capture.hook_points = (row.hook_points,)
    c.capture.tokens = row.tokens
    c.capture.heldout_tokens = 262_144
    c.capture.batch_rows = row.batch_rows
    c.coder.preset = "topk"
    c.coder.expansion = 8
    c.coder.k = row.k
    c.train.tokens = row.tokens
    c.train.batch_size = 4096
    c.train.lr = 1e-4
    if name == "qwen2.5-3b-instruct":
        _converse(c)
    else:
        c.text.dataset, c.text.subset, c.text.revision = "HuggingFaceFW/fineweb", "sample-10BT", "cd85054"
    return c


def _converse(c: config_dict.ConfigDict) -> None:
    c.text.dataset = "meta-math/MetaMathQA"
    c.text.chat, c.text.prompt, c.text.response = True, "query", "response"
    # The template begins a conversation itself, with a special token.
    c.text.prepend_bos = False
    c.hook_point = "blocks.17.resid_post"
    c.train.tokens = 4 * c.capture.tokens  # four times over the store
