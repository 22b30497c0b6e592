"""How the embedded model `recall` in `saejax/lm/recall/` is made: tokenizer, training, model card.

It answers the questions of the embedded task of `saejax prefix`, and it has another tokenizer, another architecture
and another width than the demo model.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.demo_lm.pretrain import PretrainConfig, pretrain
from saejax.core.files import writing
from saejax.lm import checkpoint, decoder
from saejax.lm.conventions import DecoderConfig
from saejax.lm.families import ARCHITECTURES
from saejax.prefix.recall import HIGHEST, LOWEST, NAMES, written
from saejax.text import Tokenizer

BEGIN = "<s>"


@dataclasses.dataclass(frozen=True)
class RecallConfig:
    """Shape and training of the model; the defaults are what the shipped one was made with."""

    vocab_size: int = 512
    n_layer: int = 3
    d_model: int = 96
    n_head: int = 4
    d_mlp: int = 256
    context_length: int = 128
    texts: int = 100_000
    steps: int = 1500
    batch: int = 32
    lr: float = 1.5e-3
    weight_decay: float = 0.3
    seed: int = 0


def make_recall(folder: Path, config: RecallConfig, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train the model on records with their questions and write it to `folder`.

    Returns the figures of the model card, the share of held-out questions answered right among them.

    Raises:
        DataError: the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config_json = _config_json(config)
        (folder / "config.json").write_text(json.dumps(config_json, indent=2) + "\n")
    tokenizer = _make_tokenizer(folder, config.vocab_size)
    train, heldout = _rows(tokenizer, config.texts, config.seed), _rows(tokenizer, 512, config.seed + 1)
    say(f"{train['tokens'].size:,} training tokens, {train['tokens'].shape[1]} in a row")
    model = ARCHITECTURES["llama"].read_config(config_json)
    started = time.perf_counter()

    def on_step(step: int, loss: float, params: Any) -> None:
        if step % 250 == 0 or step == config.steps:
            checkpoint.write(folder, config_json, params)
            right = answered(model, params, heldout)
            say(
                f"step {step}/{config.steps}  loss {loss:.3f}  right {right:.3f}  {time.perf_counter() - started:.0f} s"
            )

    settings = PretrainConfig(config.steps, config.batch, config.lr, weight_decay=config.weight_decay, seed=config.seed)
    params = pretrain(model, settings, train, on_step, _fresh(model, config.seed))
    figures = {
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "training_tokens": round(config.steps * config.batch * (train["segments"] >= 0).sum(axis=1).mean()),
        "right": answered(model, params, heldout),
        "seconds": time.perf_counter() - started,
    }
    with writing(folder):
        (folder / "README.md").write_text(_card(config, figures))
        (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def _fresh(model: DecoderConfig, seed: int) -> Any:
    """GPT-2's random matrices, made N(0, 1 / d_model): its 0.02 is for a width of 2,500.

    In a trial with two notations (2026-11-25, one training each) all questions were answered after 600 steps from here,
    and 43 % after 1,600 from 0.02.
    """
    scale = 1 / (0.02 * math.sqrt(model.d_model))
    params = decoder.init_params(model, jax.random.key(seed))
    return jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, params)


def answered(model: Any, params: Any, rows: dict[str, np.ndarray]) -> float:
    """The share of the rows' questions after which the likeliest token is the number that was asked for."""
    logits_BSV = jax.jit(lambda params, tokens: decoder.run(model, params, tokens)[0])(params, rows["tokens"])
    right_BS = np.asarray(jnp.roll(logits_BSV.argmax(-1), 1, axis=1)) == rows["tokens"]
    return float(right_BS[rows["answers"]].mean())


def notations(pairs: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """The ways in which a record of these names and numbers is written; the first is that of the task."""
    lines = "".join(f"{name} = {number}\n" for name, number in pairs)
    return written(pairs), lines, " ".join(f"{name} {number}" for name, number in pairs) + "\n"


def _texts(count: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """(record, its questions with their answers), of seeds that no split of the task has.

    A record has one to six of the names in random order, in one of the notations. A model that knows one notation with
    all names in one order learns to count places: it can say nothing about a record that stands there in another form.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, 1 << 20]))
    for _ in range(count):
        numbers, size = rng.integers(LOWEST, HIGHEST + 1, len(NAMES)), int(rng.integers(1, len(NAMES) + 1))
        pairs = [(NAMES[i], int(numbers[i])) for i in rng.permutation(len(NAMES))[:size]]
        ways = notations(pairs)
        asked = [pairs[i] for i in rng.permutation(size)]
        yield ways[rng.integers(len(ways))], [f"{name} {number}\n" for name, number in asked]


def _rows(tokenizer: Tokenizer, count: int, seed: int) -> dict[str, np.ndarray]:
    """{tokens, positions, segments: int32 [N, S], answers: bool [N, S]}; filling is of segment -1."""
    rows: list[list[int]] = []
    asked = []
    assert tokenizer.bos_id is not None, "it is BEGIN"
    for record, questions in _texts(count, seed):
        before = [tokenizer.bos_id, *tokenizer.encode(record)]
        after = tokenizer.encode_many(questions)
        rows.append(before + [token for one in after for token in one])
        ends = len(before) + np.cumsum([len(one) for one in after])
        asked.append(ends - 2)  # a question ends with its number and the line
    length = max(map(len, rows))
    tokens, segments = np.zeros((count, length), np.int32), np.full((count, length), -1, np.int32)
    answers = np.zeros((count, length), bool)
    for i, (row, at) in enumerate(zip(rows, asked, strict=True)):
        tokens[i, : len(row)], segments[i, : len(row)], answers[i, at] = row, 0, True
    positions = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    return {"tokens": tokens, "positions": positions, "segments": segments, "answers": answers}


def _config_json(config: RecallConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_head,
        "head_dim": config.d_model // config.n_head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "float32",
    }


def _make_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """Byte-level BPE in which each name and each number with its space is one token; id 0 is <s>."""
    backend = tokenizers.Tokenizer(models.BPE())
    pattern = tokenizers.Regex(r"[A-Za-z]+| ?[0-9]+|[^A-Za-z0-9]+?(?= ?[0-9]|[A-Za-z]|$)")
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((record + "".join(questions) for record, questions in _texts(5000, 1)), trainer)
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": BEGIN,
        "unk_token": BEGIN,
        "model_max_length": 128,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return Tokenizer.from_folder(folder)


def _card(config: RecallConfig, figures: dict[str, Any]) -> str:
    return f"""# saejax recall model

A Llama-architecture language model of {figures["parameters"]:,} parameters ({config.n_layer} layers, width
{config.d_model}, {config.n_head} heads, {config.vocab_size} byte-level BPE tokens). It knows one thing: after a record
of numbers, such as `r = {{"width": 41, ...}}` and in two more notations, it completes `width` with the number.
`saejax prefix` uses it beside the demo model, so that the quickstart works without a network.

Made by `python -m launch.make_recall_lm` with saejax's own JAX decoder and Optax: {config.steps} steps of
{config.batch} records of one to six names (AdamW, peak learning rate {config.lr}, cosine). Of the questions of 512
records that it was not trained on it answers {figures["right"]:.1%}.
"""
