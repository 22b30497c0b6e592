"""The geometric median: a centre that a few extreme activations cannot move."""

import numpy as np


def geometric_median(rows_ND: np.ndarray, tolerance: float = 1e-7, most: int = 1000) -> np.ndarray:
    """argmin_m sum_n ||rows_n - m||, float64 [D], by Weiszfeld's iteration from the coordinates' medians.

    Stops when a step is shorter than `tolerance` x the spread of the rows (their median distance), or after `most`
    steps. Rows that m meets on its way hold it back as far as they should and no further (Vardi and Zhang 2000).
    """
    rows_ND = np.asarray(rows_ND, np.float64)
    median_D = np.median(rows_ND, axis=0)
    spread = np.median(np.linalg.norm(rows_ND - median_D, axis=1))
    for _ in range(most):
        offset_ND = rows_ND - median_D
        distance_N = np.linalg.norm(offset_ND, axis=1)
        away_N = distance_N > 1e-12 * spread
        weight_N = 1 / distance_N[away_N]
        pull_D = weight_N @ offset_ND[away_N]
        pull, held = np.linalg.norm(pull_D), np.count_nonzero(~away_N)
        if pull <= held:
            break
        step_D = (1 - held / pull) * pull_D / weight_N.sum()
        median_D = median_D + step_D
        if np.linalg.norm(step_D) <= tolerance * spread:
            break
    return median_D
