"""A table of facts, as a notebook shows it."""

import html
from collections.abc import Mapping, Sequence


def html_table(title: str, rows: Mapping[str, Sequence[str]], head: Sequence[str] = ()) -> str:
    """HTML of a title and one row of cells for each name; `head` is above the cells."""

    def row(name: str, cells: Sequence[str], kind: str) -> str:
        inside = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr><th>{html.escape(name)}</th>{inside}</tr>"

    lines = [row("", head, "th")] if head else []
    lines += [row(name, cells, "td") for name, cells in rows.items()]
    return f'<b>{html.escape(title)}</b><table style="text-align: left">{"".join(lines)}</table>'
