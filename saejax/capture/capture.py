"""Capture: packed text -> language model -> activations at several hook points -> store.

One forward pass serves all hook points. The next batch runs while the last one is handed to the store's writer, which
permutes it in memory; hashing and writing are threads of their own, and so is packing.
A capture that was stopped continues at its last committed shard and leaves the same bytes.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import time
from typing import Any

import jax
from jax.sharding import Mesh

from saejax.capture.ahead import forward_rate, one_ahead, prefetched, tokens_read
from saejax.capture.hook_points import expand_hook_points
from saejax.capture.selection import stored, wanted
from saejax.core.errors import ConfigError
from saejax.core.progress import Progress
from saejax.lm.forward import Model
from saejax.store import StoreLayout, StoreWriter
from saejax.text import PackedRows, Packer, Source, TextConfig

POLICIES = ("abort", "drop")
DESTINATIONS = ("store", "training")


@dataclasses.dataclass(frozen=True)
class CaptureConfig:
    """What to capture.

    Attributes:
        hook_points: names as in `blocks.6.resid_pre`, ranges as in `blocks.{0..5}.resid_post` and `blocks.*.mlp_out`;
            all are captured in the same forward pass.
        tokens: activations for training; the store is smaller if the text runs out.
        heldout_tokens: activations of held-out text, for validation during training.
        batch_rows: packed rows in a forward pass; 0: as many as the GPU has memory for (lm.backend torch; 32 on a CPU).
        shard_rows, chunk_rows: of the store; rows are shuffled within a shard and read by chunks.
        non_finite: `abort`, or `drop` the rows that hold NaN or infinity (they are counted).
        last_tokens: only the last so many ordinary tokens of each document are stored; 0 for all of them.
        drop_ids: tokens with these ids are never stored. (bos, other special tokens and padding never are.)
        max_norm_ratio: tokens whose activation is, at any hook point, longer than so many times the median length
            are dropped and counted; 0 for none. The median is over the tokens to be stored of one batch: the
            `batch_rows` rows of a forward pass, the same ones however often the capture is stopped and on however
            many devices. So batch_rows decides what is stored here, and must divide among the devices.
        into: `store`, or `training`: the training activations go from the model straight into the training and never to
            disk; an epoch is `tokens` of them. (The held-out ones are stored all the same: they are few.)
        buffer_rows: into training: activations that are shuffled with each other; two such blocks are in memory.
    """

    hook_points: tuple[str, ...] = ("blocks.3.resid_post",)
    tokens: int = 10_000_000
    heldout_tokens: int = 65_536
    batch_rows: int = 32
    shard_rows: int = 32_768
    chunk_rows: int = 256
    non_finite: str = "abort"
    last_tokens: int = 0
    drop_ids: tuple[int, ...] = ()
    max_norm_ratio: float = 0.0
    into: str = "store"
    buffer_rows: int = 131_072

    def __post_init__(self) -> None:
        if not self.hook_points:
            raise ConfigError("capture.hook_points is empty; name at least one, as in blocks.6.resid_pre.")
        if self.non_finite not in POLICIES:
            raise ConfigError(f"capture.non_finite is {self.non_finite!r}; it must be abort or drop.")
        if self.batch_rows < 0:
            raise ConfigError(f"capture.batch_rows is {self.batch_rows}; it must be at least 1, or 0 (by memory).")
        if self.into not in DESTINATIONS:
            raise ConfigError(f"capture.into is {self.into!r}; it must be store or training.")
        for name in ("tokens", "heldout_tokens", "shard_rows", "chunk_rows", "buffer_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"capture.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.last_tokens < 0:
            raise ConfigError(f"capture.last_tokens is {self.last_tokens}; it must be 0 (all) or more.")
        if negative := [i for i in self.drop_ids if i < 0]:
            raise ConfigError(f"capture.drop_ids holds {negative[0]}; ids of tokens are 0 or more.")
        if self.max_norm_ratio != 0 and not 1 < self.max_norm_ratio < math.inf:
            raise ConfigError(
                f"capture.max_norm_ratio is {self.max_norm_ratio}; it must be 0 (no filter) or a number above 1, as 10."
            )
        if self.max_norm_ratio and not self.batch_rows:
            raise ConfigError("capture.max_norm_ratio looks at a batch, so capture.batch_rows must be a number, not 0.")
        StoreLayout(self.shard_rows, self.chunk_rows)

    @property
    def identity(self) -> dict[str, Any]:
        """JSON of what decides which tokens are stored; what is left at its default is not in it."""
        chosen: dict[str, Any] = {}
        if self.last_tokens:
            chosen["last_tokens"] = self.last_tokens
        if self.drop_ids:
            chosen["drop_ids"] = sorted(set(self.drop_ids))
        if self.max_norm_ratio:
            chosen["max_norm_ratio"] = {"ratio": self.max_norm_ratio, "batch_rows": self.batch_rows}
        return chosen


@dataclasses.dataclass(frozen=True)
class Captured:
    """What one session of a capture did.

    Attributes:
        rows: activations in the store.
        tokens: activations stored in this session.
        seconds: of this session, without compiling and without timing the forward pass alone.
        already_complete: there was nothing to do.
        read: tokens that went through the model in this session, stored or not; no padding.
        forward_rate: tokens read a second by the forward pass alone, timed on batches of this session before its
            clock starts; None where the session is too short to tell.
    """

    rows: int
    tokens: int
    seconds: float
    already_complete: bool
    read: int = 0
    forward_rate: float | None = None

    @property
    def overhead(self) -> float | None:
        """Seconds of the capture over seconds of its forward passes alone, minus 1; None where not measured."""
        return self.forward_rate * self.seconds / self.read - 1 if self.forward_rate and self.read else None


def store_identity(
    lm: Model, source: Source, text: TextConfig, split: str, config: CaptureConfig | None = None
) -> dict[str, Any]:
    """What a store's activations come from; anything that differs makes it another store."""
    return {
        "lm": lm.identity,
        "text": source.identity,
        "split": split,
        "heldout_fraction": text.heldout_fraction,
        "context_length": text.context_length,
        "prepend_bos": text.prepend_bos,
        # What is left at its default is not written: the stores of earlier versions stay valid.
        **({} if text.packed else {"pack": False}),
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
) -> Captured:
    """Fill the store at `path` with `n_tokens` activations of `split`, continuing where it was.

    bos, special and padding tokens are not stored.

    Raises:
        ConfigError: a hook point or token id that does not exist, a context longer than the model's, or a batch that
            does not divide among the devices where max_norm_ratio makes it count.
        DataError: the store belongs to something else, NaN in activations, disk full.
    """
    check_context(lm, text)
    check_selection(lm, config, mesh)
    names = list(expand_hook_points(config.hook_points, lm))
    widths = lm.hook_points()
    with StoreWriter.open(
        path,
        identity=store_identity(lm, source, text, split, config),
        hook_points={name: widths[name] for name in names},
        n_tokens=n_tokens,
        layout=StoreLayout(config.shard_rows, config.chunk_rows),
        seed=seed,
    ) as writer:
        if writer.complete:
            return Captured(writer.committed_rows, 0, 0.0, True)
        start, skip = writer.resume or (None, 0)
        packer = Packer.of(source, lm.tokenizer, text)
        rows = rows_for(config.batch_rows or lm.rows_that_fit(names, text.context_length), mesh)
        batches = packer.batches(split, rows, start)
        forward = lm.make_forward(names, (rows, text.context_length), mesh)
        started = time.perf_counter()
        timed = list(itertools.islice(batches, _timed_batches(n_tokens - writer.committed_rows, rows, text)))
        packing = time.perf_counter() - started
        rate = forward_rate(forward, timed) if timed else None
        read = 0

        def last(packed: PackedRows) -> bool:
            return int(wanted(config, packed)[0].sum()) - skip >= n_tokens - writer.rows

        with (
            contextlib.closing(prefetched(itertools.chain(timed, batches))) as ahead,
            Progress(f"capture {split}", n_tokens, writer.committed_rows) as progress,
        ):
            for packed, activations, finite in one_ahead(forward, ahead, last):
                skip = _append(writer, config, packed, activations, finite, skip, progress)
                read += tokens_read(packed)
                if writer.full:
                    break
            writer.finish()
        return Captured(writer.committed_rows, progress.tokens, packing + progress.seconds, False, read, rate)


def _timed_batches(n_tokens: int, batch_rows: int, text: TextConfig) -> int:
    """How many batches to time alone: up to 4, at most an eighth of those to come; none in a very short capture."""
    return min(4, n_tokens // (8 * batch_rows * text.context_length))


def check_context(lm: Model, text: TextConfig) -> None:
    if text.context_length > lm.config.context_length:
        raise ConfigError(
            f"text.context_length is {text.context_length}, but the model reads at most {lm.config.context_length} "
            "tokens; lower it."
        )


def check_selection(lm: Model, config: CaptureConfig, mesh: Mesh) -> None:
    largest = lm.tokenizer.largest_id
    if unknown := [i for i in config.drop_ids if i > largest]:
        raise ConfigError(f"capture.drop_ids holds {unknown[0]}; the largest id of the tokenizer is {largest}.")
    if config.max_norm_ratio and rows_for(config.batch_rows, mesh) != config.batch_rows:
        raise ConfigError(
            f"capture.batch_rows is {config.batch_rows}, which does not divide among {mesh.shape['data']} devices; "
            "with capture.max_norm_ratio the batch decides what is stored, so choose a multiple."
        )


def rows_for(batch_rows: int, mesh: Mesh) -> int:
    """`batch_rows`, rounded up to a multiple of the devices along "data"."""
    return -(-batch_rows // mesh.shape["data"]) * mesh.shape["data"]


def _append(
    writer: StoreWriter,
    config: CaptureConfig,
    packed: PackedRows,
    activations: dict[str, jax.Array],
    finite: jax.Array,
    skip: int,
    progress: Progress,
) -> int:
    """Hand the stored rows of a batch to the writer, without the first `skip`, which are committed already.

    Returns what is left of `skip`: a capture may be continued with smaller batches than it was begun with.
    """
    rows, values, counters = stored(config, packed, activations, finite)
    skipped = min(skip, len(rows))
    chosen = rows[skipped:]
    before = writer.rows
    metadata = {"token_id": packed.tokens, "document": packed.documents, "position": packed.positions}
    writer.append(
        {name: value[chosen] for name, value in values.items()},
        {name: tokens.ravel()[chosen] for name, tokens in metadata.items()},
        cursor=packed.cursor,
        skipped=skipped,
        counters=counters,
    )
    progress.advance(writer.rows - before)
    return skip - skipped
