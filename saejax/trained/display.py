"""A trained coder as a notebook shows it: a table of what it is, and the curves of its training."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.figures import COLOURS, blank_figure, panels
from saejax.core.notebook import html_table
from saejax.trained.card import facts_and_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Panels of `curves`, each with the metrics that it shows: of the training, and of its validations.
_PANELS = {
    "loss": ("train/loss", "val/loss"),
    "FVE": ("train/fve", "val/fve"),
    "L0": ("train/l0", "val/l0"),
    "dead latents": ("train/dead", "val/dead"),
}


def html_card(title: str, described: Mapping[str, Any]) -> str:
    """The facts and figures of a model card, as one table below a title."""
    facts, figures = facts_and_figures(described)
    return html_table(title, {name: [text] for name, text in (facts | figures).items()})


def curves(history: Mapping[str, np.ndarray]) -> "Figure":
    """Loss, FVE, L0 and dead latents by step, those that there are: a line for the training, points for validations.

    Raises:
        DataError: there is no history.
    """
    shown = {title: names for title, names in _PANELS.items() if any(name in history for name in names)}
    if not shown:
        raise DataError(
            "There is no history to plot: it is that of `saejax.train` and of run folders, not of saved dictionaries."
        )
    figure = blank_figure((3.2 * len(shown), 2.6))
    for axes, (title, names) in zip(panels(figure, len(shown)), shown.items(), strict=True):
        for name, style, colour in zip(names, ("-", "o"), COLOURS, strict=False):
            there = np.isfinite(history.get(name, ()))
            if there.any():
                label = "validation" if style == "o" else "training"
                axes.plot(history["step"][there], history[name][there], style, color=colour, markersize=4, label=label)
        axes.set(title=title, xlabel="step")
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    return figure
