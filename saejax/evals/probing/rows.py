"""Which rows of a data set train a probe and which test it: the rows that sae-probes takes, in its order."""

from typing import NamedTuple

import numpy as np

from saejax.core.errors import DataError

# Of a data set, rows that are left for the test at least, and training rows at most.
_LEFT, _MOST = 100, 1024


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
    n_train = n_train or min(n - _LEFT, _MOST)
    rest = n - n_train - 1
    if n_train < 2 or n_train > n - _LEFT:
        raise DataError(
            f"{name} has {n} rows, too few for {max(n_train, 2)} training rows and {_LEFT} others: lower "
            "probes.train_rows, or leave the data set out."
        )
    halves = [(-(-n_train // 2), -(-rest // 2)), (n_train // 2, rest // 2)]  # the odd one is of class 1
    if any(len(own) < sum(wanted) for own, wanted in zip(at, halves, strict=True)):
        raise DataError(
            f"{name} has {len(at[1])} rows of one class and {len(at[0])} of the other. A probe takes as many of both "
            f"from all {n} rows: leave rows of the larger class out."
        )
    rng = np.random.RandomState(seed)
    train = [rng.choice(own, size=wanted[0], replace=False) for own, wanted in zip(at, halves, strict=True)]
    others = [np.setdiff1d(own, taken) for own, taken in zip(at, train, strict=True)]
    test = [rng.choice(own, size=wanted[1], replace=False) for own, wanted in zip(others, halves, strict=True)]
    first, second = rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))
    return Split(first, second[: n_test or None])
