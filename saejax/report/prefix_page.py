"""How well models answer from a latent prefix, as a table, a picture and one page."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saejax.report.tables import COLOURS, DPI, blank_figure, markdown, page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEAD = ("model", "way", "exact match", "F1", "nll", "tokens saved", "ms to first token")
_DIFFERENCES = ("model", "prefix against", "exact match", "F1", "nll")
_METRICS = ("em", "f1", "nll")


def lines(models: Mapping[str, Any]) -> list[list[str]]:
    """A line for each model and way."""
    found = [list(_HEAD)]
    for name, content in models.items():
        for way, row in content["ways"].items():
            cells = [_cell(row[metric], row["intervals"][metric]) for metric in _METRICS]
            found.append([name, way, *cells, f"{row['tokens_saved']:.1f}", f"{row['ms']:.1f}"])
    return found


def differences(models: Mapping[str, Any]) -> list[list[str]]:
    """The prefix less each other way, from the same records and resamples."""
    found = [list(_DIFFERENCES)]
    for name, content in models.items():
        for way, row in content["differences"].items():
            found.append([name, way, *(_cell(row[m]["value"], row[m]["interval"], "+") for m in _METRICS)])
    return found


def between(models: Mapping[str, Any]) -> list[str]:
    """Of each model a sentence: where the prefix stands."""
    return [_sentence(name, content) for name, content in models.items()]


def _sentence(name: str, content: Mapping[str, Any]) -> str:
    apart = content["differences"]["truncated"]["em"]
    said = (
        f"{name}: exact match of the prefix less that of truncation is {_cell(apart['value'], apart['interval'], '+')}"
    )
    share = content["between"]["em"]
    if share is None:
        return f"{said}; the text is no better than truncation, so that nothing lies between them."
    return f"{said}. From truncation (0) to text (1) the prefix stands at {share:.2f}."


def table(models: Mapping[str, Any]) -> str:
    """Both tables and the sentences, as Markdown."""
    return "\n\n".join([markdown(lines(models)), *between(models), markdown(differences(models))])


def render_prefix(
    title: str,
    lead: str,
    models: Mapping[str, Any],
    curves: Mapping[str, Sequence[tuple[int, float]]],
    examples: Sequence[Sequence[str]],
) -> str:
    """One HTML file: exact match by way, the loss over the training, tables and examples.

    Args:
        curves: {name: (step, nats a token)}.
        examples: lines of a table, the first of them headings.
    """
    sections = [
        ("The prefix against each other way", "Differences on the same records; an interval without 0 is one that the "
         "records can tell.", differences(models)),
        ("Examples", "What was said for the first held-out records.", examples),
    ]  # fmt: skip
    return page(title, lead, lines(models), _picture(models, curves), (0, 1), between(models), "exact match", sections)


def _picture(models: Mapping[str, Any], curves: Mapping[str, Sequence[tuple[int, float]]]) -> bytes:
    figure = blank_figure((4.2 * (len(models) + 1), 3.6))
    *bars, loss = figure.subplots(1, len(models) + 1)
    for axes, (name, content) in zip(bars, models.items(), strict=True):
        _bars(axes, name, content["ways"])
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        loss.plot(*zip(*points, strict=True), color=colour, label=name)
    loss.set(xlabel="step", ylabel="nats a token of the answer")
    if curves:
        loss.legend(frameon=False)
    for axes in (*bars, loss):
        axes.spines[["top", "right"]].set_visible(False)
    with io.BytesIO() as buffer:
        figure.savefig(buffer, dpi=DPI, format="png")
        return buffer.getvalue()


def _bars(axes: "Axes", name: str, ways: Mapping[str, Any]) -> None:
    for i, (way, row) in enumerate(ways.items()):
        low, high = row["intervals"]["em"] or (row["em"], row["em"])
        error = [[max(0.0, row["em"] - low)], [max(0.0, high - row["em"])]]
        axes.bar(i, row["em"], color=COLOURS[1 if way == "prefix" else 0], yerr=error, capsize=3)
    axes.set_xticks(range(len(ways)), list(ways), rotation=30)
    axes.set(title=name, ylabel="exact match", ylim=(0, 1.02))


def _cell(value: float, ends: Sequence[float] | None, sign: str = "") -> str:
    shown = f"{value:{sign}.3f}"
    return shown if ends is None else f"{shown} ({ends[0]:{sign}.3f} to {ends[1]:{sign}.3f})"
