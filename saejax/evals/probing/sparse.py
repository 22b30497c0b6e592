"""k-sparse probes: a logistic regression on the k latents whose mean differs most between the classes.

The method of sae-probes (arXiv 2502.16681): with m_f the mean of |z_f| over the tokens at which latent f fires, latents
are taken in the order of |mean of z_f / m_f in class 1 - mean of z_f / m_f in class 0| on the training rows.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from saejax.core.errors import DataError

# Of a data set, rows that are left for the test at least, and training rows at most.
_LEFT, _MOST_TRAINING = 100, 1024


class Split(NamedTuple):
    """Indices of rows, int64 [n] each; half of either are of each class."""

    train: np.ndarray
    test: np.ndarray


def split(name: str, labels_N: np.ndarray, seed: int, n_train: int = 0, n_test: int = 0) -> Split:
    """Random rows, without repetition: n_train for training, and of all others but one the first n_test for the test.

    Equal to `get_xy_traintest` of sae-probes for the same seed, where n_test is 0.

    Args:
        name: of the data set, for messages.
        n_train: 0: all but 100, at most 1,024.
        n_test: 0: all.
    """
    n, at = len(labels_N), [np.flatnonzero(labels_N == c) for c in (1, 0)]
    n_train = n_train or min(n - _LEFT, _MOST_TRAINING)
    rest = n - n_train - 1
    if n_train < 2 or n_train > n - _LEFT:
        raise DataError(
            f"{name} has {n} rows, too few for {max(n_train, 2)} training rows and {_LEFT} others: lower "
            "probes.train_rows, or leave the data set out."
        )
    halves = [(-(-n_train // 2), -(-rest // 2)), (n_train // 2, rest // 2)]  # the odd one is of class 1
    if any(len(rows) < sum(wanted) for rows, wanted in zip(at, halves, strict=True)):
        raise DataError(
            f"{name} has {len(at[1])} rows of one class and {len(at[0])} of the other. A probe takes as many of both "
            f"from all {n} rows: leave rows of the larger class out."
        )
    rng = np.random.RandomState(seed)
    train = [rng.choice(rows, size=wanted[0], replace=False) for rows, wanted in zip(at, halves, strict=True)]
    others = [np.setdiff1d(rows, taken) for rows, taken in zip(at, train, strict=True)]
    test = [rng.choice(rows, size=wanted[1], replace=False) for rows, wanted in zip(others, halves, strict=True)]
    first, second = rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))
    return Split(first, second[: n_test or None])


# Inverse strengths of the penalty that are tried, strongest last.
_CS = tuple(np.logspace(5, -5, 10).tolist())
_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Scores:
    """Area under the ROC curve, share of right answers and F1 (weighted by the classes' rows) of a probe on the test
    rows, and `val_auc`, the mean AUC by which its penalty was chosen.
    """

    auc: float
    accuracy: float
    f1: float
    val_auc: float


def fit(
    x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, penalty: str, seed: int
) -> Scores:
    """The scores of the probe whose penalty C in 1e5 ... 1e-5 has the best mean AUC on folds of the training rows.

    C is the first of ten with the best mean; the probe is then fitted to all training rows, shuffled by the seed. With
    three rows or fewer C is 1 and val_auc is that of the training rows. Equal to `find_best_reg` of sae-probes.

    Args:
        x_train, x_test: [n, k], as they are: nothing is scaled. Fitted in float64, as scikit-learn fits the PyTorch
            tensors that sae-probes gives it; in float32 it ends elsewhere.
        y_train, y_test: 0 or 1, [n].
        penalty: l1 (saga) or l2 (lbfgs).
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

    x_train, x_test = (np.ascontiguousarray(x, np.float64) for x in (x_train, x_test))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # 1,000 steps are what there are
        c, val_auc = 1.0, None
        if len(x_train) > 3:
            parts = folds(y_train, seed)
            means = [float(np.mean([_auc(x_train, y_train, part, penalty, c, seed) for part in parts])) for c in _CS]
            c, val_auc = _CS[int(np.argmax(means))], max(means)
        order = np.random.RandomState(seed).permutation(len(x_train))
        model = _regression(penalty, c, seed).fit(x_train[order], y_train[order])
    if val_auc is None:
        val_auc = roc_auc_score(y_train[order], model.predict_proba(x_train[order])[:, 1])
    predicted = model.predict(x_test)
    return Scores(
        auc=float(roc_auc_score(y_test, model.predict_proba(x_test)[:, 1])),
        accuracy=float(accuracy_score(y_test, predicted)),
        f1=float(f1_score(y_test, predicted, average="weighted")),
        val_auc=float(val_auc),
    )


def folds(y: np.ndarray, seed: int) -> list[tuple[Sequence[int], Sequence[int]]]:
    """(training rows, validation rows) of each fold; both classes are among the latter.

    Every pair of up to 12 rows; six stratified folds below 128; above, one: the last fifth, at most 100 rows.
    """
    from sklearn.model_selection import LeavePOut, StratifiedKFold

    n = len(y)
    if n >= 128:
        first = n - min(n // 5, 100)
        return [(range(first), range(first, n))]
    cut: Any = LeavePOut(2) if n <= 12 else StratifiedKFold(n_splits=6, shuffle=True, random_state=seed)
    return [(rest, held) for rest, held in cut.split(np.zeros(n), y) if len(np.unique(y[held])) == 2]


def _auc(x: np.ndarray, y: np.ndarray, part: tuple[Any, Any], penalty: str, c: float, seed: int) -> float:
    from sklearn.metrics import roc_auc_score

    rest, held = list(part[0]), list(part[1])
    if len(np.unique(y[rest])) < 2:
        return 0.5
    model = _regression(penalty, c, seed).fit(x[rest], y[rest])
    return float(roc_auc_score(y[held], model.predict_proba(x[held])[:, 1]))


def _regression(penalty: str, c: float, seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression

    how = {"l1_ratio": 1.0, "solver": "saga"} if penalty == "l1" else {}
    return LogisticRegression(C=c, random_state=seed, max_iter=_STEPS, **how)


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
        positive = labels_N[start : start + _BLOCK] == 1
        parts = {"1": z_BF[positive], "0": z_BF[~positive], "size": np.abs(z_BF)}
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
    """({k: scores}, latents in their order) of one data set; `x` are activations of all rows that `rows` names."""
    chosen = ranked(encode, x[rows.train], labels_N[rows.train], max(ks))
    train, test = (columns(encode, x[part], chosen) for part in rows)
    y_train, y_test = labels_N[rows.train], labels_N[rows.test]
    return {k: fit(train[:, :k], y_train, test[:, :k], y_test, penalty, seed) for k in ks}, chosen


def probe_activations(x: np.ndarray, labels_N: np.ndarray, rows: Split, seed: int) -> Scores:
    """The baseline: a regression with an l2 penalty on the activations themselves, of all sites side by side."""
    flat = x.reshape(len(x), -1)
    return fit(flat[rows.train], labels_N[rows.train], flat[rows.test], labels_N[rows.test], "l2", seed)
