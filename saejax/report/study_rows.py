"""A table of a study as a page: the rows that a claim comes from, which links of the study's page lead to.

It needs no other file and no script. A part of the table that a link names is shown in another colour.
"""

import dataclasses
import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saejax.core.files import write_bytes
from saejax.report.page import asset


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows that a link can name.

    Attributes:
        name: of the part, one of its page.
        rows: (number of the line in the file, values) of each.
    """

    name: str
    rows: Sequence[tuple[int, Sequence[str]]]


def render_rows(path: Path, title: str, csv: str, back: str, columns: Sequence[str], parts: Sequence[Part]) -> Path:
    """Writes the page to `path` and returns it. Equal arguments give equal bytes.

    Args:
      csv, back: addresses of the file with these rows, and of the page whose links lead here.

    Raises:
      DataError: it cannot be written.
    """
    head = "".join(f"<th>{text(name)}</th>" for name in ("line", *columns))
    body = "".join(f'<tbody id="{anchor(part.name)}">{"".join(map(_row_markup, part.rows))}</tbody>' for part in parts)
    write_bytes(
        path,
        page(
            title,
            f"""<header class="masthead"><p class="eyebrow"><a href="{text(back)}">saejax study</a></p>
<h1>{text(title)}</h1>
<p class="note">{sum(len(part.rows) for part in parts):,} rows of <a href="{text(csv)}">{text(title)}</a>.</p></header>
<div class="scroll"><table class="rows"><thead><tr>{head}</tr></thead>{body}</table></div>""",
        ).encode(),
    )
    return path


def page(title: str, body: str) -> str:
    """A page of the study: its own style, no script, nothing fetched."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{text(title)}</title>
<style>{asset("page.css")}{asset("study.css")}</style></head>
<body><main id="page">
{body}
</main></body></html>
"""


def text(value: Any) -> str:
    """As HTML; letters that cannot be seen show as U+FFFD."""
    return html.escape("".join(c if c.isprintable() else "�" for c in str(value)))


def anchor(name: str) -> str:
    """An id for a name: names that differ have ids that differ."""
    return "p-" + "".join(c if c.isascii() and (c.isalnum() or c in ".-") else f"_{ord(c):x}_" for c in name)


def _row_markup(row: tuple[int, Sequence[str]]) -> str:
    cells = (f"<td>{text(value)}</td>" for value in itertools.chain([row[0]], row[1]))
    return f"<tr>{''.join(cells)}</tr>"
