"""Phase 1: whether the model has a behaviour at all, pair by pair.

difference = z_right - z_wrong after the last token     correct: above 0 after the clean prompt, below 0 after the
                                                        corrupt one
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from saejax.core.errors import DataError
from saejax.interventions import both, logit_difference, padded, probability
from saejax.interventions.metrics import Measure
from saejax.lm import LanguageModel
from saejax.study.behaviours import Pair
from saejax.study.table import Table

COLUMNS = (
    *("behaviour", "split", "pair", "clean", "corrupt", "right", "wrong"),
    *("clean_difference", "corrupt_difference", "p_right_clean", "p_wrong_corrupt", "correct"),
)


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The pairs of one behaviour and split as tokens, filled up behind.

    Attributes:
        pairs: R of them.
        clean, corrupt: int32 [R, S].
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


def as_prompts(pairs: Sequence[Pair], lm: LanguageModel) -> Prompts:
    """The pairs as tokens, the model's own bos in front."""
    bos = [] if lm.tokenizer.bos_id is None else [lm.tokenizer.bos_id]
    clean, corrupt = ([bos + ids for ids in lm.tokenizer.encode_many(list(texts))] for texts in (
        [pair.clean for pair in pairs], [pair.corrupt for pair in pairs]
    ))  # fmt: skip
    right, wrong = (
        np.asarray([ids[0] for ids in lm.tokenizer.encode_many(answers)])
        for answers in ([pair.right for pair in pairs], [pair.wrong for pair in pairs])
    )
    (clean_RS, last), (corrupt_RS, _) = padded(clean), padded(corrupt)
    return Prompts(pairs, clean_RS, corrupt_RS, last, right, wrong)


def measure(lm: LanguageModel, prompts: Prompts) -> np.ndarray:
    """float32 [R, 5]: the columns from clean_difference on."""
    difference = logit_difference(prompts.last, prompts.right, prompts.wrong)
    measures = {
        "clean": both(d=difference, p=probability(prompts.last, prompts.right)),
        "corrupt": both(d=difference, p=probability(prompts.last, prompts.wrong)),
    }

    @jax.jit
    def both_runs(params, clean, corrupt):  # type: ignore[no-untyped-def]
        return [measures[name](_logits(lm, params, rows)) for name, rows in (("clean", clean), ("corrupt", corrupt))]

    clean, corrupt = jax.device_get(both_runs(lm.params, prompts.clean, prompts.corrupt))
    correct = (clean["d"] > 0) & (corrupt["d"] < 0)
    return np.stack([clean["d"], corrupt["d"], clean["p"], corrupt["p"], correct], axis=1)


def _logits(lm: LanguageModel, params: object, tokens_RS: jax.Array) -> jax.Array:
    positions = np.broadcast_to(np.arange(tokens_RS.shape[1])[None], tokens_RS.shape)
    return lm.apply(params, tokens_RS, positions, np.zeros_like(positions))[0]


def write(table: Table, behaviour: str, measured: Mapping[str, tuple[Prompts, np.ndarray]]) -> None:
    """The rows of one behaviour, by split."""
    for split, (prompts, values) in measured.items():
        table.extend(
            [behaviour, split, i, *dataclasses.astuple(pair), *row[:4], bool(row[4])]
            for i, (pair, row) in enumerate(zip(prompts.pairs, values, strict=True))
        )


def refuse(behaviour: str, accuracy: float, least: float) -> None:
    """Raises DataError where the model has less of the behaviour than the study wants."""
    if accuracy < least:
        raise DataError(
            f"The model does not have the behaviour {behaviour}: it is right in {accuracy:.0%} of the training pairs, "
            f"and study.least_accuracy is {least:.0%}. Take another behaviour, or lower the bar; baseline.csv has each "
            "pair."
        )
