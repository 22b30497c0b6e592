"""Which tokens of a batch are stored."""

from collections.abc import Mapping

import numpy as np

from saejax.text import PackedRows


def last_of_document(packed: PackedRows, k: int) -> np.ndarray:
    """Whether a token is one of the last k ordinary ones of its document, bool [R, S]."""
    return (packed.to_end >= 0) & (packed.to_end < k)


def outliers(activations_ND: Mapping[str, np.ndarray], candidates_N: np.ndarray, ratio: float) -> np.ndarray:
    """||x_n|| > ratio median_m ||x_m|| at any hook point, the median over the candidates m; bool [N].

    Such tokens are few in most models, usually the first of a text, and so far out that they decide a mean squared
    error by themselves. A median of zero filters nothing.
    """
    found_N = np.zeros(len(candidates_N), bool)
    if not candidates_N.any():
        return found_N
    for x_ND in activations_ND.values():
        norms_N = np.sqrt(np.square(x_ND[candidates_N].astype(np.float32)).sum(-1, dtype=np.float64))
        usual = float(np.median(norms_N))
        if usual > 0:
            found_N[candidates_N] |= norms_N > ratio * usual
    return found_N
