"""Logistic regressions with a chosen penalty, scored on other rows: scikit-learn's, as sae-probes calls them."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

# Inverse strengths of the penalty that are tried, strongest last.
_CS = tuple(np.logspace(5, -5, 10).tolist())
_STEPS = 1000


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of a probe on the test rows, and `val_auc`, the mean AUC by which its penalty was chosen.

    Attributes:
        auc: area under the ROC curve.
        accuracy: share of right answers.
        f1: mean over the classes, weighted by their rows.
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
        c, val_auc = _best(x_train, y_train, penalty, seed)
        order = np.random.RandomState(seed).permutation(len(x_train))
        model = _regression(penalty, c, seed).fit(x_train[order], y_train[order])
    if val_auc is None:
        val_auc = roc_auc_score(y_train[order], model.predict_proba(x_train[order])[:, 1])
    said = model.predict(x_test)
    return Scores(
        auc=float(roc_auc_score(y_test, model.predict_proba(x_test)[:, 1])),
        accuracy=float(accuracy_score(y_test, said)),
        f1=float(f1_score(y_test, said, average="weighted")),
        val_auc=float(val_auc),
    )


def _best(x: np.ndarray, y: np.ndarray, penalty: str, seed: int) -> tuple[float, float | None]:
    """(C, its mean AUC over the folds); (1, None) where there are too few rows for folds."""
    if len(x) <= 3:
        return 1.0, None
    parts = folds(y, seed)
    means = [np.mean([_auc(x, y, part, penalty, c, seed) for part in parts]) for c in _CS]
    best = int(np.argmax(means))
    return _CS[best], float(means[best])


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
