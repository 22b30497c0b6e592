"""Records as arrays: what the encoder reads, and what each model reads and shall say after the prefix.

Student:  [bos] [P latents] prompt answer      teacher:  [bos] context prompt answer

The bos token stands before the prefix, because a model expects it first. An answer's tokens are those that its text has
by itself; where prompt and answer meet nothing is merged.

Shape letters: N records, L ids, S tokens after the prefix, T tokens with the context, A tokens of an answer.
"""

import dataclasses
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.lm import LanguageModel
from saejax.prefix.config import PrefixConfig
from saejax.prefix.records import Record, texts
from saejax.store.order import derive_key, shuffled
from saejax.store.statistics import Statistics
from saejax.text import Tokenizer

Columns = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Spoken:
    """The records as one model reads them: ids of each, without bos."""

    contexts: list[list[int]]
    prompts: list[list[int]]
    answers: list[list[int]]


def spoken(tokenizer: Tokenizer, records: Sequence[Record], config: PrefixConfig) -> Spoken:
    """Contexts, prompts and answers in a model's tokens.

    Raises:
        DataError: a prompt or an answer without a token.
    """
    contexts, prompts = (tokenizer.encode_behind_bos(texts(records, t)) for t in ("{context}", config.prompt))
    answers = tokenizer.encode_many(texts(records, config.answer))
    if not all(prompts) or not all(answers):
        raise DataError("A prompt or an answer has no tokens; see prefix.prompt and prefix.answer.")
    return Spoken(contexts, prompts, answers)


def encoder_ids(records: Sequence[Record], config: PrefixConfig, tokenizer: Tokenizer | None) -> np.ndarray:
    """The encoder's input, int32 [N, L]: bytes or tokens, each plus one; 0 is filling."""
    read = texts(records, config.reads)
    if config.encoder == "bytes":
        rows = [list(text.encode(errors="replace")) for text in read]
    else:
        assert tokenizer is not None, "tokens are read with a tokenizer"
        rows = tokenizer.encode_many(read)
    return padded_rows([[i + 1 for i in row[: config.length]] for row in rows], at_least=1)


def encoder_vocab(config: PrefixConfig, tokenizer: Tokenizer) -> int:
    """Ids that `encoder_ids` can give, without the filling."""
    return 256 if config.encoder == "bytes" else tokenizer.largest_id + 1


def training_arrays(records: Sequence[Record], config: PrefixConfig, models: Mapping[str, LanguageModel]) -> Columns:
    """{"ids": [N, L], and of each model "<model>/tokens" [N, S], "/at", "/targets" and "/weights" [N, A]}; with
    distillation "/text" [N, T] and "/text_at" [N, A] too.

    `at` is where in the tokens a target is predicted, `text_at` the same in the text with its context.

    Raises:
        DataError: a model's context is too short for the longest record.
    """
    first = next(iter(models.values()))
    arrays = {"ids": encoder_ids(records, config, first.tokenizer)}
    for name, lm in models.items():
        ids, bos = spoken(lm.tokenizer, records, config), lm.tokenizer.bos
        tokens = [p + a[:-1] for p, a in zip(ids.prompts, ids.answers, strict=True)]
        check_fits(name, lm, len(bos) + config.latents + max(map(len, tokens)) + 1)
        at = [[len(p) - 1 + i for i in range(len(a))] for p, a in zip(ids.prompts, ids.answers, strict=True)]
        weights = [[config.first_token_weight, *[1.0] * (len(a) - 1)] for a in ids.answers]
        arrays |= {
            f"{name}/tokens": padded_rows(tokens),
            f"{name}/at": padded_rows(at),
            f"{name}/targets": padded_rows(ids.answers),
        }
        arrays[f"{name}/weights"] = padded_rows(weights, dtype=np.float32)
        if config.distill:
            text = [bos + c + t for c, t in zip(ids.contexts, tokens, strict=True)]
            check_fits(name, lm, max(map(len, text)) + 1)
            before = [len(bos) + len(c) for c in ids.contexts]
            arrays[f"{name}/text"] = padded_rows(text)
            arrays[f"{name}/text_at"] = padded_rows([[n + i for i in row] for n, row in zip(before, at, strict=True)])
    return arrays


def check_fits(name: str, lm: LanguageModel, tokens: int) -> None:
    """Raise DataError if a model cannot read so many tokens."""
    if tokens > lm.config.context_length:
        raise DataError(
            f"The longest record has {tokens} tokens of {name} with prompt and answer; the model reads "
            f"{lm.config.context_length}. Leave such records out, or lower prefix.latents or prefix.answer_tokens."
        )


def padded_rows(rows: Sequence[Sequence[float]], dtype: type = np.int32, at_least: int = 0) -> np.ndarray:
    """[N, longest], filled up with 0."""
    filled: np.ndarray = np.zeros((len(rows), max([at_least, *map(len, rows)])), dtype)
    for out, row in zip(filled, rows, strict=True):
        out[: len(row)] = row
    return filled


@dataclasses.dataclass
class SampleBatches:
    """Batches of samples as a pure function of (seed, step): `store.BatchSource`.

    Every epoch has each record once, in an order of its own; a batch may begin in one epoch and end in the next.

    Raises:
        ConfigError: there are fewer records than a batch has.
    """

    arrays: Columns
    batch_size: int
    seed: int
    hook_points: dict[str, int] = dataclasses.field(default_factory=dict)
    statistics: dict[str, Statistics] = dataclasses.field(default_factory=dict)
    dtype: np.dtype = dataclasses.field(default_factory=lambda: np.dtype(np.int32))
    epoch_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.epoch_rows = len(self.arrays["ids"])
        if self.batch_size > self.epoch_rows:
            raise ConfigError(
                f"train.batch_size is {self.batch_size}, and there are {self.epoch_rows} records: lower it."
            )

    def iterate(self, start_step: int = 0) -> Generator[Columns]:
        """The batches of start_step, start_step + 1, ... without end."""
        step = start_step
        while True:
            yield self.whole_batch_at(step)
            step += 1

    def whole_batch_at(self, step: int) -> Columns:
        """{name: [B, ...]} of one step."""
        rows = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, n = rows // self.epoch_rows, self.epoch_rows
        orders = {int(e): shuffled(n, derive_key("records", self.seed, int(e))) for e in np.unique(epochs)}
        index = np.asarray([orders[int(e)][r % n] for e, r in zip(epochs, rows, strict=True)])
        return {name: values[index] for name, values in self.arrays.items()}

    def places(self, step: int) -> Columns:
        """{}: records lie in no store."""
        return {}
