"""Reconstruction and sparsity metrics, as sums over tokens that can be added up over batches.

x: a token's activation [D]; x_hat: its reconstruction; f: its latents [F]; n tokens. What variances follow from is
summed about the batch's mean (`centred`), so that float32 sums do not cancel; totals are float64.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.coders import Latents
from saejax.evals.centred import about_zero, centred_sums, joined, variance
from saejax.evals.metrics import TOKEN_METRICS
from saejax.kernels.dense import EXACT

# Names of a centre, and of the sums of a vector and of its squares about it.
_CENTRED = (("x_at", "x", "x2"), ("e_at", "e", "e2"))


def batch_sums(x_BD: jax.Array, x_hat_BD: jax.Array, latents: Latents, keep_B: jax.Array) -> Any:
    """The sums over the tokens of a batch where `keep` is true; for `Reconstruction.add`. Pure, float32.

    Other tokens may hold anything, NaN too.
    """
    w_B = keep_B.astype(jnp.float32)
    x_BD, x_hat_BD, kept_latents = _silenced(x_BD, x_hat_BD, latents, keep_B)
    error_BD = x_BD - x_hat_BD
    norm_B, error_norm_B = jnp.linalg.norm(x_BD, axis=1), jnp.linalg.norm(error_BD, axis=1)
    over = functools.partial(jnp.matmul, w_B, precision=EXACT)
    of_vectors: dict[str, jax.Array] = {}
    for names, values_BD in zip(_CENTRED, (x_BD, error_BD), strict=True):
        of_vectors |= zip(names, centred_sums(values_BD, keep_B), strict=True)
    return of_vectors | {
        "n": w_B.sum(),
        "norm2": over(jnp.square(norm_B)),
        "relative": over(error_norm_B / jnp.maximum(norm_B, 1e-12)),
        **{name: over(metric.of_tokens(x_BD, x_hat_BD, kept_latents)) for name, metric in TOKEN_METRICS.items()},
        "l0": kept_latents.active().sum(dtype=jnp.float32),
        "counts": kept_latents.counts(),
    }


def joined_sums(blocks: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The sums of several blocks, [K, ...] each, as those of one. Pure, float32."""
    moved: dict[str, jax.Array] = {}
    for names in _CENTRED:
        moved |= zip(names, joined(blocks["n"], *(blocks[name] for name in names)), strict=True)
    return moved | {name: value.sum(0) for name, value in blocks.items() if name not in moved}


def token_sums(x_BD: jax.Array, x_hat_BD: jax.Array, latents: Latents, keep_B: jax.Array) -> dict[str, jax.Array]:
    """The addends of `batch_sums` for each token: {name: [B]}, zeros where `keep` is false. Pure, float32.

    "error2" is ||x - x_hat||^2; "norm2" ||x||^2; "relative" ||x - x_hat|| / ||x||; "l0"; and each of `TOKEN_METRICS`.
    """
    x_BD, x_hat_BD, kept_latents = _silenced(x_BD, x_hat_BD, latents, keep_B)
    error2_B, norm2_B = (jnp.square(a).sum(1) for a in (x_BD - x_hat_BD, x_BD))
    return {
        "error2": error2_B,
        "norm2": norm2_B,
        "relative": jnp.sqrt(error2_B) / jnp.maximum(jnp.sqrt(norm2_B), 1e-12),
        **{name: metric.of_tokens(x_BD, x_hat_BD, kept_latents) for name, metric in TOKEN_METRICS.items()},
        "l0": kept_latents.active().sum(1, dtype=jnp.float32),
    }


def _silenced(x_BD: jax.Array, x_hat_BD: jax.Array, latents: Latents, keep_B: jax.Array) -> Any:
    """The same in float32 with zeros for tokens that are not kept. A weight of 0 does not silence a NaN."""
    x_BD, x_hat_BD = (jnp.where(keep_B[:, None], a.astype(jnp.float32), 0) for a in (x_BD, x_hat_BD))
    return x_BD, x_hat_BD, dataclasses.replace(latents, values=jnp.where(keep_B[:, None], latents.values, 0))


class Reconstruction:
    """Adds up `batch_sums` and gives the metrics.

    l0                 mean number of non-zero latents of a token
    fve                1 - sum ||x - x_hat||^2 / sum ||x - mean x||^2, all dimensions pooled (centred, "variance
                       weighted"); the published E[x^2] variant is not this one
    r2                 mean over dimensions j of 1 - sum (x_j - x_hat_j)^2 / sum (x_j - mean x_j)^2; dimensions
                       without variance are left out
    fve_centred_error  1 - sum_j var(x_j - x_hat_j) / sum_j var(x_j): dictionary_learning's, blind to a bias
    relative_error     sum ||x - x_hat||^2 / sum ||x||^2: the share of the activations' energy that is lost
    relative_norm_error  mean of ||x - x_hat|| / ||x||
    mse                mean of ||x - x_hat||^2 / D
    zero_fraction      1 - l0 / F
    dead_fraction      share of latents that are zero for all n tokens

    And the means over tokens of `saejax.evals.metrics`.
    """

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] | None = None

    def add(self, sums: Any) -> None:
        host = {name: np.asarray(value, np.float64) for name, value in jax.device_get(sums).items()}
        for at, first, second in _CENTRED:
            host[first], host[second] = about_zero(host["n"], host.pop(at), host[first], host[second])
        self._sums = host if self._sums is None else {name: self._sums[name] + host[name] for name in host}

    @property
    def sums(self) -> dict[str, np.ndarray]:
        assert self._sums is not None, "add at least one batch"
        return self._sums

    @property
    def counts(self) -> np.ndarray:
        """Tokens for which each latent fired, int64 [F]."""
        return self.sums["counts"].astype(np.int64)

    @property
    def varies(self) -> np.ndarray:
        """Dimensions that have a variance, bool [D]."""
        s = self.sums
        variance_D = variance(s["n"], s["x"], s["x2"])
        # Below the second bound it is rounding: of the activations themselves, and of a difference in float64.
        return np.asarray(variance_D > np.maximum(1e-12 * variance_D.max(), 1e-14 * s["x2"] / s["n"]))

    def metrics(self) -> dict[str, float]:
        values = metrics_of(self.sums, self.counts.size, self.varies)
        values["dead_fraction"] = (self.sums["counts"] == 0).mean()
        return {name: float(value) for name, value in values.items()}


def metrics_of(s: Mapping[str, np.ndarray], width: int, varies: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of `Reconstruction`, but dead_fraction, from its sums: numbers [...] and, by dimension, [..., D].

    Args:
        width: how many latents there are.
        varies: the dimensions that r2 is a mean over, bool [D].
    """
    n = s["n"]
    variance_D, error_variance_D = variance(n, s["x"], s["x2"]), variance(n, s["e"], s["e2"])
    error2_D = s["e2"] / n[..., None]
    return {
        "l0": s["l0"] / n,
        "fve": 1 - error2_D.sum(-1) / variance_D.sum(-1),
        "r2": (1 - error2_D[..., varies] / variance_D[..., varies]).mean(-1),
        "fve_centred_error": 1 - error_variance_D.sum(-1) / variance_D.sum(-1),
        "relative_error": error2_D.sum(-1) / (s["norm2"] / n),
        "relative_norm_error": s["relative"] / n,
        "mse": error2_D.mean(-1),
        **{name: s[name] / n for name in TOKEN_METRICS},
        "zero_fraction": 1 - s["l0"] / n / width,
    }


def density_histogram(counts_F: np.ndarray, n_tokens: int, bins: int = 40) -> dict[str, Any]:
    """Histogram of log10(share of tokens a latent fires on), over live latents; dead ones are counted apart."""
    live = counts_F[counts_F > 0] / n_tokens
    edges = np.linspace(min(-6.0, np.floor(np.log10(1 / n_tokens))), 0.0, bins + 1)
    histogram, _ = np.histogram(np.log10(live), edges)
    return {
        "log10_edges": edges.tolist(),
        "counts": histogram.tolist(),
        "dead": int((counts_F == 0).sum()),
        "n_tokens": int(n_tokens),
    }


def decoder_gram_rms(W_dec_FD: np.ndarray, block_bytes: int = 2**27) -> float:
    """sqrt(mean over i != j of (d_i . d_j)^2), d the decoder rows at length 1: 0 for orthogonal rows.

    Random rows in D dimensions give 1 / sqrt(D). Computed through the smaller product, in float64:
    sum_ij (d_i . d_j)^2 = ||d d^T||_F^2 = ||d^T d||_F^2, block by block; a block takes about `block_bytes`.
    """
    n_rows, width = W_dec_FD.shape
    norm_F = np.sqrt(np.einsum("fd,fd->f", W_dec_FD, W_dec_FD, dtype=np.float64))
    live = int((norm_F > 0).sum())
    if live < 2:
        return 0.0
    scale_F = np.where(norm_F > 0, norm_F, 1)
    # S vectors of length L, S the smaller: rows, or columns of the rows at length 1.
    by_row = n_rows <= width
    small, large = (n_rows, width) if by_row else (width, n_rows)
    step = max(1, block_bytes // (8 * large))

    def block(start: int) -> np.ndarray:
        part = slice(start, start + step)
        if by_row:
            return np.asarray(W_dec_FD[part], np.float64) / scale_F[part, None]
        return (np.asarray(W_dec_FD[:, part], np.float64) / scale_F[:, None]).T

    total = 0.0
    for start in range(0, small, step):
        own_SL = block(start)
        total += np.square(own_SL @ own_SL.T).sum()
        total += 2 * sum(np.square(own_SL @ block(other).T).sum() for other in range(start + step, small, step))
    return float(np.sqrt(max(total - live, 0.0) / (live * (live - 1))))
