"""Records, as SQuAD has them: a context, a question about it, and the answers that count as right."""

import dataclasses
import hashlib
import heapq
import json
from collections.abc import Iterable, Sequence
from typing import Any

from saejax.core.errors import ConfigError, DataError
from saejax.prefix.config import PrefixConfig
from saejax.text import TextConfig
from saejax.text.documents import hash_fraction
from saejax.text.sources import rows_of


@dataclasses.dataclass(frozen=True)
class Record:
    """The parts of one sample; the first answer is trained on."""

    context: str
    question: str
    answers: tuple[str, ...]

    def fill(self, template: str) -> str:
        """`template` with the record's context, question and first answer."""
        return template.format(context=self.context, question=self.question, answer=self.answers[0])


def read_records(text: TextConfig, config: PrefixConfig, seed: int) -> tuple[list[Record], list[Record]]:
    """(records to train on, held-out records): config.samples and config.heldout, drawn by hash from all rows.

    A context's hash decides its split, so that no held-out context was trained on. A row is drawn by its number and
    `seed`, so that the first articles of a data set are not all there is.

    Raises:
        ConfigError: text names no rows with columns.
        DataError: a row without these columns, or a split without a row.
    """
    if not text.has_rows or text.sources:
        raise ConfigError(
            "prefix.source=text reads rows with columns: set text.source to files (with text.paths) or hub (with "
            "text.dataset), and no text.sources."
        )

    def rank(number: int) -> str:
        return hashlib.sha256(f"record {seed} {number}".encode()).hexdigest()

    ranked = []
    for name, count in (("train", config.samples), ("heldout", config.heldout)):
        records = ((number, record_of(row, config, where)) for number, (where, row) in enumerate(rows_of(text)))
        chosen = heapq.nsmallest(
            count,
            (
                (rank(number), number, record)
                for number, record in records
                if (hash_fraction(record.context) < text.heldout_fraction) == (name == "heldout")
            ),
        )
        if not chosen:
            raise DataError(
                f"No row is in the split {name}: a context's hash decides, and text.heldout_fraction is "
                f"{text.heldout_fraction}. Give more rows, or another fraction."
            )
        ranked.append([record for *_, record in chosen])
    return ranked[0], ranked[1]


def record_of(row: dict[str, Any], config: PrefixConfig, where: str) -> Record:
    """The record of a row.

    Raises:
        DataError: a column is missing or holds something else; names the row.
    """
    values = {}
    for name in ("context", "question", "answers"):
        column = getattr(config, name)
        if column not in row:
            raise DataError(f"{where}: no column {column!r} for prefix.{name}; the row has {', '.join(map(str, row))}.")
        values[name] = row[column]
    for name in ("context", "question"):
        if not isinstance(values[name], str):
            raise DataError(f"{where}: prefix.{name} holds {type(values[name]).__name__}, not text.")
    answers = values["answers"]
    answers = answers.get("text") if isinstance(answers, dict) else answers
    answers = [answers] if isinstance(answers, str) else answers
    if (
        not isinstance(answers, list)
        or not answers
        or not all(isinstance(answer, str) and answer for answer in answers)
    ):
        raise DataError(
            f"{where}: prefix.answers holds no answer. It must be a text, a list of texts, or "
            '{"text": [...]}; leave rows without an answer out.'
        )
    return Record(values["context"], values["question"], tuple(answers))


def fingerprint(records: Sequence[Record]) -> str:
    """sha256 of the records in order."""
    return hashlib.sha256(json.dumps(list(map(dataclasses.astuple, records))).encode()).hexdigest()


def texts(records: Iterable[Record], template: str) -> list[str]:
    """The template filled with each record."""
    return [record.fill(template) for record in records]
