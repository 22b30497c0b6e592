"""Figures of an evaluation with intervals, and how the prefix differs from each other way."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saejax.evals.intervals import resample_interval, weights
from saejax.prefix.evaluation import METRICS, Answered


def scores(answered: Mapping[str, Answered], contexts: Sequence[str]) -> dict[str, Any]:
    """{"ways": {way: {metric: value, "intervals": {metric: [low, high]}, "tokens_saved", "ms"}},
    "differences": {way: {metric: {"value": prefix - way, "interval": [low, high]}}},
    "between": {metric: (prefix - truncated) / (text - truncated), or None where the text is no better}}, of one model.

    An interval is the middle 95 % of 1,000 resamples of the contexts (`evals.intervals`), each with all its questions:
    they share one prefix. None of fewer than ten contexts.

    Args:
        contexts: of each record.
    """
    numbers = {context: number for number, context in enumerate(dict.fromkeys(contexts))}
    n, of_N = len(numbers), [numbers[context] for context in contexts]
    drawn_WN = weights(np.arange(n)).astype(np.float64)[:, of_N]
    total_W = np.maximum(drawn_WN.sum(1), 1e-12)

    def resampled(values_N: np.ndarray) -> np.ndarray:
        return drawn_WN @ values_N / total_W

    ways = {}
    for way, answers in answered.items():
        values: dict[str, Any] = {metric: float(answers.columns[metric].mean()) for metric in METRICS}
        values["intervals"] = {metric: resample_interval(resampled(answers.columns[metric]), n) for metric in METRICS}
        ways[way] = values | {"tokens_saved": answers.saved, "ms": answers.ms}
    differences: dict[str, Any] = {}
    for way, answers in answered.items():
        if way != "prefix":
            apart = {metric: answered["prefix"].columns[metric] - answers.columns[metric] for metric in METRICS}
            differences[way] = {
                metric: {"value": float(a.mean()), "interval": resample_interval(resampled(a), n)}
                for metric, a in apart.items()
            }
    between = {}
    for metric in METRICS:
        low, high, of_prefix = (ways[way][metric] for way in ("truncated", "text", "prefix"))
        better = high < low if metric == "nll" else high > low
        between[metric] = (of_prefix - low) / (high - low) if better else None
    return {"records": len(of_N), "contexts": n, "ways": ways, "differences": differences, "between": between}
