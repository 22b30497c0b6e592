"""When two runs of a model gave a token the same values."""

import numpy as np

# Rounding between two ways of batching may change a token's values by this much, relative to their norm: at most and
# at least.
MOST = {"float32": 1e-3, "bfloat16": 3e-2}
LEAST = {"float32": 2e-6, "bfloat16": 8e-3}
ROUNDING = {"float32": 1e-5, "bfloat16": 8e-3}


def difference(one: np.ndarray, two: np.ndarray) -> float:
    """Largest ||a - b|| / ||b|| of all tokens; infinity where there is NaN."""
    norm = np.linalg.norm(two, axis=-1)
    error = np.linalg.norm(one - two, axis=-1) / np.maximum(norm, np.finfo(np.float32).tiny)
    return float(np.nan_to_num(error, nan=np.inf).max())
