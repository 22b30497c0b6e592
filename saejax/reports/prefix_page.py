"""The answers of models from a latent prefix, scored: tables, a picture and one page."""

from collections.abc import Mapping, Sequence
from typing import Any

from saejax.core.figures import COLOURS, blank_figure, panels, png_of
from saejax.reports.table_page import Table, table_page, with_interval

_WAYS_HEAD = ("model", "way", "exact match", "F1", "nll", "tokens saved", "ms to first token")
_DIFFERENCES = ("model", "prefix against", "exact match", "F1", "nll")
_METRICS = ("em", "f1", "nll")


def prefix_tables(models: Mapping[str, Any]) -> list[Table]:
    """A table with a line for each model and way, and one of the prefix less each other way, on the same records."""
    lines, differences = [list(_WAYS_HEAD)], [list(_DIFFERENCES)]
    for name, content in models.items():
        for way, row in content["ways"].items():
            figures = [with_interval(row[metric], row["intervals"][metric], ".3f") for metric in _METRICS]
            lines.append([name, way, *figures, f"{row['tokens_saved']:.1f}", f"{row['ms']:.1f}"])
        for way, row in content["differences"].items():
            figures = [with_interval(row[metric]["value"], row[metric]["interval"], "+.3f") for metric in _METRICS]
            differences.append([name, way, *figures])
    lead = "Differences on the same records; an interval without 0 is one that the records can tell."
    return [
        Table(lines, (0, 1), [_sentence(name, content) for name, content in models.items()]),
        Table(differences, (0, 1), title="The prefix against each other way", lead=lead),
    ]


def _sentence(name: str, content: Mapping[str, Any]) -> str:
    """The place of a model's prefix between truncation and text."""
    apart, share = content["differences"]["truncated"]["em"], content["between"]["em"]
    difference = with_interval(apart["value"], apart["interval"], "+.3f")
    sentence = f"{name}: exact match of the prefix less that of truncation is {difference}"
    if share is None:
        return f"{sentence}; the text is no better than truncation, so that nothing lies between them."
    return f"{sentence}. From truncation (0) to text (1) the prefix stands at {share:.2f}."


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
    words = tuple(range(len(examples[0])))
    shown = Table(examples, words, title="Examples", lead="What was said for the first held-out records.")
    return table_page(title, lead, [*prefix_tables(models), shown], _bars_and_loss(models, curves), "exact match")


def _bars_and_loss(models: Mapping[str, Any], curves: Mapping[str, Sequence[tuple[int, float]]]) -> bytes:
    figure = blank_figure((4.2 * (len(models) + 1), 3.6))
    *bars, loss = panels(figure, len(models) + 1, grid=False)
    for axes, (name, content) in zip(bars, models.items(), strict=True):
        for i, (way, row) in enumerate(content["ways"].items()):
            low, high = row["intervals"]["em"] or (row["em"], row["em"])
            error = [[max(0.0, row["em"] - low)], [max(0.0, high - row["em"])]]
            axes.bar(i, row["em"], color=COLOURS[1 if way == "prefix" else 0], yerr=error, capsize=3)
        axes.set_xticks(range(len(content["ways"])), list(content["ways"]), rotation=30)
        axes.set(title=name, ylabel="exact match", ylim=(0, 1.02))
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        loss.plot(*zip(*points, strict=True), color=colour, label=name)
    loss.set(xlabel="step", ylabel="nats a token of the answer")
    if curves:
        loss.legend(frameon=False)
    return png_of(figure)
