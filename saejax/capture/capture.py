"""Capture: packed text -> language model -> activations at several hook points -> store.

One forward pass serves all hook points. The next batch runs while the last one is handed to the store's writer, which
permutes it in memory; hashing and writing are threads of their own, and so is packing.
A capture that was stopped continues at its last committed shard and leaves the same bytes.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from typing import Any

import jax
from jax.sharding import Mesh

from saejax.capture.ahead import forward_rate, one_ahead, prefetched, tokens_read
from saejax.capture.config import CaptureConfig
from saejax.capture.hook_points import expand_hook_points
from saejax.capture.selection import stored, wanted
from saejax.core.errors import ConfigError
from saejax.core.progress import Progress
from saejax.lm.forward import Forward, Model, apart
from saejax.parallel import DATA, Process
from saejax.store import StoreWriter
from saejax.text import PackedRows, Packer, Source, TextConfig, begins_with_bos

_ALONE = Process()


@dataclasses.dataclass(frozen=True)
class Captured:
    """Result of one session of a capture.

    Attributes:
        rows: activations in the store; while other parts are missing, those of this process's parts.
        tokens: activations stored in this session.
        seconds: of this session, without compiling and without timing the forward pass alone.
        already_complete: there was nothing to do.
        read: tokens that went through the model in this session, stored or not; no padding.
        forward_rate: tokens read a second by the forward pass alone, timed on batches of this session before its
            clock starts; None where the session is too short to tell.
        missing: parts that other processes have not finished yet.
    """

    rows: int
    tokens: int
    seconds: float
    already_complete: bool
    read: int = 0
    forward_rate: float | None = None
    missing: tuple[int, ...] = ()

    @property
    def overhead(self) -> float | None:
        """Seconds of the capture over seconds of its forward passes alone, minus 1; None where not measured."""
        return self.forward_rate * self.seconds / self.read - 1 if self.forward_rate and self.read else None


def store_identity(
    lm: Model, source: Source, text: TextConfig, split: str, config: CaptureConfig | None = None
) -> dict[str, Any]:
    """The origin of a store's activations; anything that differs makes it another store."""
    return {
        "lm": lm.identity,
        "text": source.identity,
        "split": split,
        "heldout_fraction": text.heldout_fraction,
        "context_length": text.context_length,
        "prepend_bos": text.prepend_bos,
        # What is left at its default is not written.
        **({} if text.packed else {"pack": False}),
        **({"own_bos": "once"} if begins_with_bos(text, lm.tokenizer) else {}),
        **apart(lm, text.context_length),
        **(config.identity if config else {}),
    }


def capture(
    path: str | os.PathLike[str],
    lm: Model,
    source: Source,
    text: TextConfig,
    config: CaptureConfig,
    mesh: Mesh,
    *,
    split: str,
    n_tokens: int,
    seed: int,
    process: Process = _ALONE,
) -> Captured:
    """Fill the store at `path` with `n_tokens` activations of `split`, continuing where it was.

    bos, special and padding tokens are not stored, nor are `Sinks`. Each of several processes captures its share of the
    parts. The process that finds all parts done completes the store. If a process dies, run its command again, or run
    any other number of processes.

    Raises:
        ConfigError: a hook point or token id that does not exist, a context longer than the model's, or more processes
            than parts.
        DataError: the store belongs to something else, NaN in activations, disk full.
        BusyError: another process is writing one of these parts.
    """
    check_settings(lm, text, config)
    parts = process.share(config.parts)
    names = list(expand_hook_points(config.hook_points, lm))
    widths = lm.hook_points()
    filler = _Filler(lm, text, config, mesh, split, names)
    rows = 0
    for part in parts:
        with StoreWriter.open(
            path,
            identity=store_identity(lm, source, text, split, config),
            hook_points={name: widths[name] for name in names},
            n_tokens=n_tokens,
            layout=config.layout(split),
            seed=seed,
            part=part,
            parts=config.parts,
        ) as writer:
            if not writer.done:
                label = f"capture {split}" + (f", part {part} of {config.parts}" if config.parts > 1 else "")
                filler.fill(writer, source.part(part, config.parts), label)
            rows += writer.committed_rows
    return Captured(
        writer.store_rows if writer.complete else rows,
        filler.tokens,
        filler.seconds,
        not filler.parts,
        filler.read,
        filler.forward_rate,
        writer.missing,
    )


class _Filler:
    """Fills one part after the other; the forward pass is compiled, and timed alone, for the first of them.

    Attributes:
        parts: how many were filled.
        tokens, seconds, read, forward_rate: of all of them, as in `Captured`.
    """

    def __init__(
        self, lm: Model, text: TextConfig, config: CaptureConfig, mesh: Mesh, split: str, names: list[str]
    ) -> None:
        self._lm, self._text, self._config, self._mesh, self._split, self._names = lm, text, config, mesh, split, names
        self.parts, self.tokens, self.seconds, self.read = 0, 0, 0.0, 0
        self.forward_rate: float | None = None

    @functools.cached_property
    def _batch_rows(self) -> int:
        fitting = self._config.batch_rows or self._lm.rows_that_fit(self._names, self._text.context_length)
        return rows_for(fitting, self._mesh)

    @functools.cached_property
    def _forward(self) -> Forward:
        return self._lm.make_forward(self._names, (self._batch_rows, self._text.context_length), self._mesh)

    def fill(self, writer: StoreWriter, source: Source, label: str) -> None:
        """Give the writer the rows of the text that it still wants, and finish."""
        packer = Packer.of(source, self._lm.tokenizer, self._text)
        batches = packer.batches(self._split, self._batch_rows, writer.resume)
        forward = self._forward

        def last(packed: PackedRows) -> bool:
            return int(wanted(self._config, packed)[0].sum()) - writer.to_skip >= writer.rows_wanted - writer.rows

        with contextlib.closing(prefetched(batches)) as ahead:
            started = time.perf_counter()
            # Batches to time alone: up to 8, at most an eighth of those to come; none in a very short capture.
            to_come = (writer.rows_wanted - writer.committed_rows) // (self._batch_rows * self._text.context_length)
            timed = list(itertools.islice(ahead, 0 if self.parts else min(8, to_come // 8)))
            packing = time.perf_counter() - started
            if timed:
                self.forward_rate = forward_rate(forward, timed)
            with Progress(label, writer.rows_wanted, writer.committed_rows) as progress:
                for packed, activations, finite in one_ahead(forward, itertools.chain(timed, ahead), last):
                    before = writer.rows
                    _append(writer, self._config, packed, activations, finite)
                    progress.advance(writer.rows - before)
                    self.read += tokens_read(packed)
                    if writer.full:
                        break
                writer.finish()
        self.parts += 1
        self.tokens += progress.tokens
        self.seconds += packing + progress.seconds


def check_settings(lm: Model, text: TextConfig, config: CaptureConfig) -> None:
    """Refuse a context or token ids that the model cannot have: ConfigError."""
    if text.context_length > lm.config.context_length:
        raise ConfigError(
            f"text.context_length is {text.context_length}, but the model reads at most {lm.config.context_length} "
            "tokens; lower it."
        )
    largest = lm.tokenizer.largest_id
    if unknown := [i for i in config.drop_ids if i > largest]:
        raise ConfigError(f"capture.drop_ids holds {unknown[0]}; the largest id of the tokenizer is {largest}.")


def rows_for(batch_rows: int, mesh: Mesh) -> int:
    """`batch_rows`, rounded up to a multiple of the devices along "data"."""
    return -(-batch_rows // mesh.shape[DATA]) * mesh.shape[DATA]


def _append(
    writer: StoreWriter, config: CaptureConfig, packed: PackedRows, activations: dict[str, jax.Array], finite: jax.Array
) -> None:
    rows, values, counters = stored(config, packed, activations, finite)
    metadata = {"token_id": packed.tokens, "document": packed.documents, "position": packed.positions}
    writer.append(
        {name: value[rows] for name, value in values.items()},
        {name: tokens.ravel()[rows] for name, tokens in metadata.items()},
        cursor=packed.cursor,
        counters=counters,
    )
