"""One measure for every coder of the comparison, whoever trained it; NumPy alone."""

import dataclasses
from collections.abc import Callable

import numpy as np

# float32 rows [B, d] -> (latents [B, F], reconstruction [B, d])
Encode = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What held-out rows say of a coder.

    Attributes:
        error, variance: float64 [G], sum over each group's rows of ||y - y_hat||^2 and of ||y - mean y||^2.
        kept: float64 [G], sum over each group's rows of the number of non-zero latents.
        rows: int64 [G].
        fired: int64 [F], rows for which each latent is not 0.
        latents, y_hat: of every row, where they were asked for.
    """

    error: np.ndarray
    variance: np.ndarray
    kept: np.ndarray
    rows: np.ndarray
    fired: np.ndarray
    latents: np.ndarray | None = None
    y_hat: np.ndarray | None = None

    def figures(self) -> dict[str, float]:
        """l0: mean number of non-zero latents; fve: 1 - sum ||y - y_hat||^2 / sum ||y - mean y||^2; dead: share of
        latents that are non-zero nowhere."""
        return {
            "l0": float(self.kept.sum() / self.rows.sum()),
            "fve": float(1 - self.error.sum() / self.variance.sum()),
            "dead": float((self.fired == 0).mean()),
        }


def measured(
    encode: Encode,
    heldout: np.ndarray,
    groups: np.ndarray | None = None,
    targets: np.ndarray | None = None,
    keep: bool = False,
    rows: int = 4096,
) -> Measured:
    """Sums over `heldout` [N, d], in float64; `groups` [N] says to which group each row counts, all to one without.

    y are the `targets`: `heldout` itself, but for a transcoder.
    """
    targets = heldout if targets is None else targets
    groups = np.zeros(len(heldout), int) if groups is None else np.asarray(groups)
    mean_D, n_groups = targets.mean(axis=0, dtype=np.float64), int(groups.max()) + 1
    error_N, variance_N, count_N = (np.zeros(len(heldout)) for _ in range(3))
    fired_F: np.ndarray | None = None
    kept: list[tuple[np.ndarray, np.ndarray]] = []
    for start in range(0, len(heldout), rows):
        here = slice(start, start + rows)
        y_BD = np.asarray(targets[here], np.float64)
        latents_BF, y_hat_BD = (np.asarray(a) for a in encode(np.ascontiguousarray(heldout[here], np.float32)))
        active_BF = latents_BF != 0
        error_N[here] = np.square(y_BD - y_hat_BD).sum(1)
        variance_N[here] = np.square(y_BD - mean_D).sum(1)
        count_N[here] = active_BF.sum(1)
        fired_F = active_BF.sum(0) + (0 if fired_F is None else fired_F)
        if keep:
            kept.append((latents_BF, y_hat_BD))
    assert fired_F is not None, "no held-out rows"

    def by_group(values_N: np.ndarray) -> np.ndarray:
        return np.bincount(groups, values_N, n_groups)

    sums = (by_group(values) for values in (error_N, variance_N, count_N))
    whole = [np.concatenate(parts) for parts in zip(*kept, strict=True)]
    return Measured(*sums, np.bincount(groups, minlength=n_groups), fired_F, *whole)


def measure(
    encode: Encode, heldout: np.ndarray, rows: int = 4096, targets: np.ndarray | None = None
) -> dict[str, float]:
    """The figures of `Measured`, of all rows together."""
    return measured(encode, heldout, None, targets, rows=rows).figures()
