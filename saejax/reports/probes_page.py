"""Probes of dictionaries: mean AUC over the data sets for each number of latents, as a table, a picture and a page.

Made from rows {"name", "error", "curve": {k: mean}, "activations": mean or None, "letters"}; a mean has mean, low, high
and n, and one of differences a verdict. `letters` are the figures of the first-letter task, {"refused": why}, or {}.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.figures import COLOURS, MARKERS, blank_figure, panels, say_inside
from saejax.reports.table_page import Table, with_interval, write_table_page
from saejax.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (8.5, 5.2)
_LETTERS = (
    ("splits", "latents a letter", ".2f"),
    ("absorption_fraction", "absorption fraction", ".3f"),
    ("full_absorption", "full absorption", ".3f"),
)


# (dictionary, the one it is compared with, k, mean difference of AUC).
Compared = tuple[str, str, int, Any]


def render_probes(folder: Path, title: str, rows: Sequence[Mapping[str, Any]], compared: Sequence[Compared]) -> str:
    """Write probes.md, probes.png and probes.html, which needs no other file, into `folder`; returns the text."""
    path = Run(folder).probes.with_suffix(".html")
    tables = [Table(_lines(rows), notes=_notes(rows, compared))]
    return write_table_page(path, title, _lead(rows), tables, _over_k(rows, title), "mean AUC over k")


def _lead(rows: Sequence[Mapping[str, Any]]) -> str:
    n = max((mean.n for row in rows for mean in row["curve"].values()), default=0)
    sentences = []
    if n:
        over = f"Mean AUC of probes on k latents over {n} data set{'s' * (n > 1)}"
        sentences.append(f"{over}, with 95 % intervals over them." if n > 1 else f"{over}; one gives no interval.")
    if any(key in row["letters"] for row in rows for key, _, _ in _LETTERS):
        sentences.append("First letters: means over the letters that the model knows, with 95 % intervals over them.")
    return " ".join(sentences) or "There are no figures."


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    ks = list(dict.fromkeys(k for row in rows for k in row["curve"]))
    letters = any(key in row["letters"] for row in rows for key, _, _ in _LETTERS)
    heads = ["dictionary", *(f"k {k}" for k in ks), *(["activations"] if ks else [])]
    lines = [heads + [title for _, title, _ in _LETTERS] * letters]
    for row in rows:
        line = [row["name"], *(_cell(row["curve"].get(k)) for k in ks), *([_cell(row["activations"])] if ks else [])]
        for key, _, form in _LETTERS if letters else ():
            figure = row["letters"].get(key)
            line.append(with_interval(figure["mean"], (figure["low"], figure["high"]), form) if figure else "")
        lines.append(line)
    return lines


def _cell(mean: Any) -> str:
    return "" if mean is None else with_interval(mean.mean, (mean.low, mean.high), ".3f")


def _notes(rows: Sequence[Mapping[str, Any]], compared: Sequence[Compared]) -> list[str]:
    lines = [f"{row['name']}: {row['error']}" for row in rows if row["error"]]
    lines += [
        f"{name} against {other}, k {k}: {with_interval(mean.mean, (mean.low, mean.high), '+.4f')}"
        + (f", {mean.verdict}" if mean.verdict != "open" else ", no difference shown")
        + f" (paired, {mean.n} data set{'s' * (mean.n > 1)})"
        for name, other, k, mean in compared
    ]
    refused: dict[str, list[str]] = {}
    for row in rows:
        if why := row["letters"].get("refused"):
            refused.setdefault(why, []).append(row["name"])
    return lines + [f"First letters, {', '.join(names)}: refused, {why.rstrip('.')}." for why, names in refused.items()]


def _over_k(rows: Sequence[Mapping[str, Any]], title: str) -> "Figure":
    """Mean AUC over k, a line for each dictionary, and of the activations a level for each different one."""
    figure = blank_figure(_INCHES)
    (axes,) = panels(figure)
    axes.set_title(title, parse_math=False)
    axes.set(xlabel="k: latents a probe sees", ylabel="mean AUC on test rows")
    drawn = [row for row in rows if row["curve"]]
    ks = sorted({k for row in drawn for k in row["curve"]})
    for i, row in enumerate(drawn):
        ks_drawn = sorted(row["curve"])
        means = [row["curve"][k] for k in ks_drawn]
        at = [k * (1 + 0.02 * (i - (len(drawn) - 1) / 2)) for k in ks_drawn]  # side by side where they are equal
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        below = [m.mean - (m.mean if m.low is None else m.low) for m in means]
        above = [(m.mean if m.high is None else m.high) - m.mean for m in means]
        axes.errorbar(at, [m.mean for m in means], (below, above), color=colour, marker=marker, capsize=3,
                      label=row["name"])  # fmt: skip
    for level in dict.fromkeys(row["activations"].mean for row in drawn):
        axes.axhline(level, color="0.4", linestyle="--", label="activations")
    if drawn:
        axes.set_xscale("log")
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.set_xticks([], minor=True)
        handles, labels = axes.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        axes.legend(named.values(), named.keys(), frameon=False, loc="best")
    else:
        say_inside(axes, "there are no data sets")
    return figure
