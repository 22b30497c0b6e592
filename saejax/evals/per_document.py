"""A coder's sums over documents and resamples, and the intervals and breakdowns that follow."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from saejax.evals.breakdown import Breakdown, broken_down
from saejax.evals.centred import about_zero, variance
from saejax.evals.intervals import Documents
from saejax.evals.reconstruction import Reconstruction, metrics_of
from saejax.evals.resampled import Columns, Dimensions, Slots, TextSums, away_from, mean_of
from saejax.evals.splice import splice_metrics

# Columns of a text and of a coder that make the metrics of the splice.
_LOSSES = ("predicted", "ce_clean", "ce_zero", "ce_sae", "kl")


@dataclasses.dataclass(frozen=True)
class Shared:
    """The sums that all coders of an evaluation share.

    Attributes:
        x, x2: of what is written (about a constant) and of its square over each resample, float64 [W, R].
        variance_N, variance_G: ||y - mean||^2 over each document and each group.
    """

    text: TextSums
    breakdowns: Sequence[Breakdown]
    x: np.ndarray
    x2: np.ndarray
    variance_N: np.ndarray
    variance_G: np.ndarray

    @classmethod
    def of(cls, text: TextSums, breakdowns: Sequence[Breakdown]) -> "Shared":
        return cls(text, breakdowns, *text.dimension_sums(), *text.variances())


class CoderSums:
    """Collects what a coder makes of each batch."""

    def __init__(self, n_groups: int):
        self._columns, self._errors = Columns(n_groups), Dimensions()
        self._centre_R: jax.Array | None = None

    def add(self, batch: Slots, error_BR: jax.Array, keep_B: np.ndarray, columns: Mapping[str, Any]) -> None:
        """Add y - y_hat [B, R], the tokens to keep, and numbers of each token {name: [B]}.

        Errors are summed about the mean of the first batch's, which is far from 0 where a coder lacks a bias.
        """
        if self._centre_R is None:
            self._centre_R = mean_of(error_BR, keep_B)
        self._errors.add(batch, away_from(error_BR, keep_B, self._centre_R)[0])
        self._columns.add(batch, {name: np.asarray(value) for name, value in columns.items()})

    def against(
        self, shared: Shared, writes: tuple[str, ...], metrics: Mapping[str, float], whole: Reconstruction
    ) -> tuple[Documents, dict[str, Any]]:
        text = shared.text
        count = len(text.numbers)
        with np.errstate(divide="ignore", invalid="ignore"):
            resampled = self._metrics(shared, writes, whole)
        columns = text.columns.documents(count) | self._columns.documents(count)
        del columns["square"]
        documents = Documents(
            text.sha256, writes, text.numbers, columns | {"variance": shared.variance_N}, dict(metrics), resampled
        )
        groups = text.columns.groups | self._columns.groups
        return documents, broken_down(shared.breakdowns, groups, shared.variance_G, text.documents_of_groups())

    def _metrics(self, shared: Shared, writes: tuple[str, ...], whole: Reconstruction) -> dict[str, np.ndarray]:
        """{metric: [W]}: of each resample what `Reconstruction` and `splice_metrics` say of the text."""
        of_text, own = ({n: v[1:] for n, v in one.resampled.items()} for one in (shared.text.columns, self._columns))
        assert self._centre_R is not None
        error_WR, error2_WR = about_zero(of_text["tokens"], self._centre_R, *self._errors.sums())
        sums = {"n": of_text["tokens"], "x": shared.x, "x2": shared.x2, "e": error_WR, "e2": error2_WR, **own}
        resampled = metrics_of(sums, whole.counts.size, whole.varies)
        losses = {name: (of_text | own)[name] for name in _LOSSES if name in of_text | own}
        if "ce_clean" in losses:
            resampled |= splice_metrics(losses)
        if len(writes) > 1:
            varied_WR = sums["n"][:, None] * variance(sums["n"], shared.x, shared.x2)
            parts = zip(*(np.split(a, len(writes), axis=1) for a in (error2_WR, varied_WR)), strict=True)
            for name, (error2, varied) in zip(writes, parts, strict=True):
                resampled[f"fve/{name}"] = 1 - error2.sum(1) / varied.sum(1)
        return resampled
