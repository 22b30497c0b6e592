"""One measure for every coder of the comparison, whoever trained it; NumPy alone."""

from collections.abc import Callable

import numpy as np

# float32 rows [B, d] -> (latents [B, F], reconstruction [B, d])
Encode = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def measure(
    encode: Encode, heldout: np.ndarray, rows: int = 4096, targets: np.ndarray | None = None
) -> dict[str, float]:
    """l0: mean number of non-zero latents; fve: 1 - sum ||y - y_hat||^2 / sum ||y - mean y||^2, float64; dead: share
    of latents that are non-zero nowhere in `heldout`. y are the `targets`: `heldout` itself, but for a transcoder.
    """
    targets = heldout if targets is None else targets
    mean_D = targets.mean(axis=0, dtype=np.float64)
    kept, error, variance, fired_F = 0, 0.0, 0.0, np.zeros(0, bool)
    for start in range(0, len(heldout), rows):
        x_BD = np.ascontiguousarray(heldout[start : start + rows], np.float32)
        y_BD = np.asarray(targets[start : start + rows], np.float64)
        latents_BF, y_hat_BD = (np.asarray(a) for a in encode(x_BD))
        active_BF = latents_BF != 0
        kept += int(active_BF.sum())
        fired_F = active_BF.any(0) | (fired_F if fired_F.size else np.zeros(active_BF.shape[1], bool))
        error += float(np.square(y_BD - y_hat_BD).sum())
        variance += float(np.square(y_BD - mean_D).sum())
    return {"l0": kept / len(heldout), "fve": 1 - error / variance, "dead": float(1 - fired_F.mean())}
