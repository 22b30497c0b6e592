"""Pages without a script: their HTML, their tables, and tables with a picture as a page, as Markdown and as a PNG.

Sweeps, dictionaries, probes, prefixes and studies end with such a page. It needs no other file.
"""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.figures import least_width, png_of
from saejax.core.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

# (heading, key of a row, format) of each column.
Columns = Sequence[tuple[str, str, str]]


class Markup(str):
    """Text that is HTML already."""


def asset(name: str) -> str:
    """A template, style sheet or script that stands beside this file."""
    return resources.files("saejax.reports").joinpath(name).read_text(encoding="utf-8")


def markup(value: Any) -> str:
    """Text as HTML, `Markup` as it is; letters that cannot be seen show as U+FFFD."""
    if isinstance(value, Markup):
        return value
    return html.escape("".join(c if c.isprintable() else "�" for c in str(value)))


def link(href: str, text: str) -> Markup:
    return Markup(f'<a href="{markup(href)}">{markup(text)}</a>')


def table_markup(lines: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    """The table of cells, the first line of them headings; columns that are not of `words` hold numbers."""

    def row(kind: str, line: Sequence[str]) -> str:
        styles = ("" if i in words else ' class="num"' for i in range(len(line)))
        cells = (f"<{kind}{style}>{markup(cell)}</{kind}>" for style, cell in zip(styles, line, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    head, body = row("th", lines[0]), "".join(row("td", line) for line in lines[1:])
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def html_page(title: str, body: str) -> str:
    """A page in the style of a run's, with no script and nothing fetched."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{markup(title)}</title>
<style>{asset("page.css")}{asset("tables.css")}</style></head>
<body><main id="page">
{body}
</main></body></html>
"""


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
        above = f'<h2>{markup(self.title)}</h2>\n<p class="lead">{markup(self.lead)}</p>\n' if self.title else ""
        table = table_markup([[" ".join(cell.split()) for cell in line] for line in self.lines], self.words)
        return f"<section>{above}{table}{''.join(map(note, self.notes))}</section>\n"


def note(text: str) -> str:
    return f'<p class="note">{markup(text)}</p>'


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
    data, width = base64.b64encode(png).decode(), least_width(png)
    return html_page(
        title,
        f"""<header class="masthead"><h1>{markup(title)}</h1><p class="lead">{markup(lead)}</p></header>
<div class="drawing"><img alt="{markup(alt)}" style="min-width: {width}px" src="data:image/png;base64,{data}"></div>
{"".join(table.markup for table in tables)}""",
    )


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
