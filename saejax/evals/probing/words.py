"""Words of the vocabulary and prompts that ask for their first letter (arXiv 2409.14507, as SAEBench sets the task).

    \\n{example} has the first letter: {LETTER}   ten times
    \\n{word}

A prompt is made of tokens, so each word is one token in it, and it ends with the word: later tokens change nothing
there.
"""

import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from saejax.text import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORD = re.compile(" ?[A-Za-z]+")
_ASKS = " has the first letter:"
_EXAMPLES = 10
_TRAIN_SHARE = 0.8


class Words(NamedTuple):
    """Words of one token each: `ids` int64 [N], `letters` int64 [N], 0 for a."""

    ids: np.ndarray
    letters: np.ndarray


def vocabulary(tokenizer: Tokenizer) -> Words:
    """All tokens that are ASCII letters, with at most one space in front."""
    ids = [i for i in tokenizer.usable_ids if i not in tokenizer.special_ids]
    found = [(i, s) for i, s in zip(ids, tokenizer.token_strings(ids), strict=True) if _WORD.fullmatch(s)]
    letters = [LETTERS.index(s.lstrip(" ")[0].lower()) for _, s in found]
    return Words(np.array([i for i, _ in found], np.int64), np.array(letters, np.int64))


def divided(words: Words, seed: int, most: int = 0) -> tuple[Words, Words]:
    """(training words, held-out words): four fifths and one fifth, in random order; of at most `most` words, 0 all."""
    order = _rng(seed, "divide").permutation(len(words.ids))[: most or None]
    cut = int(len(order) * _TRAIN_SHARE)
    first, second = (Words(words.ids[part], words.letters[part]) for part in (order[:cut], order[cut:]))
    return first, second


def prompts(tokenizer: Tokenizer, words: Words, bos: Sequence[int], seed: int, name: str) -> list[list[int]]:
    """The tokens of one prompt for each word, whose examples are other ones of these words, drawn by (seed, name)."""
    rng, n = _rng(seed, name), len(words.ids)
    newline, asks = _inside(tokenizer, "\n"), _inside(tokenizer, _ASKS)
    answers = [_inside(tokenizer, f" {letter.upper()}") for letter in LETTERS]
    made = []
    for i in range(n):
        tokens = list(bos)
        # Of n - 1 others: those from i on stand for the ones behind it.
        for other in rng.choice(n - 1, size=min(_EXAMPLES, n - 1), replace=False):
            j = int(other) + (other >= i)
            tokens += [*newline, int(words.ids[j]), *asks, *answers[words.letters[j]]]
        made.append([*tokens, *newline, int(words.ids[i])])
    return made


def _inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a piece within a text: many tokenizers put a space in front of the first one."""
    before, both = tokenizer.encode_many(["a", f"a{text}"])
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text)


def _rng(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(f"first_letter/{name}".encode())])
