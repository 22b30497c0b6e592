"""Many coders in one table, one picture and one page: what the pages of sweeps and of dictionaries share."""

import base64
import html
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

# (heading, key of a row, format) of each column.
Columns = Sequence[tuple[str, str, str]]

DPI = 120
MARKERS = "osD^vP*Xph<>"
# Okabe and Ito's colours, which are told apart also by those who see fewer.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")


def cells(columns: Columns, rows: Sequence[Row]) -> list[list[str]]:
    """Headings, then a line for each row; what a row does not say is empty."""
    said = [["" if row.get(key) is None else format(row[key], form) for _, key, form in columns] for row in rows]
    return [[heading for heading, _, _ in columns], *said]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The cells as a Markdown table whose columns also line up as text."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(lines[0]))]
    drawn = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([drawn[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *drawn[1:]])


def blank_figure(inches: tuple[float, float]) -> "Figure":
    """A figure without a window. Only here is matplotlib imported: it takes longer than most commands need to start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def log_axis(axes: Any, l0: Sequence[float]) -> None:
    """A log axis with plain numbers, wide enough that points of one L0 do not fill it with noise."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

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


def page(
    title: str,
    lead: str,
    lines: Sequence[Sequence[str]],
    png: bytes,
    words: Sequence[int],
    below: Sequence[str] = (),
    alt: str = "FVE over L0",
    sections: Sequence[tuple[str, str, Sequence[Sequence[str]]]] = (),
) -> str:
    """One HTML file that needs no other: the picture, the table, paragraphs `below` it, and more tables.

    The columns `words` hold words, not numbers. `sections` are (title, what stands above the table, its cells).
    """
    left = ", ".join(f".first th:nth-child({i + 1}), .first td:nth-child({i + 1})" for i in words)
    more = "".join(
        f"<h2>{html.escape(name)}</h2>\n<p>{html.escape(text)}</p>\n{_table(own)}\n" for name, text, own in sections
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ overflow-wrap: anywhere }}
.wide {{ overflow-x: auto }}
img {{ max-width: 100%; min-width: {_least_width(png)}px }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }}
{left}, td:first-child, th:first-child {{ text-align: left }}
</style>
<h1>{html.escape(title)}</h1>
<p>{html.escape(lead)}</p>
<div class="wide"><img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></div>
{_table(lines, ' class="first"')}
{"".join(f"<p>{html.escape(line)}</p>" for line in below)}
{more}</html>
"""


def _least_width(png: bytes) -> int:
    """Pixels of a page below which a picture's letters, of 10 points, would be lower than 9 pixels: it is scrolled."""
    (width,) = struct.unpack(">I", png[16:20])
    return round(width * 9 / (10 / 72 * DPI))


def _table(lines: Sequence[Sequence[str]], kind: str = "") -> str:
    head, *rows = lines
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    return f'<div class="wide"><table{kind}><tr>{heads}</tr>\n{body}</table></div>'
