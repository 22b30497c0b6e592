"""A decoder of three layers for the tests of language models: its files, its rows, its runs."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from saejax.lm import HOOK_NAMES, LanguageModel, checkpoint, decoder
from saejax.lm.conventions import DecoderConfig

VOCAB, BOS, MASK, POSITIONS = 97, 95, 96, 48
CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": BOS,
}
POINTS = [f"blocks.{i}.{name}" for i in range(3) for name in HOOK_NAMES]


def write_tokenizer(folder: Path, words: int = VOCAB - 2) -> None:
    """`w0` ... one id each, then two special tokens; id 0 is an ordinary word."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<mask>"])
    backend.save(str(folder / "tokenizer.json"))


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    """A model of transformers and the tokenizer of these tests in a folder."""
    model.save_pretrained(folder, **settings)
    write_tokenizer(folder)
    return folder


def random_params(config_json: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Nothing is zero or one, so that no bias or scale can be forgotten unnoticed."""
    rng = np.random.default_rng(seed)
    config = checkpoint.architecture(config_json, "").read_config(config_json)
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    return jax.tree.map(lambda x: rng.normal(0.0, 0.3, x.shape).astype(np.float32), shapes)


def rows_of(lengths: list[list[int]], seed: int = 0) -> dict[str, np.ndarray]:
    """{tokens, positions, segments} [rows, POSITIONS]: segments of these lengths, the rest padding."""
    rng = np.random.default_rng(seed)
    shape = (len(lengths), POSITIONS)
    rows = {
        "tokens": rng.integers(0, VOCAB, shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segments": np.full(shape, -1, np.int32),
    }
    for r, pieces in enumerate(lengths):
        start = 0
        for piece, length in enumerate(pieces):
            rows["positions"][r, start : start + length] = np.arange(length)
            rows["segments"][r, start : start + length] = piece
            start += length
    return rows


def in_order(rows: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    return rows["tokens"], rows["positions"], rows["segments"]


@functools.cache
def compiled(config: DecoderConfig) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Logits and every hook point, compiled once a configuration and shape."""
    return jax.jit(lambda params, t, p, s: decoder.run(config, params, t, p, s, POINTS))


def run_rows(lm: LanguageModel, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    logits, activations = compiled(lm.config)(lm.params, *in_order(rows))
    return {k: np.asarray(v) for k, v in {**activations, "logits": logits}.items()}
