"""Documents to fixed-length token rows, kept apart, re-enterable at every row.

A row is filled with consecutive documents; a document that does not fit goes on in the next row. Each piece
of a document starts again at position 0 (with its own bos), and attention stays within a piece, so that an
activation depends on nothing but the tokens before it in its own document. Nothing but (document index, token
offset) is needed to start again at a row: a resumed capture sees exactly the rows it would have seen.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.text.config import SourceConfig, TextConfig
from saejax.text.documents import Document, Source
from saejax.text.tokenizer import Tokenizer

# A piece shorter than this is not begun at the end of a row: its activations would have almost no context.
_MIN_PIECE = 8
# Characters tokenised at a time. The tokenizer runs documents in parallel, so it needs several; a caller that reads
# only a few rows waits for the first of them.
_TOKENIZE_CHARS = 250_000


@dataclasses.dataclass
class _Row:
    """A row being filled: where it begins, its tokens so far, and (ids, ordinary tokens behind each, document) of
    each of its pieces."""

    cursor: dict[str, int]
    fill: int = 0
    pieces: list[tuple[list[int], np.ndarray, int]] = dataclasses.field(default_factory=list)


def begins_with_bos(text: TextConfig, tokenizer: Tokenizer) -> bool:
    """True if a template of the configuration writes the bos token at the front of every text."""
    return text.prepend_bos and any(tokenizer.has_bos(_beginning(part, tokenizer)) for part in text.parts)


def _beginning(part: SourceConfig, tokenizer: Tokenizer) -> str:
    """The beginning of a source's texts, as far as a template says it."""
    if not part.chat:
        return part.template.partition("{")[0]
    try:
        return tokenizer.chat_template.on(part.chat_date).render([{"role": "user", "content": "a"}])
    except DataError:  # it wants other messages, or is no template: who reads the text is told
        return ""


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """A batch of R rows of S tokens.

    Attributes:
        tokens: int32 [R, S].
        positions: int32 [R, S], 0 at the start of each piece.
        segments: int32 [R, S], number of the piece within the row; -1 for padding.
        documents: int32 [R, S], index of the document in the source; -1 for padding.
        to_end: int32 [R, S], how many ordinary tokens of the document come after this one; -1 for padding.
        keep: bool [R, S], False for bos, other special tokens and padding.
        cursor: JSON; `Packer.batches(..., start=cursor)` begins with exactly this batch.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    documents: np.ndarray
    to_end: np.ndarray
    keep: np.ndarray
    cursor: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Packer:
    """Packs the documents of `source` with `tokenizer` into rows of `context_length` tokens.

    Without `pack` every document begins a row of its own.
    """

    source: Source
    tokenizer: Tokenizer
    context_length: int
    prepend_bos: bool = True
    pack: bool = True

    @classmethod
    def of(cls, source: Source, tokenizer: Tokenizer, text: TextConfig) -> "Packer":
        return cls(source, tokenizer, text.context_length, text.prepend_bos, text.packed)

    def __post_init__(self) -> None:
        if self.context_length < 2:
            raise ConfigError(f"context_length is {self.context_length}; a row must hold at least 2 tokens.")
        if self.prepend_bos and self.tokenizer.bos_unknown:
            raise ConfigError(
                f"text.prepend_bos is True, and no file in {self.tokenizer.folder} says which token is bos. Name it by "
                "bos_token in tokenizer_config.json (null: the model has none), or set text.prepend_bos=False."
            )

    def batches(
        self, split: str, rows: int, start: dict[str, int] | None = None, pad_last: bool = True
    ) -> Iterator[PackedRows]:
        """Batches of `rows` rows each, from a cursor on; the last one is filled up with padding rows."""
        pending: list[_Row] = []
        for row in self._rows(split, start or {"document": 0, "offset": 0}):
            pending.append(row)
            if len(pending) == rows:
                yield self._stack(pending)
                pending = []
        if pending:
            missing = rows - len(pending) if pad_last else 0
            yield self._stack(pending + [_Row(pending[-1].cursor)] * missing)

    def blank(self, rows: int) -> PackedRows:
        """A batch of padding: the shapes and dtypes that `batches` will give, to compile for."""
        return self._stack([_Row({"document": 0, "offset": 0})] * rows)

    @property
    def bos(self) -> list[int]:
        """Tokens in front of each piece that are none of the document's: bos, or nothing."""
        return self.tokenizer.bos if self.prepend_bos else []

    def _rows(self, split: str, start: dict[str, int]) -> Iterator[_Row]:
        bos = self.bos
        row = _Row(dict(start))
        offset = start["offset"]
        for document, ids in self._tokenized(split, start["document"]):
            ordinary = ~np.isin(ids, list(self.tokenizer.special_ids))
            to_end: np.ndarray = np.cumsum(ordinary[::-1])[::-1] - ordinary  # ordinary tokens after each
            while offset < len(ids):
                room = self.context_length - row.fill
                if room < min(_MIN_PIECE, self.context_length):
                    yield row
                    row = _Row({"document": document.index, "offset": offset})
                    continue
                piece = ids[offset : offset + room - len(bos)]
                if row.fill == 0:
                    row.cursor = {"document": document.index, "offset": offset}
                after: np.ndarray = to_end[offset : offset + len(piece)]
                row.pieces.append((bos + piece, np.concatenate([after[:1]] * len(bos) + [after]), document.index))
                row.fill += len(bos) + len(piece)
                offset += len(piece)
            offset = 0
            if row.fill and not self.pack:
                yield row
                row = _Row(dict(row.cursor))
        if row.fill:
            yield row

    def _tokenized(self, split: str, start: int) -> Iterator[tuple[Document, list[int]]]:
        encode = self.tokenizer.encode_behind_bos if self.prepend_bos else self.tokenizer.encode_many
        pending: list[Document] = []
        size = 0
        for document in self.source.documents(split, start):
            pending.append(document)
            size += len(document.text)
            if size > _TOKENIZE_CHARS:
                yield from zip(pending, encode([d.text for d in pending]), strict=True)
                pending, size = [], 0
        if pending:
            yield from zip(pending, encode([d.text for d in pending]), strict=True)

    def _stack(self, rows: list[_Row]) -> PackedRows:
        shape = (len(rows), self.context_length)
        tokens, positions = np.full(shape, self.tokenizer.bos_id or 0, np.int32), np.zeros(shape, np.int32)
        segments, documents, to_end = (np.full(shape, -1, np.int32) for _ in range(3))
        for r, row in enumerate(rows):
            start = 0
            for number, (ids, after, document) in enumerate(row.pieces):
                span = r, slice(start, start + len(ids))
                tokens[span], positions[span], to_end[span] = ids, np.arange(len(ids)), after
                segments[span], documents[span] = number, document
                start += len(ids)
        special = np.isin(tokens, list(self.tokenizer.special_ids))
        if self.bos:
            special |= positions == 0
        keep = (segments >= 0) & ~special
        return PackedRows(tokens, positions, segments, documents, to_end, keep, rows[0].cursor)
