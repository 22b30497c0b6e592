"""Activations that every contestant trains on: sparse sums of known directions. NumPy alone.

    a_s = sum_j c_j d_sj + offset_s + noise,   s = 1 ... S hook points

A token has ACTIVE features out of at most FEATURES, common ones more often (weights 1 / sqrt(rank)), with exponential
strengths c. Features have a direction of length 1 at each hook point. So a dictionary can explain all but the noise,
and FVE says how much of that was learned; white noise would have nothing to learn.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

ACTIVE = 24
FEATURES = 6144
NOISE = 0.1  # of the standard deviation of the features' part
_PIECE = 4096

# rows [B, S, d] -> (reconstruction [B, ...] of what is written, latents that are not 0, counted over the rows)
Reconstruct = Callable[[np.ndarray], tuple[np.ndarray, int]]


def ceiling() -> float:
    """The FVE of whoever finds every feature."""
    return 1 / (1 + NOISE**2)


def make(path: Path, n: int, d: int, sites: int = 1, seed: int = 0) -> Path:
    """Writes float32 [n, sites, d] to `path`, unless it is there; E ||a_s||^2 is d."""
    if path.exists():
        return path
    directions = np.random.default_rng(0)  # the held-out tokens have the same features as the others
    features = min(FEATURES, 8 * d)
    d_SGD = directions.standard_normal((sites, features, d), np.float32)
    d_SGD /= np.linalg.norm(d_SGD, axis=-1, keepdims=True)
    offset_SD = directions.standard_normal((sites, d), np.float32) * np.float32(0.3)
    share_G = np.arange(1, features + 1) ** -0.5
    cumulative_G = np.cumsum(share_G / share_G.sum())
    # Features' part: ACTIVE x E c^2 = 2 ACTIVE over d coordinates; offset 0.09; noise NOISE^2 of the features' part.
    size = np.float32(math.sqrt((1 - 0.09) / ((1 + NOISE**2) * 2 * ACTIVE / d)))
    noise = np.float32(NOISE * math.sqrt(2 * ACTIVE / d))
    rng = np.random.default_rng((1, seed))
    part = path.with_suffix(".part.npy")
    rows = np.lib.format.open_memmap(part, "w+", np.float32, (n, sites, d))
    for start in range(0, n, _PIECE):
        count = min(_PIECE, n - start)
        index_BK = np.minimum(np.searchsorted(cumulative_G, rng.random((count, ACTIVE))), features - 1)
        strength_BK = rng.standard_exponential((count, ACTIVE), np.float32)
        for s in range(sites):
            sum_BD = rng.standard_normal((count, d), np.float32) * noise
            for j in range(ACTIVE):
                sum_BD += strength_BK[:, j, None] * d_SGD[s, index_BK[:, j]]
            rows[start : start + count, s] = sum_BD * size + offset_SD[s]
    rows.flush()
    part.replace(path)
    return path


def flatten(path: Path, to: Path) -> None:
    """float32 [n, 1, d] -> [n, d], as `saejax store import` reads it."""
    np.save(to, np.load(path, mmap_mode="r")[:, 0])


class Batches:
    """Rows in order, from the start again where they end: batch i is the same for everybody."""

    def __init__(self, path: str | Path, batch: int):
        self.rows, self.batch, self.next = np.load(path, mmap_mode="r"), batch, 0

    def take(self) -> np.ndarray:
        """The next batch [B, S, d], in memory."""
        at = np.arange(self.next * self.batch, (self.next + 1) * self.batch) % len(self.rows)
        self.next += 1
        return np.take(self.rows, at, axis=0)


def explained(reconstruct: Reconstruct, heldout: str | Path, batch: int, written: slice) -> dict[str, float]:
    """{fve, l0} over held-out rows: 1 - sum ||y - y_hat||^2 / sum ||y - mean y||^2 in float64.

    In batches of the training's size, because a selection over a batch depends on it; y are the sites `written`.
    """
    rows = np.load(heldout, mmap_mode="r")
    mean_SD = rows[:, written].mean(0, dtype=np.float64)
    error = variance = kept = 0.0
    for start in range(0, len(rows) - batch + 1, batch):
        x_BSD = np.ascontiguousarray(rows[start : start + batch])
        y_hat, count = reconstruct(x_BSD)
        y_BSD = x_BSD[:, written].astype(np.float64)
        error += float(np.square(y_BSD - np.asarray(y_hat).reshape(y_BSD.shape)).sum())
        variance += float(np.square(y_BSD - mean_SD).sum())
        kept += count
    return {"fve": 1 - error / variance, "l0": kept / (len(rows) // batch * batch)}
