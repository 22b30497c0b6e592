"""Straight into training: batches of activations that the running language model computes, and no disk.

    row n of the stream:  the n-th stored token of the text, which starts again after every epoch
    block b:              rows [b R, (b + 1) R), shuffled by (seed, b) in memory
    batch i:              rows [i B, (i + 1) B) of the blocks one after the other

So batch i is a function of (configuration, seed, i), as it is with `store.Batches`. While one block is read the next is
filled, in the same steps: after each batch so many forward passes that both come to their ends together. On devices of
its own (capture.mesh) the language model is a thread and a pass ahead of that, and works while a step does. The text's
cursor at the start of each block goes into a journal; a run that continues computes its current block again, and no
more than that.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from saejax.capture.ahead import one_ahead, prefetched
from saejax.capture.capture import check_settings, rows_for, store_identity
from saejax.capture.config import CaptureConfig
from saejax.capture.hook_points import expand_hook_points
from saejax.capture.selection import stored
from saejax.core.errors import DataError
from saejax.core.files import write_bytes, writing
from saejax.lm.forward import Model
from saejax.store import Statistics
from saejax.store.arrays import Block, concatenated
from saejax.store.layout import BF16
from saejax.store.order import derive_key, shuffled
from saejax.store.statistics import moments, sums_of
from saejax.text import Packer, Source, TextConfig


@dataclasses.dataclass(frozen=True)
class Place:
    """A row of the stream, as the text knows it.

    Attributes:
        epoch: how often the text was read to its end, or to the limit, before.
        done: rows of this epoch before it.
        cursor: of the batch of text that holds it; None for the beginning.
        skip: stored rows of that batch before it.
    """

    epoch: int = 0
    done: int = 0
    cursor: dict[str, Any] | None = None
    skip: int = 0

    def after(self, rows: int) -> "Place":
        """So many rows further on in the same batch."""
        return dataclasses.replace(self, done=self.done + rows, skip=self.skip + rows)


# place -> endless (rows from there on, the place of the first of them)
Flow = Callable[[Place], Generator[tuple[Block, Place]]]


def endless(epoch: Callable[[dict[str, Any] | None], Generator[tuple[Block, dict[str, Any]]]], limit: int) -> Flow:
    """The flow that begins again when `epoch`, (cursor) -> (the rows of a batch of text, its cursor), ends.

    Args:
        limit: rows of an epoch at most.
    """

    def flow(place: Place) -> Generator[tuple[Block, Place]]:
        while True:
            skip = place.skip
            with contextlib.closing(epoch(place.cursor)) as batches:
                while place.done < limit and (batch := next(batches, None)) is not None:
                    rows, cursor = batch
                    n = len(next(iter(rows.values())))
                    skipped = min(skip, n)
                    place = Place(place.epoch, place.done, cursor, skipped)
                    skip -= skipped
                    count = min(n - skipped, limit - place.done)
                    if count:
                        yield {name: values[skipped : skipped + count] for name, values in rows.items()}, place
                    place = place.after(count)
            if place.done == 0:
                raise DataError("The text gave not one activation to train on. Check the text source.")
            place = Place(place.epoch + 1)

    return flow


class Journal:
    """State of a stream that is continued: its settings, its statistics, and the beginning of each block.

    A file of JSON lines, only ever appended to; a line that a kill cut short, and all after it, do not count.

    Raises:
        DataError: it was written with other settings (each difference is listed).
    """

    def __init__(self, path: str | os.PathLike[str], settings: dict[str, Any]) -> None:
        self._path = Path(path)
        lines, torn = _whole_lines(self._path)
        if lines and lines[0].get("settings") != settings:
            recorded, keys = lines[0].get("settings") or {}, sorted(settings)
            changed = [
                f"{k}: there {recorded.get(k)!r}, here {settings[k]!r}" for k in keys if recorded.get(k) != settings[k]
            ]
            raise DataError(
                f"{self._path} belongs to a stream of other activations:\n  " + "\n  ".join(changed) + "\n"
                "Choose another --config.name, restore these settings, or, if nothing was trained on it yet, delete it."
            )
        self.statistics: dict[str, Any] = {}
        self._starts: dict[int, Place] = {}
        for line in lines[1:]:
            if "statistics" in line:
                self.statistics = line["statistics"]
            else:
                self._starts[line["block"]] = Place(**line["place"])
        if torn:
            write_bytes(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        if not lines:
            self._append({"settings": settings})

    def begins(self, block: int, place: Place) -> None:
        """Note where a block begins; durable when this returns."""
        if block not in self._starts:
            self._starts[block] = place
            self._append({"block": block, "place": dataclasses.asdict(place)})

    def note_statistics(self, statistics: dict[str, Any]) -> None:
        self.statistics = statistics
        self._append({"statistics": statistics})

    def nearest(self, block: int) -> tuple[int, Place]:
        """The last block up to `block` whose beginning is known, and that."""
        known = max((b for b in self._starts if b <= block), default=0)
        return known, self._starts.get(known, Place())

    def _append(self, line: dict[str, Any]) -> None:
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
                handle.flush()
                os.fsync(handle.fileno())


def _whole_lines(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """(the lines up to the first that is damaged, whether there is such a one)."""
    if not path.is_file():
        return [], False
    lines: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            lines.append(json.loads(line if line.endswith("\n") else "torn"))
        except ValueError:
            return lines, True
    return lines, False


class ActivationStream:
    """Shuffled batches of a flow: hook point -> bfloat16 [B, d]. A `store.BatchSource`.

    Args:
        flow: the rows in stream order, from a place on.
        hook_points: name -> width.
        batch_size: B.
        buffer_rows: R, the rows that are mixed with each other; two such blocks are held in memory.
        epoch_rows: rows of an epoch, for those who count in epochs.
        seed: of the order.
        journal: of this run.

    Attributes:
        statistics: hook point -> moments of the first block.
    """

    dtype = np.dtype(BF16)

    def __init__(
        self,
        flow: Flow,
        hook_points: dict[str, int],
        batch_size: int,
        buffer_rows: int,
        epoch_rows: int,
        seed: int,
        journal: Journal,
    ) -> None:
        self.hook_points, self.batch_size, self.epoch_rows = hook_points, batch_size, epoch_rows
        self.buffer_rows, self.seed = buffer_rows, seed
        self._flow, self._journal = flow, journal
        self._first: tuple[_Filler, Block] | None = None
        if not journal.statistics:
            block = self._first_block()
            journal.note_statistics({name: moments(sums_of(rows)).to_json() for name, rows in block.items()})
        self.statistics = {
            name: Statistics.from_json(value, hook_points[name]) for name, value in journal.statistics.items()
        }

    def whole_batch_at(self, step: int) -> Block:
        """The batch of `step` >= 0; from the first block's it costs nothing that training from 0 does not cost."""
        if (step + 1) * self.batch_size <= self.buffer_rows:
            start = step * self.batch_size
            return {name: rows[start : start + self.batch_size] for name, rows in self._first_block().items()}
        with contextlib.closing(self.iterate(step)) as batches:
            return next(batches)

    def places(self, step: int) -> dict[str, np.ndarray]:
        return {}

    def iterate(self, start_step: int = 0) -> Generator[Block]:
        """The batches of start_step, start_step + 1, ... without end; read-only where they are views of a block.

        Raises:
            DataError: not one row in the text, activations that are not finite (`abort`).
        """
        number, offset = divmod(start_step * self.batch_size, self.buffer_rows)
        if number and self._first is not None:
            self._first[0].close()
            self._first = None
        filler, block = self._block(number)
        with contextlib.closing(filler):
            while True:
                pieces, wanted = [], self.batch_size
                while wanted:
                    if offset == self.buffer_rows:
                        block, offset = filler.take(), 0
                    count = min(wanted, self.buffer_rows - offset)
                    pieces.append({name: rows[offset : offset + count] for name, rows in block.items()})
                    offset, wanted = offset + count, wanted - count
                yield concatenated(pieces)
                # Only now: the consumer's step is on its way, and the forward passes queue behind it.
                filler.advance(offset)

    def _block(self, number: int) -> tuple["_Filler", Block]:
        """(the filler of the blocks after it, block `number`)."""
        if number == 0 and self._first is not None:
            first, self._first = self._first, None
            return first
        known, place = self._journal.nearest(number)
        filler = _Filler(self, known, place)
        for _ in range(known, number):
            filler.take()
        return filler, filler.take()

    def _first_block(self) -> Block:
        if self._first is None:
            self._first = self._block(0)
        return self._first[1]


class _Filler:
    """Fills one block after the other with the rows of a flow."""

    def __init__(self, stream: ActivationStream, number: int, place: Place) -> None:
        self._stream = stream
        self._rows_on = stream._flow(place)
        self._rest: tuple[Block, Place] | None = None
        self._begin(number, place)

    def _begin(self, number: int, place: Place) -> None:
        stream = self._stream
        stream._journal.begins(number, place)
        self._number, self._filled = number, 0
        order = shuffled(stream.buffer_rows, derive_key("stream", stream.seed, number))
        self._places = np.empty_like(order)
        self._places[order] = np.arange(len(order))
        # uint16, because numpy moves plain integers about twice as fast as bfloat16
        self._block = {name: np.empty((len(order), d), np.uint16) for name, d in stream.hook_points.items()}

    def advance(self, target: int) -> None:
        """Fill the block up to at least `target` rows, forward pass by forward pass."""
        while self._filled < target:
            rows, place = self._next()
            n = len(next(iter(rows.values())))
            count = min(n, self._stream.buffer_rows - self._filled)
            places = self._places[self._filled : self._filled + count]
            for name, block in self._block.items():
                block[places] = rows[name][:count].view(np.uint16)
            self._filled += count
            if count < n:
                self._rest = ({name: values[count:] for name, values in rows.items()}, place.after(count))

    def take(self) -> Block:
        """The finished block, shuffled; begins the next."""
        self.advance(self._stream.buffer_rows)
        done = self._block
        self._rest = self._next()
        self._begin(self._number + 1, self._rest[1])
        for rows in done.values():
            rows.flags.writeable = False  # batches are views of it
        return {name: rows.view(BF16) for name, rows in done.items()}

    def close(self) -> None:
        self._rows_on.close()

    def _next(self) -> tuple[Block, Place]:
        block, self._rest = self._rest or next(self._rows_on), None
        return block


def stream_activations(
    path: str | os.PathLike[str],
    lm: Model,
    source: Source,
    text: TextConfig,
    config: CaptureConfig,
    mesh: Mesh,
    *,
    hook_points: Sequence[str],
    batch_size: int,
    max_rows: int,
    seed: int,
) -> ActivationStream:
    """The training activations of a model and a text as batches, computed when they are needed.

    An epoch is what a store would hold: `config.tokens` activations (and at most `max_rows`, where that is not 0).

    Args:
        path: of the run's journal.
        hook_points: those to deliver.

    Raises:
        ConfigError, DataError: as `capture`, and a journal of other settings.
    """
    check_settings(lm, text, config)
    names = list(expand_hook_points(hook_points, lm))
    widths = {name: lm.hook_points()[name] for name in names}
    rows = rows_for(config.batch_rows or lm.rows_that_fit(names, text.context_length), mesh)
    packer = Packer.of(source, lm.tokenizer, text)
    limit = min(config.tokens, max_rows or config.tokens)
    settings = {
        **store_identity(lm, source, text, "train", config),
        "hook_points": widths,
        "epoch_rows": limit,
        "buffer_rows": config.buffer_rows,
        "seed": seed,
    }
    journal = Journal(path, json.loads(json.dumps(settings)))
    forward = lm.make_forward(names, (rows, text.context_length), mesh)

    def passes(cursor: dict[str, Any] | None) -> Generator[tuple[Block, dict[str, Any]]]:
        with contextlib.closing(prefetched(packer.batches("train", rows, cursor))) as ahead:
            for packed, activations, finite in one_ahead(forward, ahead, lambda _: False):
                chosen, values, _ = stored(config, packed, activations, finite)
                yield {name: value[chosen] for name, value in values.items()}, packed.cursor

    def epoch(cursor: dict[str, Any] | None) -> Generator[tuple[Block, dict[str, Any]]]:
        # XLA's CPU devices run what one thread gives them in order, also what is for different devices. On shared
        # devices one thread keeps the order of programs the same in every run; on its own ones it is so anyway.
        return prefetched(passes(cursor), 1) if config.mesh else passes(cursor)

    return ActivationStream(endless(epoch, limit), widths, batch_size, config.buffer_rows, limit, seed, journal)
