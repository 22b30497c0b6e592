"""Rows of text beside the batches of activations: the rows of step n are a function of (configuration, n)."""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from saejax.capture.ahead import prefetched
from saejax.capture.stream import Journal, endless
from saejax.store import BatchSource
from saejax.store.arrays import Block, concatenated
from saejax.store.order import derive_key, shuffled
from saejax.text import PackedRows, Packer

# Arrays of a batch of text, with their dtypes; in a batch of a training their names begin with the prefix.
ARRAYS: Mapping[str, Any] = {"tokens": np.int32, "positions": np.int32, "segments": np.int32, "keep": np.bool_}
TEXT = "text/"
# Batches whose rows are mixed with each other: neighbours in a text are about the same. A training that goes on packs
# its current block again.
_BLOCK = 256
_ENDLESS = 2**62


@dataclasses.dataclass(frozen=True)
class TextBatches:
    """Rows of the training split, again and again: blocks in the order of the text, the rows of each shuffled.

    Attributes:
        packer: says also which tokens a capture would store.
        rows: of a batch; the last of the text is filled up with padding.
        seed: of the order.
        journal: of this run.
    """

    packer: Packer
    rows: int
    seed: int
    journal: Journal

    def iterate(self, start: int) -> Generator[Block]:
        """The batches `start`, `start` + 1, ... without end.

        Raises:
            DataError: there is no text.
        """
        wanted, skipped = divmod(start, _BLOCK)
        number, place = self.journal.nearest(wanted)
        with contextlib.closing(endless(self._epoch, _ENDLESS)(place)) as flow:
            while True:
                batches = list(itertools.islice(flow, _BLOCK))
                self.journal.begins(number, batches[0][1])
                if number >= wanted:
                    block = concatenated([rows for rows, _ in batches])
                    order = shuffled(_BLOCK * self.rows, derive_key("text", self.seed, number)).reshape(_BLOCK, -1)
                    for chosen in order[skipped:]:
                        yield {name: rows[chosen] for name, rows in block.items()}
                    skipped = 0
                number += 1

    def blank(self) -> dict[str, np.ndarray]:
        """A batch of padding."""
        return _of_packed(self.packer.blank(self.rows))

    def _epoch(self, cursor: dict[str, Any] | None) -> Generator[tuple[Block, dict[str, Any]]]:
        with contextlib.closing(prefetched(self.packer.batches("train", self.rows, cursor))) as ahead:
            for packed in ahead:
                yield _of_packed(packed), packed.cursor


class WithText:
    """Batches of activations, each with rows of text beside it: a `store.BatchSource`.

    Args:
        begins: the first step that reads text; padding stands before it.
    """

    def __init__(self, activations: BatchSource, text: TextBatches, begins: int) -> None:
        self.activations, self.text, self.begins = activations, text, begins
        self.hook_points, self.batch_size, self.dtype = (
            activations.hook_points,
            activations.batch_size,
            activations.dtype,
        )
        self.statistics, self.epoch_rows = activations.statistics, activations.epoch_rows

    def iterate(self, start_step: int = 0) -> Generator[Block]:
        blank, step = self.text.blank(), start_step
        with (
            contextlib.closing(self.activations.iterate(start_step)) as batches,
            contextlib.closing(self.text.iterate(max(0, start_step - self.begins))) as rows,
        ):
            for batch in batches:
                text = next(rows) if step >= self.begins else blank
                yield {**batch, **{TEXT + name: value for name, value in text.items()}}
                step += 1

    def whole_batch_at(self, step: int) -> Block:
        return self.activations.whole_batch_at(step)

    def places(self, step: int) -> dict[str, np.ndarray]:
        return self.activations.places(step)


def _of_packed(packed: PackedRows) -> dict[str, np.ndarray]:
    return {name: getattr(packed, name) for name in ARRAYS}
