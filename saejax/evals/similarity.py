"""Likeness of latents: by what they write, by when they fire, and of one dictionary to another."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.coders import Latents
from saejax.core.errors import DataError
from saejax.evals.intervals import SEED
from saejax.kernels.dense import EXACT
from saejax.trained import TrainedCoder

_BINS = 40
# Cosines or pairs of latents that are in memory at a time.
_PAIRS_AT_ONCE = 1 << 24
# Tokens whose firing latents are noted; of these so many that products of the tokens' L0 stay in bounds.
_TOKENS, _ENTRIES, _PRODUCTS = 1 << 14, 1 << 25, 2e8
# A latent that fired less often would match another by chance.
_FIRINGS = 8
# So many latents are compared with all others; and so many are matched one to one.
MOST = 4096
# A pair with a larger cosine is taken for the same latent.
SAME = 0.7


def largest_cosines(rows_FD: Any, others_GD: Any = None, at_once: int = _PAIRS_AT_ONCE) -> np.ndarray:
    """max over j of |cos(rows_i, others_j)|, float32 [F]; without `others` over the other rows, j != i.

    A row of zeros has cosine 0 with all. Beside the rows at most `at_once` cosines are in memory.
    """
    rows_FD = _unit_rows(jnp.asarray(rows_FD, jnp.float32))
    others = rows_FD if others_GD is None else _unit_rows(jnp.asarray(others_GD, jnp.float32))
    count = len(rows_FD)
    size = min(count, max(1, at_once // max(1, len(others))))
    largest = np.zeros(count, np.float32)
    for begin in range(0, count, size):
        start = min(begin, count - size)  # the last block looks at some rows again: one shape, one program
        largest[start : start + size] = _largest_of_block(rows_FD, others, start, size, others_GD is None)
    return largest


@jax.jit
def _unit_rows(rows_FD: jax.Array) -> jax.Array:
    norms_F1 = jnp.linalg.norm(rows_FD, axis=1, keepdims=True)
    return rows_FD / jnp.where(norms_F1 > 0, norms_F1, 1)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _largest_of_block(rows_FD: jax.Array, others_GD: jax.Array, start: Any, size: int, same: bool) -> jax.Array:
    block_ND = jax.lax.dynamic_slice_in_dim(rows_FD, start, size)
    cosines_NG = jnp.abs(jnp.matmul(block_ND, others_GD.T, precision=EXACT))
    if same:
        itself = (start + jnp.arange(size))[:, None] == jnp.arange(len(others_GD))[None]
        cosines_NG = jnp.where(itself, 0, cosines_NG)
    return jnp.minimum(cosines_NG.max(1, initial=0), 1)


def cosines(rows_AD: np.ndarray, rows_BD: np.ndarray) -> np.ndarray:
    """|cos(a, b)| of all pairs of rows, float32 [A, B]. A row of zeros has cosine 0 with everything."""

    def unit(rows_ND: np.ndarray) -> np.ndarray:
        rows_ND = np.asarray(rows_ND, np.float64)
        norms_N1 = np.linalg.norm(rows_ND, axis=1, keepdims=True)
        return (rows_ND / np.where(norms_N1 > 0, norms_N1, 1.0)).astype(np.float32)

    return np.abs(unit(rows_AD) @ unit(rows_BD).T)


def matched(cosines_AB: np.ndarray) -> np.ndarray:
    """|cos| of each pair of the one-to-one pairing with the largest sum (the Hungarian method), float64 [min(A, B)].

    The time grows with the third power of the smaller side: 4,096 rows of each take seconds, 16,384 minutes.
    """
    from scipy.optimize import linear_sum_assignment

    return cosines_AB[linear_sum_assignment(cosines_AB, maximize=True)].astype(np.float64)


def cosine_histogram(decoders: Sequence[Any]) -> dict[str, Any]:
    """Histogram of each latent's largest |cos| with another latent of its group, by what they write [F, R]."""
    return _histogram(np.concatenate([largest_cosines(rows) for rows in decoders]))


def _histogram(values: np.ndarray) -> dict[str, Any]:
    counts, edges = np.histogram(values, _BINS, (0, 1))
    median = float(np.median(values)) if len(values) else None
    return {"edges": edges.tolist(), "counts": counts.tolist(), "median": median}


class CoActivation:
    """Latents that fire together: for each latent the largest Jaccard index with another.

    J(i, j) = tokens on which both fire / tokens on which at least one fires, over about 16,384 tokens, evenly chosen
    from those that are evaluated, and fewer where so many latents fire that pairs of them would be too many. Latents
    that fire on fewer than 8 of these tokens are left out. Up to 4,096 latents all are looked at, above it 4,096 that a
    seed draws, each beside all others.
    """

    def __init__(self, latents: int, batch_tokens: int, tokens: int):
        self._width = latents
        self._size = max(1, int(np.ceil(batch_tokens * min(1.0, _TOKENS / tokens))))
        self._indices: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._entries = 0

    def add(self, bits_BF: np.ndarray, keep_B: np.ndarray) -> None:
        """Note the latents that fire on some of a batch's kept tokens; `bits_BF` is of `firing`."""
        kept_tokens = np.flatnonzero(keep_B)
        count = min(self._size, len(kept_tokens))
        if self._entries > _ENTRIES or not count:
            return
        sampled = kept_tokens[np.arange(count) * len(kept_tokens) // count]
        firing_TF = np.unpackbits(bits_BF[sampled], axis=1, count=self._width).astype(bool)
        self._indices.append(np.nonzero(firing_TF)[1].astype(np.int32))
        self._counts.append(firing_TF.sum(1))
        self._entries += len(self._indices[-1])

    def histogram(self, most: int = MOST) -> dict[str, Any]:
        """{"edges", "counts", "median", "tokens", "latents" looked at, "rare" ones left out}."""
        from scipy import sparse

        counts_T = np.concatenate(self._counts or [np.zeros(0, np.int64)])
        ends = np.concatenate([[0], np.cumsum(counts_T)])
        indices = np.concatenate(self._indices or [np.zeros(0, np.int32)])
        shape = (len(counts_T), self._width)
        fires_TF = sparse.csr_array((np.ones(len(indices), np.float32), indices, ends), shape=shape)
        step = max(1, int(np.ceil(np.square(counts_T, dtype=np.float64).sum() / _PRODUCTS)))
        fires_TF = fires_TF[::step].tocsc()
        often_F = np.asarray(fires_TF.sum(0)).ravel()
        frequent = np.flatnonzero(often_F >= _FIRINGS)
        drawn = np.random.Philox(np.random.SeedSequence((SEED, shape[1]))).random_raw(len(frequent))
        chosen = np.sort(np.argsort(drawn, kind="stable")[:most])
        values = _largest_jaccard(fires_TF[:, frequent], often_F[frequent], chosen)
        counts = {"tokens": fires_TF.shape[0], "latents": len(chosen), "rare": int(shape[1] - len(frequent))}
        return _histogram(values) | counts


def firing(latents: Latents) -> jax.Array:
    """One bit for each latent of a token, 1 where it is not zero. uint8 [B, F / 8]; pure."""
    return jnp.packbits(latents.dense() != 0, axis=1)


def _largest_jaccard(fires_TF: Any, often_F: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """max over j != i of J(i, j) for each chosen latent i, float64."""
    largest, size = np.zeros(len(chosen)), max(1, _PAIRS_AT_ONCE // max(1, len(often_F)))
    for start in range(0, len(chosen), size):
        block = chosen[start : start + size]
        both_NF = (fires_TF[:, block].T.tocsr() @ fires_TF.tocsr()).toarray()
        both_NF[np.arange(len(block)), block] = 0
        either_NF = often_F[block][:, None] + often_F[None] - both_NF
        largest[start : start + size] = (both_NF / either_NF).max(1, initial=0)
    return largest


@dataclasses.dataclass(frozen=True)
class Stability:
    """Share of latents that two dictionaries have in common: cosines of what their latents write.

    `method` is "matched" (one to one, with the largest sum of |cos|) up to 4,096 latents, else "largest" (each latent's
    largest |cos| with one of the other dictionary, both ways).
    """

    method: str
    mean: float
    share_above: float


def stability(first: TrainedCoder, second: TrainedCoder) -> Stability:
    """Of two dictionaries that write the same hook points; of a cross-layer transcoder group by group."""
    own, other = (
        [np.asarray(rows) for rows in sae.coder.topology.decoder_rows(dict(sae.params))] for sae in (first, second)
    )
    if [rows.shape[1] for rows in own] != [rows.shape[1] for rows in other]:
        raise DataError("The latents of the two dictionaries write vectors of different sizes.")
    small = all(len(rows) <= MOST for rows in (*own, *other))
    values = []
    for rows_FD, others_GD in zip(own, other, strict=True):
        if small:
            values.append(matched(cosines(rows_FD, others_GD)))
        else:
            values += [largest_cosines(rows_FD, others_GD), largest_cosines(others_GD, rows_FD)]
    cosine = np.concatenate(values)
    return Stability("matched" if small else "largest", float(cosine.mean()), float((cosine > SAME).mean()))
