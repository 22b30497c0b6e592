"""k-sparse probes: a logistic regression on the k latents whose mean differs most between the classes.

The method of sae-probes (arXiv 2502.16681): with m_f the mean of |z_f| over the tokens at which latent f fires, latents
are taken in the order of |mean of z_f / m_f in class 1 - mean of z_f / m_f in class 0| on the training rows.
"""

from collections.abc import Callable, Sequence

import numpy as np

from saejax.evals.probing.fit import Scores, fit
from saejax.evals.probing.rows import Split

# Activations [n, D] (or [n, S, D]) -> latents [n, F].
Encode = Callable[[np.ndarray], np.ndarray]

_BLOCK, _EPS = 1024, 1e-6


def ranked(encode: Encode, x: np.ndarray, labels_N: np.ndarray, most: int) -> np.ndarray:
    """The `most` latents by falling difference between the classes, int64; equal ones in the order of their numbers.

    d_f = |mean_1(z_f) - mean_0(z_f)| / (sum |z_f| / (n_f + eps) + eps), n_f the rows at which z_f is not 0, eps 1e-6.
    Sums are float64.
    """
    sums: dict[str, np.ndarray] = {}
    for start in range(0, len(x), _BLOCK):
        z_BF = encode(x[start : start + _BLOCK])
        one = labels_N[start : start + _BLOCK] == 1
        parts = {"1": z_BF[one], "0": z_BF[~one], "size": np.abs(z_BF)}
        block = {name: part.sum(0, dtype=np.float64) for name, part in parts.items()}
        block["n"] = np.count_nonzero(z_BF, axis=0).astype(np.float64)
        sums = {name: value + sums.get(name, 0.0) for name, value in block.items()}
    n_1 = int((labels_N == 1).sum())
    difference_F = np.abs(sums["1"] / n_1 - sums["0"] / (len(x) - n_1))
    scale_F = sums["size"] / (sums["n"] + _EPS) + _EPS
    return np.argsort(-difference_F / scale_F, kind="stable")[:most]


def columns(encode: Encode, x: np.ndarray, latents: np.ndarray) -> np.ndarray:
    """These latents of all rows, float32 [N, len(latents)], block by block."""
    blocks = [encode(x[start : start + _BLOCK])[:, latents] for start in range(0, len(x), _BLOCK)]
    return np.concatenate(blocks).astype(np.float32, copy=False)


def probe_latents(
    encode: Encode, x: np.ndarray, labels_N: np.ndarray, rows: Split, ks: Sequence[int], penalty: str, seed: int
) -> tuple[dict[int, Scores], np.ndarray]:
    """({k: scores}, latents in their order) of one data set.

    Args:
        x: activations of all rows that `rows` names, as the coder reads them.
    """
    chosen = ranked(encode, x[rows.train], labels_N[rows.train], max(ks))
    train, test = (columns(encode, x[part], chosen) for part in rows)
    y_train, y_test = labels_N[rows.train], labels_N[rows.test]
    return {k: fit(train[:, :k], y_train, test[:, :k], y_test, penalty, seed) for k in ks}, chosen


def probe_activations(x: np.ndarray, labels_N: np.ndarray, rows: Split, seed: int) -> Scores:
    """The baseline: a regression with an l2 penalty on the activations themselves, of all sites side by side."""
    flat = x.reshape(len(x), -1)
    return fit(flat[rows.train], labels_N[rows.train], flat[rows.test], labels_N[rows.test], "l2", seed)
