"""Markdown tables."""

from collections.abc import Iterable, Sequence


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; a bar in a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(heading), "|" + "---|" * len(heading), *map(line, rows)]


def number(value: float | None, unit: float = 1.0) -> str:
    """Three digits or so, thousands apart; "not measured" where there is none."""
    if value is None:
        return "not measured"
    value = value / unit
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
