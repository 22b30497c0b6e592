"""Tables and a picture as one page, as Markdown and as a PNG: what sweeps, dictionaries, probes and others end with."""

import base64
import dataclasses
import html
import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

# (heading, key of a row, format) of each column.
Columns = Sequence[tuple[str, str, str]]

MARKERS = "osD^vP*Xph<>"
# Okabe and Ito's colours, which are told apart also by those who see fewer.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#7f7f7f")
_DPI = 120


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        lines: cells, the first line of them headings.
        words: columns that hold words, not numbers.
        notes: paragraphs below.
        title, lead: what stands above; the first table of a page stands under the page's own.
    """

    lines: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    notes: Sequence[str] = ()
    title: str = ""
    lead: str = ""

    @property
    def text(self) -> str:
        """As Markdown."""
        above = [f"## {self.title}"] * bool(self.title) + [self.lead] * bool(self.lead)
        return "\n\n".join([*above, markdown(self.lines), *self.notes])

    @property
    def markup(self) -> str:
        """As HTML."""
        above = f"<h2>{html.escape(self.title)}</h2>\n<p>{html.escape(self.lead)}</p>\n" if self.title else ""
        head, *rows = (
            "".join(f"<{kind}{' class=word' * (i in self.words)}>{html.escape(cell)}</{kind}>" for i, cell in pairs)
            for kind, pairs in zip(["th"] + ["td"] * len(self.lines), map(enumerate, self.lines), strict=False)
        )
        body = "".join(f"<tr>{row}</tr>\n" for row in rows)
        notes = "".join(f"<p>{html.escape(line)}</p>\n" for line in self.notes)
        return f'{above}<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>\n{notes}'


def write_table_page(path: Path, title: str, lead: str, tables: Sequence[Table], figure: "Figure", alt: str) -> str:
    """Write a page to `path`, and beside it its text (.md) and its picture (.png); returns the text below the title.

    Raises:
        DataError: they cannot be written.
    """
    png, text = png_of(figure), "\n\n".join([lead, *(table.text for table in tables)])
    write_bytes(path.with_suffix(".png"), png)
    write_bytes(path.with_suffix(".md"), f"# {title}\n\n{text}\n".encode())
    write_bytes(path, table_page(title, lead, tables, png, alt).encode())
    return text


def table_page(title: str, lead: str, tables: Sequence[Table], png: bytes, alt: str) -> str:
    """One HTML file that needs no other: the picture and the tables."""
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
.word {{ text-align: left }}
</style>
<h1>{html.escape(title)}</h1>
<p>{html.escape(lead)}</p>
<div class="wide"><img alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></div>
{"".join(table.markup for table in tables)}</html>
"""


def cells(columns: Columns, rows: Sequence[Row]) -> list[list[str]]:
    """Headings, then a line for each row; what a row does not say is empty."""
    lines = [["" if row.get(key) is None else format(row[key], form) for _, key, form in columns] for row in rows]
    return [[heading for heading, _, _ in columns], *lines]


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """The cells as a Markdown table whose columns also line up as text."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(lines[0]))]
    drawn = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([drawn[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *drawn[1:]])


def with_interval(value: float, ends: Sequence[float | None] | None, form: str) -> str:
    """A figure, and the ends of its interval in brackets where it has one."""
    if not ends or None in ends:
        return f"{value:{form}}"
    return f"{value:{form}} ({ends[0]:{form}} to {ends[1]:{form}})"


def blank_figure(inches: tuple[float, float]) -> "Figure":
    """A figure without a window. Only here is matplotlib imported: it takes longer than most commands need to start."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(figure: "Figure", count: int = 1, grid: bool = True) -> list["Axes"]:
    """Axes side by side."""
    side_by_side: list[Axes] = figure.subplots(1, count, squeeze=False)[0].tolist()
    for axes in side_by_side:
        axes.grid(grid, color="0.9") if grid else None
        axes.spines[["top", "right"]].set_visible(False)
    return side_by_side


def say_inside(axes: "Axes", text: str) -> None:
    """Write a line into the middle of a panel that shows nothing."""
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)


def log_axis(axes: "Axes", l0: Sequence[float]) -> None:
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


def png_of(figure: "Figure") -> bytes:
    with io.BytesIO() as buffer:
        figure.savefig(buffer, dpi=_DPI, format="png")
        return buffer.getvalue()


def _least_width(png: bytes) -> int:
    """Pixels of a page below which a picture's letters, of 10 points, would be lower than 9 pixels: it is scrolled."""
    (width,) = struct.unpack(">I", png[16:20])
    return round(width * 9 / (10 / 72 * _DPI))
