"""How the embedded demo model in `saejax/lm/demo/` is made: tokenizer, training, baselines, model card."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.demo_lm.ngram import ngram_losses
from benchmarks.demo_lm.pretrain import PretrainConfig, evaluate, pretrain
from saejax.core.files import writing
from saejax.lm import checkpoint, decoder
from saejax.lm.families import ARCHITECTURES
from saejax.text import Packer, Source, TextConfig, Tokenizer, open_source

END_OF_TEXT = "<|endoftext|>"
_PROMPTS = (
    "import os\nimport sys\n\ndef main(",
    'class Error(Exception):\n    """',
    "    def __init__(self, ",
    "for i in range(",
    "        if self._closed:\n            raise ",
    "Return True if the",
)


@dataclasses.dataclass(frozen=True)
class DemoConfig:
    """Shape and training of the demo model; the defaults are what the shipped one was made with."""

    vocab_size: int = 4096
    n_layer: int = 6
    d_model: int = 128
    n_head: int = 4
    context_length: int = 256
    steps: int = 2000
    batch: int = 16
    lr: float = 2e-3
    seed: int = 0


def make_demo(folder: Path, config: DemoConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train the demo model on the training split of the standard library and write it to `folder`.

    Returns the figures of the model card: losses in nats a token on the held-out split.

    Raises:
        DataError: the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config_json = _config_json(config)
        (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")
    text = TextConfig(source="stdlib", context_length=config.context_length)
    source = open_source(text)
    tokenizer = _make_tokenizer(folder, source, config.vocab_size)
    packer = Packer(source, tokenizer, config.context_length)
    train, heldout = all_rows(packer, "train"), all_rows(packer, "heldout")
    say(f"{train['tokens'].size:,} training and {heldout['tokens'].size:,} held-out tokens")
    baselines = ngram_losses(train, heldout, config.vocab_size)
    say(f"held-out nats/token: unigram {baselines[0]:.3f}, bigram {baselines[1]:.3f}, trigram {baselines[2]:.3f}")

    model = ARCHITECTURES["gpt2"].read_config(config_json)
    started = time.perf_counter()

    def on_step(step: int, loss: float, params: Any) -> None:
        rate = step * config.batch * config.context_length / (time.perf_counter() - started)
        say(f"step {step}/{config.steps}  train {loss:.3f}  {rate:,.0f} tokens/s")
        if step % 200 == 0 or step == config.steps:
            checkpoint.write(folder, config_json, params)
            say(f"    held-out {evaluate(model, params, {k: v[:128] for k, v in heldout.items()}):.3f}")

    settings = PretrainConfig(steps=config.steps, batch=config.batch, lr=config.lr, seed=config.seed)
    params = pretrain(model, settings, train, on_step)
    figures = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "training_tokens": config.steps * config.batch * config.context_length,
        "corpus_tokens": int(train["tokens"].size),
        "heldout_tokens": int(heldout["tokens"].size),
        "loss": evaluate(model, params, heldout),
        "unigram": baselines[0],
        "bigram": baselines[1],
        "trigram": baselines[2],
        "seconds": time.perf_counter() - started,
    }
    completions = {prompt: complete(model, params, tokenizer, prompt) for prompt in _PROMPTS}
    with writing(folder):
        (folder / "README.md").write_text(_card(config, figures, completions))
        (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def complete(model: Any, params: Any, tokenizer: Tokenizer, prompt: str, new_tokens: int = 40) -> str:
    """Greedy continuation of `prompt`."""
    ids = ([tokenizer.bos_id] if tokenizer.bos_id is not None else []) + tokenizer.encode(prompt)
    length = len(ids) + new_tokens

    @jax.jit
    def next_token(tokens_BS: jax.Array, at: int) -> jax.Array:
        return decoder.run(model, params, tokens_BS)[0][0, at].argmax()

    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    for at in range(len(ids) - 1, length - 1):
        tokens[0, at + 1] = int(next_token(jnp.asarray(tokens), at))
    return tokenizer.decode(tokens[0, len(ids) :].tolist())


def _config_json(config: DemoConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context_length,
        "n_ctx": config.context_length,
        "n_embd": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.02,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
    }


def _make_tokenizer(folder: Path, source: Source, vocab_size: int) -> Tokenizer:
    """Byte-level BPE, trained on the training split alone; id 0 is <|endoftext|>, bos and eos at once."""
    backend = tokenizers.Tokenizer(models.BPE())
    # GPT-2's own pattern, but a run of spaces (indentation) stays one piece, as code needs it.
    pattern = tokenizers.Regex(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\n+|[^\S\n]+")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((d.text for d in source.documents("train")), trainer)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return Tokenizer.from_folder(folder)


def all_rows(packer: Packer, split: str) -> dict[str, np.ndarray]:
    """{tokens, positions, segments}: int32 [N, S], all rows of a split."""
    batches = list(packer.batches(split, 64, pad_last=False))
    return {k: np.concatenate([getattr(b, k) for b in batches]) for k in ("tokens", "positions", "segments")}


def _card(config: DemoConfig, figures: dict[str, Any], completions: dict[str, str]) -> str:
    def quote(text: str) -> str:
        return "\n".join(f"    {line}" for line in text.splitlines())

    shown = "\n\n".join(f"{quote(p + '▶' + c)}" for p, c in completions.items())
    return f"""# saejax demo model

A GPT-2-architecture language model of {figures["parameters"]:,} parameters ({config.n_layer} layers, width
{config.d_model}, {config.n_head} heads, context {config.context_length}, {config.vocab_size} byte-level BPE tokens), so
that saejax works from the first minute without a network. It knows Python source code and nothing else.

Made by `python -m launch.make_demo_lm` with saejax's own JAX decoder and Optax: {config.steps} steps of
{config.batch} x {config.context_length} tokens (AdamW, peak learning rate {config.lr}, cosine) over
{figures["corpus_tokens"]:,} tokens of the Python standard library's sources, its tests left out. One tenth of the
library's top-level modules, chosen by a hash of their names, was held out.

| held-out loss, nats a token ({figures["heldout_tokens"]:,} tokens) | |
|---|---|
| unigram | {figures["unigram"]:.3f} |
| bigram (Witten-Bell) | {figures["bigram"]:.3f} |
| trigram (Witten-Bell) | {figures["trigram"]:.3f} |
| this model | **{figures["loss"]:.3f}** |

What it completes, greedily, after the mark ▶:

{shown}

The text it was trained on is the Python standard library, under the PSF licence. `transformers` loads the folder too:
`AutoModelForCausalLM.from_pretrained(folder)`.
"""
