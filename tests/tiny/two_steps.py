"""A language model that answers in two steps, its weights set by hand, and dictionaries that equal its MLPs.

Two questions x0 and x1 have the answers y0 and y1. A prompt is <bos>, words, one question among them, and `end`:

    attention 0     `end` looks at the question alone, all others at <bos>:     seen_j = 1 at `end`, else 0
    MLP 0, step A   a_j = relu(2 seen_j - 1)            reads seen_j, writes to a place of its own
    MLP 1, step B   b_j = relu(2 a_j - 1)               reads that, writes 8 to the answer's place
    logits          the answers' places; all others are 0

Attention 1 writes nothing. Both MLPs have a third neuron that nobody reads. a_j is 0 or 1 in every prompt, so that
b_j = a_j there, and half of a_j is no b_j at all: the second step is more than a louder first one. Norms change
nothing: each token has 2^20 at a place of its own, beside which they see no other number; they divide and multiply by
2^18, that place by 0.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.coders import CoderConfig, Sites, build
from saejax.lm import LanguageModel, decoder
from saejax.lm.conventions import DecoderConfig
from saejax.trained import TrainedCoder
from tiny.attributed import tokenizer_of

X, WORD, END, Y, VOCAB = (0, 1), 2, 3, (4, 5), 8  # 6 is one more word, 7 is bos
BOS = VOCAB - 1
# Where in the residual stream: tokens themselves, what `end` has seen, A's and B's outputs, and what nobody reads.
SEEN, A, B, UNREAD, LARGE, WIDTH = (8, 9), (10, 11), (12, 13), 14, 15, 16
READS, WRITES = (tuple(f"blocks.{i}.{name}" for i in range(2)) for name in ("mlp_in", "mlp_out"))
LOUD = 8.0
PROMPT = np.array([BOS, X[0], WORD, END], np.int32)


@functools.cache
def lm() -> LanguageModel:
    config = DecoderConfig(2, WIDTH, 1, 4, 3, VOCAB, 12, "relu", 1e-5, False, norm="rms", attn_scale=1.0)
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    p = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    p["W_E"][:, :VOCAB] = np.eye(VOCAB)
    p["W_E"][:, LARGE] = 2.0**20
    for norm in (p["ln_final"], *(block[name] for block in p["blocks"] for name in ("ln1", "ln2"))):
        norm["w"][:LARGE] = 2.0**18
    look = p["blocks"][0]["attn"]
    look["W_Q"][:VOCAB, 0, 0] = 7  # for <bos>
    look["W_Q"][END, 0, :2] = 0, 7  # for a question
    look["W_K"][BOS, 0, 0] = look["W_K"][X[0], 0, 1] = look["W_K"][X[1], 0, 1] = 7
    for j in range(2):
        look["W_V"][X[j], 0, 2 + j] = look["W_O"][0, 2 + j, SEEN[j]] = 1
    for block, (W_in, b_in, W_out) in zip(p["blocks"], steps(), strict=True):
        block["mlp"]["W_in"][:], block["mlp"]["b_in"][:], block["mlp"]["W_out"][:] = W_in, b_in, W_out
    for j in range(2):
        p["W_U"][B[j], Y[j]] = 1
    return LanguageModel(config, jax.tree.map(jnp.asarray, p), tokenizer_of(VOCAB), {"model": "two steps"})


def steps() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(W_in, b_in, W_out) of both MLPs; the third neuron fires on `end`, then on the third of the one before."""
    found = []
    for reads, writes in (((*SEEN, END), (*A, UNREAD)), ((*A, UNREAD), (*B, UNREAD))):
        W_in, W_out = np.zeros((WIDTH, 3), np.float32), np.zeros((3, WIDTH), np.float32)
        W_in[reads, range(3)] = 2
        W_out[range(3), writes] = 1
        found.append((W_in, np.full(3, -1, np.float32), W_out))
    found[1][2][:2] *= LOUD
    return found


def transcoders() -> list[TrainedCoder]:
    """One for each MLP, and equal to it."""
    return [
        _coder("transcoder", READS[i : i + 1], WRITES[i : i + 1], {"W_enc": W_in, "b_enc": b_in, "W_dec": W_out})
        for i, (W_in, b_in, W_out) in enumerate(steps())
    ]


def clt(skipped: Sequence[float] = (0, 0)) -> list[TrainedCoder]:
    """A cross-layer transcoder that is exact on all prompts. It skips step B: of each answer's, this share.

    A's latent writes so much of what MLP 1 writes, and B's the rest; one that has nothing to write does not fire.
    """
    (W_in0, b_in0, W_out0), (W_in1, b_in1, W_out1) = steps()
    own, early = W_out1.copy(), np.zeros_like(W_out1)
    for j, share in enumerate(skipped):
        early[j], own[j] = share * W_out1[j], (1 - share) * W_out1[j]
        b_in1[j] = -9 if share == 1 else b_in1[j]
    params = {
        "W_enc": np.stack([W_in0, W_in1]),
        "b_enc": np.stack([b_in0, b_in1]),
        "W_dec_0": np.stack([W_out0, early], axis=1),
        "W_dec_1": own[:, None],
    }
    return [_coder("clt", READS, WRITES, params)]


def _coder(topology: str, reads: tuple[str, ...], writes: tuple[str, ...], params: dict[str, Any]) -> TrainedCoder:
    settings = {
        "d_sae": 3,
        "unit_decoder_every": 0,
        "matmul_dtype": "float32",
        "init": "uniform",
        "encoder_centre": False,
    }
    coder = build(CoderConfig("standard", topology=topology, **settings), [WIDTH] * len(reads), 10)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    whole = {name: np.asarray(params.get(name, np.zeros(s.shape, np.float32))) for name, s in shapes.items()}
    assert set(params) <= set(whole) and all(whole[name].shape == s.shape for name, s in shapes.items())
    ones = (1.0,) * len(reads)
    coder, whole = coder.inference(whole, coder.init_stats())
    own = {name: np.asarray(value) for name, value in whole.items()}
    return TrainedCoder(coder, own, Sites(reads, writes, ones, ones, coder.topology.stacked))


def prompts(count: int, seed: int = 0) -> np.ndarray:
    """int32 [count, 8]: <bos>, six words of which one is a question, `end`."""
    rng = np.random.default_rng(seed)
    rows = np.full((count, 8), BOS, np.int32)
    rows[:, 1:7] = rng.choice([WORD, 6], (count, 6))
    rows[np.arange(count), rng.integers(1, 7, count)] = rng.choice(X, count)
    rows[:, 7] = END
    return rows
