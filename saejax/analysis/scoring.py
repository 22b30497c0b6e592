"""Scores of an explanation of a latent: detection and fuzzing (delphi, arXiv 2410.13928).

Detection: a judge sees the explanation and plain passages, half of them active, half random ones in which the latent is
silent, and says which ones fit. Fuzzing: all passages have marked tokens; in the active ones those on which the latent
is strong, in the random ones any; the judge says where the marked tokens fit. The score is the balanced accuracy:

    (TP / (TP + FN) + TN / (TN + FP)) / 2        0.5 by chance, 1 at best

The judge never sees the passages that the explanation was made from.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from saejax.analysis.endpoint import Messages
from saejax.analysis.explaining import Chat, told, without_thoughts
from saejax.analysis.passages import FeaturePassages, Passage

# As delphi: more at once is cheaper, and the passages tell on each other.
PER_REQUEST = 5

_ANSWER = """\
Answer with one list, in the order of the passages: 1 for yes, 0 for no, as [1, 0, 0, 1, 0]. Any number of them may be \
1. Write nothing else.

Here is a case with its answer.

Explanation: names of colours that describe clothes
Passage 1: {}
Passage 2: {}
Passage 3: {}
Answer: [1, 0, 0]"""
_TASKS = {
    "detection": (
        "One feature of a language model is described by an explanation. You get passages of text. Say of each whether "
        "the feature is active somewhere in it, going by the explanation alone. "
    )
    + _ANSWER.format(" she wore a red coat to", " the meeting was moved to", " the sky turned blue and"),
    "fuzzing": (
        "One feature of a language model is described by an explanation. You get passages of text with tokens marked "
        "by << and >>. Say of each whether the explanation fits the marked tokens, all of them: 0 if one does not. "
    )
    + _ANSWER.format(" she wore a<< red>> coat to", " she wore<< a>> green hat", "<< the>> sky turned blue and"),
}
KINDS = tuple(_TASKS)


@dataclass(frozen=True)
class Score:
    """The judge's answers against the truth; `failed` ones could not be read and count nowhere else."""

    true_positives: int = 0
    true_negatives: int = 0
    false_positives: int = 0
    false_negatives: int = 0
    failed: int = 0

    @classmethod
    def of(cls, truths: Sequence[bool], verdicts: Sequence[bool | None]) -> "Score":
        n = Counter(zip(truths, verdicts, strict=True))
        return cls(n[True, True], n[False, False], n[False, True], n[True, False], n[True, None] + n[False, None])

    @property
    def balanced_accuracy(self) -> float | None:
        """None where one of the two kinds of passages has no answer."""
        positives = self.true_positives + self.false_negatives
        negatives = self.true_negatives + self.false_positives
        if not positives or not negatives:
            return None
        return (self.true_positives / positives + self.true_negatives / negatives) / 2

    @property
    def precision(self) -> float:
        return self.true_positives / max(1, self.true_positives + self.false_positives)

    @property
    def recall(self) -> float:
        return self.true_positives / max(1, self.true_positives + self.false_negatives)

    @property
    def f1(self) -> float:
        """2 TP / (2 TP + FP + FN)."""
        wrong = self.false_positives + self.false_negatives
        return 2 * self.true_positives / max(1, 2 * self.true_positives + wrong)

    def to_json(self) -> dict[str, Any]:
        names = ("balanced_accuracy", "precision", "recall", "f1")
        rounded = {name: None if (v := getattr(self, name)) is None else round(v, 4) for name in names}
        return rounded | vars(self)


def score(kind: str, explanation: str, feature: FeaturePassages, chat: Chat) -> Score:
    """Ask the judge about all judged passages, `PER_REQUEST` at once, in an order drawn by the latent's number.

    Args:
        kind: one of `KINDS`.
    """
    truths: list[bool] = []
    verdicts: list[bool | None] = []
    for batch in batches(kind, feature):
        truths += [truth for _, truth in batch]
        verdicts += verdicts_in(chat(judge_request(kind, explanation, [text for text, _ in batch])), len(batch))
    return Score.of(truths, verdicts)


def batches(kind: str, feature: FeaturePassages) -> list[list[tuple[str, bool]]]:
    """(text, whether it is an active passage) of every judged passage, in batches of one request."""
    active, silent = [(p, True) for p in feature.active], [(p, False) for p in feature.random]
    rng = random.Random(feature.feature)
    if kind == "fuzzing":
        count = n_marked_wrongly(feature.active)
        cases = [(p.text(p.strong), truth) for p, truth in active]
        cases += [(p.text(marked_wrongly(p, count, rng)), truth) for p, truth in silent]
    else:
        cases = [(p.text(), truth) for p, truth in active + silent]
    rng.shuffle(cases)
    return [cases[start : start + PER_REQUEST] for start in range(0, len(cases), PER_REQUEST)]


def n_marked_wrongly(active: Sequence[Passage]) -> int:
    """The number of tokens marked in a random passage: the mean number of active tokens in the others, rounded up."""
    counts = [sum(map(bool, passage.activations)) for passage in active]
    return math.ceil(sum(counts) / len(counts)) if counts else 0


def marked_wrongly(passage: Passage, count: int, rng: random.Random) -> set[int]:
    """Places to mark in a passage where the latent is silent: the one it was cut around, and others at random.

    Active passages are cut around a marked token, and the place alone shall tell the judge nothing.
    """
    others = [i for i in range(len(passage.tokens)) if i != passage.peak]
    return {passage.peak, *rng.sample(others, min(max(count - 1, 0), len(others)))}


def judge_request(kind: str, explanation: str, texts: Sequence[str]) -> Messages:
    passages = "\n".join(f"Passage {i}: {text}" for i, text in enumerate(texts, 1))
    content = f"Explanation: {explanation}\n\n{passages}\n\nAnswer:"
    return told(_TASKS[kind], content)


def verdicts_in(answer: str, count: int) -> list[bool | None]:
    """The last list of `count` times 0, 1, true or false in the answer; None for all where there is none."""
    for listed in reversed(re.findall(r"\[[^\[\]]*\]", without_thoughts(answer))):
        try:
            values = json.loads(listed.lower())
        except (ValueError, RecursionError):
            continue
        if len(values) == count and all(value in (0, 1) for value in values):
            return [bool(value) for value in values]
    return [None] * count


def judge_wording() -> tuple[str, ...]:
    """The judge's task, for `wording`."""
    return tuple(_TASKS.values())
