"""Capture: packed text -> language model -> activations at several hook points -> store.

One forward pass serves all hook points. The next batch runs while the last one is handed to the store's writer.
A capture that was stopped continues at its last committed shard and leaves the same bytes.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.core.errors import ConfigError, DataError
from saejax.core.progress import Progress
from saejax.lm import LanguageModel
from saejax.lm.pair import ModelPair
from saejax.parallel import batch_sharding, replicated
from saejax.store import StoreLayout, StoreWriter
from saejax.text import PackedRows, Packer, Source, TextConfig

POLICIES = ("abort", "drop")


@dataclasses.dataclass(frozen=True)
class CaptureConfig:
    """What to capture.

    Attributes:
        hook_points: names as in `blocks.6.resid_pre`; all are captured in the same forward pass.
        tokens: activations for training; the store is smaller if the text runs out.
        heldout_tokens: activations of held-out text, for validation during training.
        batch_rows: packed rows in a forward pass.
        shard_rows, chunk_rows: of the store; rows are shuffled within a shard and read by chunks.
        non_finite: `abort`, or `drop` the rows that hold NaN or infinity (they are counted).
    """

    hook_points: tuple[str, ...] = ("blocks.3.resid_post",)
    tokens: int = 10_000_000
    heldout_tokens: int = 65_536
    batch_rows: int = 32
    shard_rows: int = 32_768
    chunk_rows: int = 256
    non_finite: str = "abort"

    def __post_init__(self) -> None:
        if not self.hook_points:
            raise ConfigError("capture.hook_points is empty; name at least one, as in blocks.6.resid_pre.")
        if self.non_finite not in POLICIES:
            raise ConfigError(f"capture.non_finite is {self.non_finite!r}; it must be abort or drop.")
        for name in ("tokens", "heldout_tokens", "batch_rows", "shard_rows", "chunk_rows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"capture.{name} is {getattr(self, name)}; it must be at least 1.")
        StoreLayout(self.shard_rows, self.chunk_rows)


@dataclasses.dataclass(frozen=True)
class Captured:
    """What one session of a capture did: rows in the store, and this session's own tokens and seconds."""

    rows: int
    tokens: int
    seconds: float
    already_complete: bool


def store_identity(lm: LanguageModel | ModelPair, source: Source, text: TextConfig, split: str) -> dict[str, Any]:
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
    }


def capture(
    path: str | os.PathLike[str],
    lm: LanguageModel | ModelPair,
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
        ConfigError: a hook point that does not exist, or a context longer than the model's.
        DataError: the store belongs to something else, NaN in activations, disk full.
    """
    check_context(lm, text)
    names = [lm.hook_point(name) for name in config.hook_points]
    widths = lm.hook_points()
    with StoreWriter.open(
        path,
        identity=store_identity(lm, source, text, split),
        hook_points={name: widths[name] for name in names},
        n_tokens=n_tokens,
        layout=StoreLayout(config.shard_rows, config.chunk_rows),
        seed=seed,
    ) as writer:
        if writer.complete:
            return Captured(writer.committed_rows, 0, 0.0, True)
        start, skip = writer.resume or (None, 0)
        packer = Packer.of(source, lm.tokenizer, text)
        batches = packer.batches(split, _rows_for(config.batch_rows, mesh), start)
        forward = make_forward(lm, names, (_rows_for(config.batch_rows, mesh), text.context_length), mesh)
        with Progress(f"capture {split}", n_tokens, writer.committed_rows) as progress:
            for packed, activations, finite in _one_ahead(forward, batches):
                skip = _append(writer, config, packed, activations, finite, skip, progress)
                if writer.full:
                    break
            writer.finish()
        return Captured(writer.committed_rows, progress.tokens, progress.seconds, False)


def check_context(lm: LanguageModel | ModelPair, text: TextConfig) -> None:
    if text.context_length > lm.config.context_length:
        raise ConfigError(
            f"text.context_length is {text.context_length}, but the model reads at most {lm.config.context_length} "
            "tokens; lower it."
        )


Forward = Callable[[PackedRows], tuple[dict[str, jax.Array], jax.Array]]


def make_forward(lm: LanguageModel | ModelPair, names: list[str], shape: tuple[int, int], mesh: Mesh) -> Forward:
    """packed rows [R, S] -> ({hook point: bfloat16 [R S, d]}, finite bool [R S]), compiled, rows over the mesh.

    XLA drops what no hook point needs: the blocks after the last one, and the unembedding.
    """

    def forward(params: Any, tokens: Any, positions: Any, segments: Any) -> Any:
        _, captured = lm.apply(params, tokens, positions, segments, names)
        flat = {name: captured[name].reshape(-1, captured[name].shape[-1]) for name in names}
        finite = jnp.stack([jnp.isfinite(value).all(-1) for value in flat.values()]).all(0)
        return {name: value.astype(jnp.bfloat16) for name, value in flat.items()}, finite

    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    params = jax.device_put(lm.params, replicated(mesh))
    compiled = jax.jit(forward).lower(params, rows, rows, rows).compile()

    def run(packed: PackedRows) -> Any:
        arrays = (packed.tokens, packed.positions, packed.segments)
        return compiled(params, *(jax.device_put(a, batch_sharding(mesh)) for a in arrays))

    return run


def _rows_for(batch_rows: int, mesh: Mesh) -> int:
    """`batch_rows`, rounded up to a multiple of the devices along "data"."""
    return -(-batch_rows // mesh.shape["data"]) * mesh.shape["data"]


def _one_ahead(forward: Forward, batches: Iterator[PackedRows]) -> Iterator[tuple[PackedRows, Any, Any]]:
    """Each batch with its results, the next batch dispatched before the results are waited for."""
    running: tuple[PackedRows, Any, Any] | None = None
    for packed in batches:
        ahead = (packed, *forward(packed))
        if running is not None:
            yield running
        running = ahead
    if running is not None:
        yield running


def _append(
    writer: StoreWriter,
    config: CaptureConfig,
    packed: PackedRows,
    activations: dict[str, jax.Array],
    finite: jax.Array,
    skip: int,
    progress: Progress,
) -> int:
    """Hand the kept rows of a batch to the writer, without the first `skip`, which are committed already.

    Returns what is left of `skip`: a capture may be continued with smaller batches than it was begun with.
    """
    keep = packed.keep.ravel()
    bad = keep & ~np.asarray(finite)
    if bad.any() and config.non_finite == "abort":
        row, position = divmod(int(np.flatnonzero(bad)[0]), packed.tokens.shape[1])
        raise DataError(
            f"NaN or infinity in the activations of {int(bad.sum())} tokens (first: document "
            f"{packed.documents[row, position]}, position {packed.positions[row, position]}). Nothing of this batch "
            "is stored. Check lm.dtype and the weights, or set capture.non_finite=drop to leave such tokens out."
        )
    rows = np.flatnonzero(keep & ~bad)
    counters = {"dropped_non_finite": int(bad.sum()), "special_or_padding": int((~keep).sum())}
    skipped = min(skip, len(rows))
    chosen = rows[skipped:]
    before = writer.rows
    metadata = {"token_id": packed.tokens, "document": packed.documents, "position": packed.positions}
    writer.append(
        {name: np.asarray(value)[chosen] for name, value in activations.items()},
        {name: value.ravel()[chosen] for name, value in metadata.items()},
        cursor=packed.cursor,
        skipped=skipped,
        counters=counters,
    )
    progress.advance(writer.rows - before)
    return skip - skipped
