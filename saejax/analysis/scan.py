"""Held-out text through the model and the coder: every non-zero latent of every kept token."""

import dataclasses
from typing import Any

import jax
import numpy as np

from saejax.capture import ALL_TOKENS, Sinks
from saejax.coders import Latents
from saejax.core.errors import DataError
from saejax.core.progress import Progress
from saejax.lm.forward import Model, compiled
from saejax.text import PackedRows, Packer
from saejax.trained import TrainedCoder

_TEXT = ("tokens", "positions", "segments", "documents")


@dataclasses.dataclass(frozen=True)
class Scan:
    """Held-out rows and the non-zero latents of their kept tokens, sorted by latent, then falling by |value|.

    Attributes:
        tokens, positions, segments, documents: int32 [R, S]; segments and documents are -1 for padding.
        latent, row, position: int32 [E], one entry for each non-zero latent of a token. Latent f of group g of a coder
            with groups (layers) is g F + f.
        value: float32 [E].
        n_tokens: kept tokens.
        seconds: how long it took, without compilation.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    documents: np.ndarray
    latent: np.ndarray
    row: np.ndarray
    position: np.ndarray
    value: np.ndarray
    n_tokens: int
    seconds: float

    def entries(self, latent: int) -> slice:
        """Those of a latent."""
        return slice(*np.searchsorted(self.latent, [latent, latent + 1]).tolist())

    def peaks(self, latent: int) -> np.ndarray:
        """The entries where a latent is strongest in their packed rows, falling by |value|: [rows]."""
        entries = self.entries(latent)
        _, first_of_row = np.unique(self.row[entries], return_index=True)
        return np.sort(first_of_row) + entries.start

    def window(self, entry: int, before: int, after: int) -> tuple[int, int, int, int]:
        """(row, peak, start, stop): the tokens around an entry, within its piece of the document."""
        row, peak = int(self.row[entry]), int(self.position[entry])
        piece = np.flatnonzero(self.segments[row] == self.segments[row, peak])
        return row, peak, int(max(piece[0], peak - before)), int(min(piece[-1], peak + after)) + 1

    def activations(self, latent: int, row: int) -> np.ndarray:
        """A latent's value at each token of a row, float64 [S]; 0 where it is silent."""
        entries = self.entries(latent)
        here = np.flatnonzero(self.row[entries] == row) + entries.start
        values = np.zeros(self.tokens.shape[1])
        values[self.position[here]] = self.value[here]
        return values


def scan_latents(
    sae: TrainedCoder,
    lm: Model,
    packer: Packer,
    tokens: int,
    batch_rows: int,
    sinks: Sinks = ALL_TOKENS,
    progress: bool = True,
) -> Scan:
    """The latents of at least `tokens` kept tokens of the held-out split, from its beginning, or of all there are.

    `sae` has the model's own names for its hook points (`TrainedCoder.at`). The `sinks` are left out.
    Equal arguments give the same rows again.

    Raises:
        DataError: no held-out text, or nothing in it but special tokens.
    """
    # On the device once, not again with every batch.
    coder, sites, params = sae.coder, sae.sites, jax.device_put(dict(sae.params))

    def forward(lm_params: Any, tokens: Any, positions: Any, segments: Any, keep: Any) -> Any:
        _, captured = lm.apply(lm_params, tokens, positions, segments, sites.hook_points)
        flat = {name: x_RSD.reshape(-1, x_RSD.shape[-1]) for name, x_RSD in captured.items()}
        return sites.batch(flat)["x"], sinks.without(captured, keep, positions)

    encode = jax.jit(lambda params, x: coder.encode(params, x).flat())

    rows: list[PackedRows] = []
    entries: list[tuple[np.ndarray, ...]] = []
    first = 0
    blank = packer.blank(batch_rows)
    run = compiled(lm, forward, lm.params, blank.tokens, blank.positions, blank.segments, blank.keep)
    with Progress("features", tokens, shown=progress) as done:
        for packed in packer.batches("heldout", batch_rows):
            x, keep = run(lm.params, packed.tokens, packed.positions, packed.segments, packed.keep)
            for start in range(0, len(x), coder.few_tokens):
                latents = encode(params, x[start : start + coder.few_tokens])
                entries.append(_entries(np.asarray(keep), latents, first, start))
            rows.append(packed)
            first += len(packed.tokens)
            done.advance(int(keep.sum()))
            if done.tokens >= tokens:
                break
    if not done.tokens:
        raise DataError("There is no held-out text. Raise text.heldout_fraction or give more documents.")
    text = {name: np.concatenate([getattr(packed, name) for packed in rows]) for name in _TEXT}
    latent, row, position, value = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    order = np.lexsort((-np.abs(value), latent))
    columns = {"latent": latent[order], "row": row[order], "position": position[order], "value": value[order]}
    return Scan(**text, **columns, n_tokens=done.tokens, seconds=done.seconds)


def _entries(keep_RS: np.ndarray, latents: Latents, first: int, start: int) -> tuple[np.ndarray, ...]:
    """(latent, row, position, value) of every non-zero latent of the kept tokens; rows are counted from `first`.

    `latents` are those of the tokens from number `start` of the rows on.
    """
    values = np.asarray(latents.values)
    values = np.where(keep_RS.reshape(-1, 1)[start : start + len(values)], values, 0)
    at, column = np.nonzero(values)
    latent = column if latents.indices is None else np.asarray(latents.indices)[at, column]
    row, position = np.divmod(start + at, keep_RS.shape[1])
    return latent.astype(np.int32), first + row, position, values[at, column]
