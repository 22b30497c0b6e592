"""The geometric median: a centre that a few extreme activations cannot move."""

import numpy as np


def geometric_median(rows_ND: np.ndarray, tolerance: float = 1e-7, most: int = 1000) -> np.ndarray:
    """argmin_m sum_n ||rows_n - m||, float64 [D], by Weiszfeld's iteration from the mean.

    Stops when a step is shorter than `tolerance` x the spread of the rows, or after `most` steps.
    """
    rows_ND = np.asarray(rows_ND, np.float64)
    median_D = rows_ND.mean(0)
    spread = np.linalg.norm(rows_ND - median_D, axis=1).mean()
    for _ in range(most):
        distance_N = np.linalg.norm(rows_ND - median_D, axis=1)
        weight_N = 1 / np.maximum(distance_N, 1e-12 * max(spread, 1e-300))
        moved_D = (weight_N @ rows_ND) / weight_N.sum()
        step, median_D = np.linalg.norm(moved_D - median_D), moved_D
        if step <= tolerance * spread:
            break
    return median_D
