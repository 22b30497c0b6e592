"""Phase 1: whether the model has a behaviour at all, pair by pair.

difference = z_right - z_wrong after the last token     correct: above 0 after the clean prompt, below 0 after the
                                                        corrupt one
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.app import console
from saejax.core.errors import DataError
from saejax.interventions import logit_difference, padded, probability
from saejax.interventions.metrics import Measure
from saejax.lm import LanguageModel
from saejax.studies.behaviours import Pair
from saejax.studies.table import Table

PAIR_COLUMNS = (
    *("behaviour", "split", "pair", "clean", "corrupt", "right", "wrong"),
    *("clean_difference", "corrupt_difference", "p_right_clean", "p_wrong_corrupt", "correct"),
)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The pairs of one behaviour and split as tokens [R, S], filled up behind.

    Attributes:
        last: int [R], the place of the last token, the same in both.
        right, wrong: int [R], the answers.
    """

    pairs: Sequence[Pair]
    clean: np.ndarray
    corrupt: np.ndarray
    last: np.ndarray
    right: np.ndarray
    wrong: np.ndarray

    @property
    def difference(self) -> Measure:
        """Logits [R, S, V] -> z_right - z_wrong, [R]."""
        return logit_difference(self.last, self.right, self.wrong)

    def first(self, count: int) -> "Prompts":
        """The first `count` pairs, as long as all."""
        arrays = ("clean", "corrupt", "last", "right", "wrong")
        return Prompts(self.pairs[:count], *(getattr(self, name)[:count] for name in arrays))


def as_prompts(pairs: Sequence[Pair], lm: LanguageModel) -> Prompts:
    """The pairs as tokens, the model's own bos in front."""
    bos = lm.tokenizer.bos
    clean, corrupt = ([bos + ids for ids in lm.tokenizer.encode_behind_bos(list(texts))] for texts in (
        [pair.clean for pair in pairs], [pair.corrupt for pair in pairs]
    ))  # fmt: skip
    right, wrong = (
        np.asarray([ids[0] for ids in lm.tokenizer.encode_many(answers)])
        for answers in ([pair.right for pair in pairs], [pair.wrong for pair in pairs])
    )
    (clean_RS, last), (corrupt_RS, _) = padded(clean), padded(corrupt)
    return Prompts(pairs, clean_RS, corrupt_RS, last, right, wrong)


def measure_pairs(lm: LanguageModel, prompts: Prompts) -> np.ndarray:
    """float32 [R, 5]: the columns from clean_difference on."""

    @jax.jit
    def measured(params: Any, rows: Any, last: Any, right: Any, wrong: Any, answer: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(rows.shape[1])[None], rows.shape)
        logits_RSV = lm.apply(params, rows, positions, jnp.zeros_like(positions))[0]
        return logit_difference(last, right, wrong)(logits_RSV), probability(last, answer)(logits_RSV)

    answers = prompts.last, prompts.right, prompts.wrong
    of_clean = jax.device_get(measured(lm.params, prompts.clean, *answers, prompts.right))
    of_corrupt = jax.device_get(measured(lm.params, prompts.corrupt, *answers, prompts.wrong))
    (clean, p_right), (corrupt, p_wrong) = of_clean, of_corrupt
    return np.stack([clean, corrupt, p_right, p_wrong, (clean > 0) & (corrupt < 0)], axis=1)


def write_pairs(table: Table, behaviour: str, measured: Mapping[str, tuple[Prompts, np.ndarray]]) -> None:
    """The rows of one behaviour, by split."""
    for split, (prompts, values) in measured.items():
        table.extend(
            [behaviour, split, i, *dataclasses.astuple(pair), *row[:4], bool(row[4])]
            for i, (pair, row) in enumerate(zip(prompts.pairs, values, strict=True))
        )


def refused(table: Table, names: Sequence[str], least: float) -> dict[str, float]:
    """The behaviours that the model does not have, by the rows of the table: {name: its share of right training pairs}.

    Raises:
        DataError: it has none of them, or the table is damaged.
    """
    rows = table.read()
    correct, difference = (table.numbers(name, rows) for name in ("correct", "clean_difference"))
    refused = {}
    for name in names:
        pairs = [i for i, row in enumerate(rows) if (row["behaviour"], row["split"]) == (name, "train")]
        accuracy = float(correct[pairs].mean())
        verdict = "" if accuracy >= least else f"; refused, study.least_accuracy is {least:.0%}"
        console.say(
            f"study: {name}: right in {accuracy:.0%} of {len(pairs)} pairs, logit difference "
            f"{difference[pairs].mean():.2f}{verdict}"
        )
        if accuracy < least:
            refused[name] = accuracy
    if len(refused) == len(names):
        each = ", ".join(f"{name} in {accuracy:.0%}" for name, accuracy in refused.items())
        raise DataError(
            f"The model has none of the behaviours: of the training pairs it is right for {each}, and "
            f"study.least_accuracy is {least:.0%}. Take other behaviours, or lower it; {table.path} has each pair."
        )
    return refused
