"""Exact match and F1 of an answer, as SQuAD counts them (Rajpurkar et al. 2016, arXiv:1606.05250).

    exact match = 1 where the words are those of a right answer
    F1          = 2 shared / (words said + words of the right answer), of the answer that is best

Words are compared in lower case, without the punctuation of ASCII and without a, an, the, as the data set's own
evaluation script has it: an article ends where a letter does, so of "the\u2013end" the word "\u2013end" stays.
"""

import collections
import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words_of(text: str) -> list[str]:
    """The words that are compared."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 or 0."""
    return float(any(words_of(answer) == words_of(text) for text in right))


def f1(answer: str, right: Sequence[str]) -> float:
    """Between 0 and 1. Of two texts without words it is 1."""
    return max(_f1(words_of(answer), words_of(text)) for text in right)


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    shared = (collections.Counter(words) & collections.Counter(right)).total()
    return 2 * shared / (len(words) + len(right))


def first_line(text: str) -> str:
    """The part of a model's answer that counts."""
    return re.split(r"[\r\n]", text.strip(), maxsplit=1)[0].strip()
