"""The charts of a study's page, as SVG without a script: effects beside their controls, effects over predictions."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from saejax.reports.table_page import markup

_WIDTH, _ROW, _LEFT = 640, 26, 90


def effects_chart(groups: Sequence[Mapping[str, Any]], label: str) -> str:
    """A line for each group: the effect with its interval, over the range of its controls."""
    shown = (("ablate", "low"), ("ablate", "high"), ("control", "least"), ("control", "most"))
    drawn = [(i, g) for i, g in enumerate(groups) if None not in [g[part][key] for part, key in shown]]
    numbers = [group[part][key] for _, group in drawn for part, key in shown]
    at, ticks = _scale([*numbers, 0.0], _LEFT, _WIDTH - 20)
    marks = []
    for i, g in drawn:
        y = _ROW * i + _ROW / 2
        effect, control = g["ablate"], g["control"]
        kind = "stands" if g["stands"] else "falls"
        tip = f"{g['name']}: {interval(effect)}; controls {number(control['least'])} to {number(control['most'])}"
        marks.append(
            f"<g><title>{markup(tip)}</title>"
            f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{markup(g["name"])}</text>'
            f'<rect class="control" x="{at(control["least"]):.1f}" y="{y - 6:.1f}" height="12" rx="3" '
            f'width="{max(1.0, at(control["most"]) - at(control["least"])):.1f}"/>'
            f'<line class="{kind}" x1="{at(effect["low"]):.1f}" x2="{at(effect["high"]):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="{kind}" cx="{at(effect["mean"]):.1f}" cy="{y}" r="4.5"/></g>'
        )
    return _svg(_ROW * len(groups) + 34, ticks, at, "".join(marks), label)


def points_chart(rows: Sequence[Sequence[Any]]) -> str:
    """[predicted, measured, name] of single features, a point each."""
    points = [q for q in rows if None not in q]
    x, ticks = _scale([*(q[0] for q in points), 0.0], _LEFT, _WIDTH - 20)
    y, levels = _scale([*(q[1] for q in points), 0.0], 300, 16)
    grid = "".join(
        f'<line class="{"zero" if v == 0 else "grid"}" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(v):.1f}" '
        f'y2="{y(v):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{number(v)}</text>'
        for v in levels
    )
    dots = "".join(
        f'<circle class="stands point" cx="{x(q[0]):.1f}" cy="{y(q[1]):.1f}" r="4"><title>{markup(q[2])}: predicted '
        f"{number(q[0])}, measured {number(q[1])}</title></circle>"
        for q in points
    )
    names = (
        f'<text x="{(_LEFT + _WIDTH - 20) / 2}" y="350" text-anchor="middle">predicted by the graph</text>'
        '<text transform="translate(14 158) rotate(-90)" text-anchor="middle">measured</text>'
    )
    return _svg(358, ticks, x, grid + dots + names, "Measured effects over predicted ones", 334)


def number(value: float | None) -> str:
    """Three digits; "none" where it is not finite."""
    return "none" if value is None else f"{value:.3g}".replace("-", "−")


def interval(of: Mapping[str, float]) -> str:
    """A mean with its interval."""
    return f"{number(of['mean'])} ({number(of['low'])} to {number(of['high'])})"


def _svg(height: float, ticks: Sequence[float], at: Any, inside: str, label: str, axis_at: float = 0) -> str:
    """A chart whose numbers stand `axis_at`, or at its lower end."""
    bottom = (axis_at or height) - 24
    axis = "".join(
        f'<line class="{"zero" if v == 0 else "grid"}" x1="{at(v):.1f}" x2="{at(v):.1f}" y1="0" y2="{bottom}"/>'
        f'<text x="{at(v):.1f}" y="{bottom + 16}" text-anchor="middle">{number(v)}</text>'
        for v in ticks
    )
    box = f'viewBox="0 0 {_WIDTH} {height}"'
    drawing = f'<svg class="study" {box} role="img" aria-label="{markup(label)}">{axis}{inside}</svg>'
    return f'<div class="drawing">{drawing}</div>'


def _scale(values: Sequence[float], start: float, stop: float) -> tuple[Any, list[float]]:
    """(number -> place, round numbers within)."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1, high + 1
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step = next(step * m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= 7)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    ticks = [round(low + i * step, 10) for i in range(round((high - low) / step) + 1)]
    return (lambda value: start + (value - low) / (high - low) * (stop - start)), [t + 0.0 for t in ticks]
