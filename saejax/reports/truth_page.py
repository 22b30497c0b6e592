"""The scores of a dictionary against a known truth (`evals.truth.Scores`), as a table and a picture."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from saejax.core.figures import COLOURS, blank_figure, panels, png_of
from saejax.reports.table_page import markdown, with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# (figure, what the table calls it)
_NAMES = (
    ("mcc", "MCC"),
    ("uniqueness", "uniqueness"),
    ("f1", "F1 of latents"),
    ("precision", "precision of latents"),
    ("recall", "recall of latents"),
    ("accuracy", "accuracy of latents"),
    ("feature_f1", "F1 of features"),
    ("feature_precision", "precision of features"),
    ("feature_recall", "recall of features"),
    ("feature_accuracy", "accuracy of features"),
    ("absorption", "absorption"),
    ("shrinkage", "shrinkage"),
    ("fve", "FVE"),
    ("l0", "L0"),
    ("true_l0", "true L0"),
    ("dead", "dead latents"),
)
_OF_MANY = ("mcc", "uniqueness", "f1", "precision", "recall", "feature_f1", "absorption", "fve", "l0", "dead")


def truth_table(scores: Any) -> str:
    """Every figure of one dictionary with its interval, as Markdown."""
    lines = [["figure", "value", "95 % interval"]]
    for name, title in _NAMES:
        ends = [_figure(end) for end in scores.intervals.get(name, ())]
        lines.append([title, _figure(scores.figures[name]), " to ".join(ends)])
    return markdown(lines)


def truth_table_of_many(rows: Mapping[str, Any]) -> str:
    """A line for each dictionary, the intervals in brackets; of one that could not be scored, why."""
    lines = [["dictionary", *(dict(_NAMES)[name] for name in _OF_MANY)]]
    for name, scores in rows.items():
        if isinstance(scores, str):
            lines.append([name, scores, *[""] * (len(_OF_MANY) - 1)])
        else:
            figures, intervals = scores.figures, scores.intervals
            lines.append([name, *(_figure(figures[key], intervals.get(key)) for key in _OF_MANY)])
    return markdown(lines)


def truth_picture(scores: Any, title: str) -> bytes:
    """A PNG: cosine of each feature's best latent, and its F1, over how often the feature fires; F1 of the latents."""
    figure = blank_figure((12.0, 3.8))
    figure.suptitle(title)
    cosines, f1s, histogram = panels(figure, 3, grid=False)
    _over_rate(cosines, scores, "cosine", "|cos| of the best latent")
    _over_rate(f1s, scores, "f1", "F1 of the best latent")
    histogram.hist(scores.latents["f1"], np.linspace(0, 1, 21).tolist(), color=COLOURS[0])
    histogram.axvline(scores.figures["f1"], color=COLOURS[1], label=f"mean {scores.figures['f1']:.3f}")
    histogram.set(xlabel="F1 of a latent for its best feature", ylabel="latents", xlim=(0, 1))
    histogram.legend(frameon=False)
    return png_of(figure)


def _over_rate(axes: "Axes", scores: Any, name: str, label: str) -> None:
    """A point for each feature that fires, and the median of twelve groups of equal size."""
    rate_N, value_N = scores.features["rate"], scores.features[name]
    fires = np.flatnonzero(rate_N > 0)
    axes.scatter(rate_N[fires], value_N[fires], s=5, color=COLOURS[0], alpha=0.5, linewidths=0)
    groups = [group for group in np.array_split(fires[np.argsort(rate_N[fires])], 12) if len(group)]
    medians = [[np.median(of[group]) for group in groups] for of in (rate_N, value_N)]
    axes.plot(*medians, color=COLOURS[1], label="median")
    axes.set(xscale="log", xlabel="share of the samples on which a feature fires", ylabel=label, ylim=(0, 1.02))
    axes.legend(frameon=False)


def _figure(value: float, ends: Sequence[float] | None = None) -> str:
    return "not measured" if np.isnan(value) else with_interval(value, ends, ".4g")
