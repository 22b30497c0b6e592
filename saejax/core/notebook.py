"""Tables of facts and whole pages, as a notebook shows them."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path


def html_frame(page: Path) -> str:
    """HTML of a page that needs no other file, in a frame of its own."""
    content = html.escape(page.read_text(encoding="utf-8"))
    return f'<iframe srcdoc="{content}" style="width: 100%; height: 640px; border: 0"></iframe>'


def html_table(title: str, rows: Mapping[str, Sequence[str]], head: Sequence[str] = ()) -> str:
    """HTML of a title and one row of cells for each name; `head` is above the cells."""

    def row(name: str, cells: Sequence[str], kind: str) -> str:
        inside = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr><th>{html.escape(name)}</th>{inside}</tr>"

    lines = [row("", head, "th")] if head else []
    lines += [row(name, cells, "td") for name, cells in rows.items()]
    return f'<b>{html.escape(title)}</b><table style="text-align: left">{"".join(lines)}</table>'
