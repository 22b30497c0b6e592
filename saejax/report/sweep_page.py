"""What came out of a sweep: one table, one picture of L0 and FVE, and a page that holds both.

Made from the content of sweep.json alone: {"name", "tokens", "tokens_per_second", "members": [row, ...]}.
"""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from saejax.core.files import writing

Row = dict[str, Any]

# Size of the picture, inches x dots an inch.
_INCHES, _DPI = (9.0, 5.6), 120
_MARKERS = "osD^vP*Xph<>"
# Okabe and Ito's colours, which are told apart also by those who see fewer.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
# So many points carry their member's name, where there is one seed: those of several seeds lie too close.
_NAMED = 12

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    # heading, key, format
    ("member", "member", ""),
    ("preset", "preset", ""),
    ("d_sae", "d_sae", ",d"),
    ("k", "k", "g"),
    ("lr", "lr", "g"),
    ("seed", "seed", "d"),
    ("sparsity scale", "sparsity_scale", "g"),
    ("L0", "l0", ".1f"),
    ("FVE", "fve", ".4f"),
    ("dead", "dead", ".2%"),
    ("relative error", "relative_error", ".4f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("status", "status", ""),
)


def render_sweep(folder: Path, content: dict[str, Any]) -> None:
    """Writes sweep.md, sweep.png and sweep.html, which needs no other file, into `folder`."""
    figure = picture(content["members"], f"{content['name']}: {content['tokens']:,} activations each")
    with writing(folder):
        figure.savefig(folder / "sweep.png", dpi=_DPI)
        (folder / "sweep.md").write_text(f"# Sweep {content['name']}\n\n{table(content)}\n", encoding="utf-8")
        (folder / "sweep.html").write_text(_page(content, (folder / "sweep.png").read_bytes()), encoding="utf-8")


def table(content: dict[str, Any]) -> str:
    """The members as a Markdown table whose columns also line up as text."""
    rows = _cells(content)
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(_COLUMNS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(content: dict[str, Any]) -> list[list[str]]:
    """Headings, then a row for each member."""
    rows = [[heading for heading, _, _ in _COLUMNS]]
    for member in content["members"]:
        rows.append(["" if member[key] is None else format(member[key], form) for _, key, form in _COLUMNS])
    return rows


def picture(rows: Sequence[Row], title: str) -> Figure:
    """FVE over L0 on held-out activations: a line for each preset, width and hook point, a marker for each seed.

    A line joins a seed's members in the order of their L0. A few members carry their names; those that failed are not
    drawn.
    """
    good = [row for row in rows if row["fve"] is not None and row["l0"] and row["l0"] > 0]
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(title=title, xlabel="L0: latents a token (log scale)", ylabel="FVE: fraction of variance explained")
    axes.grid(True, color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    if not good:
        axes.text(0.5, 0.5, "no member finished", ha="center", transform=axes.transAxes)
        return figure
    seeds = sorted({row["seed"] for row in good})
    of_seed = {seed: _MARKERS[i % len(_MARKERS)] for i, seed in enumerate(seeds)}
    families = _families(good)
    for i, (label, family) in enumerate(families.items()):
        colour, style = _COLOURS[i % len(_COLOURS)], "-" if i < len(_COLOURS) else "--"
        axes.plot([], [], color=colour, linestyle=style, label=label)
        for seed in seeds:
            points = sorted((row["l0"], row["fve"]) for row in family if row["seed"] == seed)
            axes.plot(*zip(*points, strict=True) if points else ((), ()), marker=of_seed[seed], markersize=7,
                      color=colour, linestyle=style, linewidth=1.2, markeredgecolor="white")  # fmt: skip
    for row in good if len(good) <= _NAMED and len(seeds) == 1 else []:
        axes.annotate(
            row["member"], (row["l0"], row["fve"]), (6, -10), textcoords="offset points", fontsize=8, color="0.35"
        )
    _log_axis(axes, [row["l0"] for row in good])
    markers = [Line2D([], [], color="0.3", linestyle="", marker=of_seed[seed], label=f"seed {seed}") for seed in seeds]
    lines = axes.get_legend_handles_labels()[0]
    axes.legend(
        handles=[*lines, *(markers if len(seeds) > 1 else [])],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )
    return figure


def _families(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by label, which says of preset, width and hook point what is needed to tell them apart."""
    several = len({tuple(row["reads"]) for row in rows}) > 1
    found: dict[str, list[Row]] = {}
    for row in rows:
        where = f"\n{' '.join(row['reads'])}" if several else ""
        found.setdefault(f"{row['preset']}, {row['d_sae']:,} latents{where}", []).append(row)
    return found


def _log_axis(axes: Any, l0: Sequence[float]) -> None:
    """A log axis with plain numbers, wide enough that points of one L0 do not fill it with noise."""
    low, high = min(l0) / 1.15, max(l0) * 1.15
    if high / low < 3:
        middle = (low * high) ** 0.5
        low, high = middle / 3**0.5, middle * 3**0.5
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    within = (1, 2, 3, 4, 5, 6, 8) if high / low < 10 else (1, 2, 5)
    ticks = [m * 10.0**n for n in range(-2, 6) for m in within]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _page(content: dict[str, Any], png: bytes) -> str:
    head, *rows = _cells(content)
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(content["name"])}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100% }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2), th:last-child, td:last-child {{ text-align: left }}
</style>
<h1>Sweep {html.escape(content["name"])}</h1>
<p>{len(rows)} coders, {content["tokens"]:,} activations each, {content["tokens_per_second"]:,.0f} a second.</p>
<img alt="FVE over L0" src="data:image/png;base64,{base64.b64encode(png).decode()}">
<div style="overflow-x: auto"><table><tr>{"".join(f"<th>{html.escape(cell)}</th>" for cell in head)}</tr>
{cells}</table></div>
</html>
"""
