"""The bootstrap over documents: intervals of figures, and of the difference of two coders.

Tokens of one document are alike, so it is documents that are drawn again, never tokens. A document is in a resample a
Poisson number of times with mean 1, which is a function of (seed, document, resample) alone: two evaluations of the
same text draw the same documents, in whatever program, and their resampled figures can be subtracted one by one.
(Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13: percentile intervals. Poisson weights in place of
the multinomial ones: Oza and Russell 2001; Chamandy et al. 2012.)
"""

import dataclasses
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.bootstrap import middle
from saejax.core.errors import DataError
from saejax.core.files import writing
from saejax.evals.metrics import TOKEN_METRICS

RESAMPLES, SEED = 1000, 0
# An interval from fewer documents would be much too narrow (docs/evaluation.md has what was measured).
FEWEST = 10
# The percentiles of fewer finite resamples than this share would say nothing.
_FINITE = 0.95
# P(a Poisson number of mean 1 <= k), k = 0, 1, ...: what lies above the last is 1e-15.
_AT_MOST = np.cumsum([math.exp(-1) / math.factorial(k) for k in range(17)])

# Metrics with a better side. The others (l0, ce_clean, ...) say how a coder is, not how good it is.
_BETTER = dict.fromkeys(("fve", "r2", "fve_centred_error", "loss_recovered"), "higher")
_BETTER |= dict.fromkeys(("relative_error", "relative_norm_error", "mse", "ce_sae", "kl"), "lower")
_BETTER |= {f"{name}_in_turn": _BETTER[name] for name in ("loss_recovered", "ce_sae", "kl")}
_BETTER |= {name: metric.better for name, metric in TOKEN_METRICS.items() if metric.better}


def weights(documents_N: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Times that each document is in each resample, float32 [resamples, N]; `documents_N` are their numbers."""
    drawn_NW = np.empty((len(documents_N), resamples), np.uint64)
    for i, document in enumerate(documents_N):
        # Raw output: numpy promises that a bit generator's numbers stay the same.
        drawn_NW[i] = np.random.Philox(np.random.SeedSequence((seed, int(document)))).random_raw(resamples)
    return np.searchsorted(_AT_MOST, (drawn_NW >> np.uint64(11)) * 2.0**-53, side="right").astype(np.float32).T


def resample_interval(resampled_W: np.ndarray, documents: int) -> list[float] | None:
    """[low, high], the middle 95 % of a resampled figure; None where documents are too few or it is not finite."""
    finite = resampled_W[np.isfinite(resampled_W)]
    if documents < FEWEST or len(finite) < _FINITE * len(resampled_W):
        return None
    return list(middle(finite))


@dataclasses.dataclass(frozen=True)
class Documents:
    """Sums of each document, and metrics of each resample of them.

    Attributes:
        text: sha256 of the tokens that were evaluated, and of where they stand.
        sites: the hook points written.
        numbers: int64 [N], places of the documents in the source.
        columns: float64 [N] each, sums over a document's tokens: "tokens", "error2" (||y - y_hat||^2), "variance"
            (||y - mean||^2, about the mean of all evaluated tokens), "norm2" (||y||^2), "relative", "cosine", "l0"; and
            over its predicted tokens "predicted", "ce_clean", "ce_sae", "ce_zero", "kl", where they are measured.
        resampled: {metric: float64 [W]}.
    """

    text: str
    sites: tuple[str, ...]
    numbers: np.ndarray
    columns: Mapping[str, np.ndarray]
    metrics: Mapping[str, float]
    resampled: Mapping[str, np.ndarray]

    @property
    def intervals(self) -> dict[str, list[float] | None]:
        """{metric: [low, high]}."""
        return {name: resample_interval(values_W, len(self.numbers)) for name, values_W in self.resampled.items()}

    def save(self, path: Path) -> None:
        """Writes documents.npz."""
        parts = {"document": self.numbers, "text": np.asarray(self.text), "sites": np.asarray(self.sites)}
        named = {"column": self.columns, "metric": self.metrics, "resampled": self.resampled}
        for kind, values in named.items():
            parts |= {f"{kind}/{name}": np.asarray(value) for name, value in values.items()}
        stored: Any = parts  # mypy takes the names for those of other arguments
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as handle:
                np.savez_compressed(handle, **stored)

    @classmethod
    def load(cls, path: Path) -> "Documents":
        """The documents that `save` wrote. Raises DataError where the file is damaged."""
        try:
            with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
                parts: dict[str, Any] = dict(file)
            named: dict[str, dict[str, Any]] = {"column": {}, "metric": {}, "resampled": {}}
            for key, value in parts.items():
                kind, _, name = key.partition("/")
                if name:
                    named[kind][name] = value
            sites = tuple(map(str, parts["sites"]))
            metrics = {name: float(value) for name, value in named["metric"].items()}
            return cls(str(parts["text"]), sites, parts["document"], named["column"], metrics, named["resampled"])
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is damaged ({error}). Evaluate again, with --redo.") from None


@dataclasses.dataclass(frozen=True)
class Difference:
    """A metric of one coder minus that of another, on the same documents; `interval` is None where there is none."""

    metric: str
    value: float
    interval: list[float] | None

    @property
    def verdict(self) -> str:
        """Says "better" or "worse" only where the interval excludes 0, for metrics that have a better side."""
        if self.interval is None:
            return "no interval"
        low, high = self.interval
        if low <= 0 <= high:
            return "not distinguishable"
        side = "higher" if low > 0 else "lower"
        better = _BETTER.get(self.metric.split("/")[0])
        return side if better is None else "better" if side == better else "worse"


def compare(first: Documents, second: Documents) -> dict[str, Difference]:
    """{metric: first - second}, paired: in each resample both coders see the same documents."""
    if first.text != second.text or not np.array_equal(first.numbers, second.numbers):
        raise DataError(
            "The two evaluations are of different text, so they cannot be compared document by document. Evaluate both "
            "with the same text, tokenizer, eval.tokens and eval.batch_rows."
        )
    return {
        name: Difference(
            name,
            first.metrics[name] - second.metrics[name],
            resample_interval(first.resampled[name] - second.resampled[name], len(first.numbers)),
        )
        for name in first.resampled
        if name in second.resampled
    }
