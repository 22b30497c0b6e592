"""The page of a study: behaviours, graphs, what groups of features cause, and what the graphs had predicted.

Made from plain data alone (`saejax.study.summary`); it needs no other file, and no script. Each claim names the lines
of the table that it comes from.
"""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.report.page import asset, write

_WIDTH, _ROW, _LEFT = 640, 26, 90


def render_study(path: Path, content: Mapping[str, Any]) -> Path:
    """Writes the page to `path` and returns it. Equal content gives equal bytes.

    Args:
      content: {"name", "model", "dictionaries": [text], "figures": {name: text}, "behaviours": [...]}.

    Raises:
      DataError: it cannot be written.
    """
    title = f"{content['name']} · saejax study"
    parts = "".join(map(_behaviour, content["behaviours"]))
    links = "".join(f'<a href="#{_id(b["name"])}">{_t(b["name"])}</a>' for b in content["behaviours"])
    facts = {"model": content["model"], "dictionaries": ", ".join(content["dictionaries"])} | dict(content["figures"])
    return write(
        path,
        f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_t(title)}</title>
<style>{asset("page.css")}{asset("study.css")}</style></head>
<body><main id="page">
<header class="masthead"><p class="eyebrow">saejax study</p><h1>{_t(content["name"])}</h1>
<dl class="facts">{"".join(f"<div><dt>{_t(k)}</dt><dd>{_t(v)}</dd></div>" for k, v in facts.items())}</dl></header>
<nav class="contents" aria-label="Behaviours">{links}</nav>
{parts}
</main></body></html>
""",
    )


def _behaviour(b: Mapping[str, Any]) -> str:
    name, example, test = b["name"], b["example"], b["baseline"]["test"]
    stands = [group for group in b["groups"] if group["stands"]]
    draws = b["groups"][0]["control"]["draws"] if b["groups"] else 0
    largest = max(stands, key=lambda group: abs(group["ablate"]["mean"]), default=None)
    if largest is None:
        verdict = f"None of {len(b['groups'])} groups of features does more than its controls."
    else:
        effect = largest["ablate"]
        verdict = (
            f"{len(stands)} of {len(b['groups'])} groups do more than their controls. Without {largest['name']} "
            f"the logit difference changes by {_n(effect['mean'])} of {_n(test['clean'])}, 95 % interval "
            f"{_n(effect['low'])} to {_n(effect['high'])}; random groups change it by {_n(largest['control']['mean'])}."
        )
    return f"""
<section id="{_id(name)}"><h2>{_t(name)}: {_t(b["about"])}</h2>
<p class="lead">{_t(verdict)}</p>
<h3>Does the model do it?</h3>
<p class="lead">After <code>{_t(_line(example["clean"]))}</code> it should prefer
<code>{_t(example["right"])}</code>, after <code>{_t(_line(example["corrupt"]))}</code>
<code>{_t(example["wrong"])}</code>.</p>
{_baseline(b)}
<h3>Which features lead there</h3>
{_graphs(b)}{_features(b)}
<h3>What happens without them</h3>
<p class="lead">Change of the logit difference on {test["pairs"]} other prompts when a group is set to 0, with its 95 %
interval over prompts. Grey: the range of {draws} random groups of the same layer that fire as much.</p>
{_effects(b)}{_patches(b)}
<h3>Prediction and effect</h3>
{_prediction(b)}
<h3>What is not explained</h3>
<p class="lead">{_t(b["unexplained"])}</p>
</section>"""


def _baseline(b: Mapping[str, Any]) -> str:
    rows = [
        (split, str(s["pairs"]), f"{s['accuracy']:.0%}", _n(s["clean"]), _n(s["corrupt"]), f"{s['p_right']:.2f}",
         _source("baseline.csv", s["lines"]))
        for split, s in b["baseline"].items()
    ]  # fmt: skip
    heads = (
        "pairs of",
        "number",
        "right in both",
        "difference, clean",
        "difference, corrupt",
        "p(right), clean",
        "rows",
    )
    return _table(heads, rows, words=(0, 6))


def _graphs(b: Mapping[str, Any]) -> str:
    rows = [
        (_link(g["href"], _line(g["prompt"])), str(g["features"]), f"{g['replacement']:.2f}",
         f"{g['completeness']:.2f}")
        for g in b["graphs"]
    ]  # fmt: skip
    return _table(("graph of", "features", "replacement score", "completeness score"), rows, words=(0,))


def _features(b: Mapping[str, Any]) -> str:
    rows = [
        (f"L{f['layer']}", str(f["latent"]), f"{f['share']:.1%}", f"{f['prompts']} of {len(b['graphs'])}",
         _n(f["activation"]), f["fires_on"])
        for f in b["features"]
    ]  # fmt: skip
    heads = ("layer", "feature", "share of influence", "graphs", "activation", "fires on")
    return _table(heads, rows, words=(0, 5)) + _note(f"All of them: features.{b['name']}.csv")


def _effects(b: Mapping[str, Any]) -> str:
    """A line for each group: the effect with its interval, over the range of its controls."""
    groups = b["groups"]
    shown = (("ablate", "low"), ("ablate", "high"), ("control", "least"), ("control", "most"))
    numbers = [group[part][key] for group in groups for part, key in shown]
    at, ticks = _scale([*numbers, 0.0], _LEFT, _WIDTH - 20)
    height = _ROW * len(groups) + 34
    drawn = []
    for i, g in enumerate(groups):
        y = _ROW * i + _ROW / 2
        effect, control = g["ablate"], g["control"]
        kind = "stands" if g["stands"] else "falls"
        drawn.append(
            f'<text x="{_LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{_t(g["name"])}</text>'
            f'<rect class="control" x="{at(control["least"]):.1f}" y="{y - 6:.1f}" height="12" rx="3" '
            f'width="{max(1.0, at(control["most"]) - at(control["least"])):.1f}"/>'
            f'<line class="{kind}" x1="{at(effect["low"]):.1f}" x2="{at(effect["high"]):.1f}" y1="{y}" y2="{y}"/>'
            f'<circle class="{kind}" cx="{at(effect["mean"]):.1f}" cy="{y}" r="4.5"/>'
        )
    chart = _svg(height, ticks, at, "".join(drawn), f"Effect of each group of {b['name']}, beside its controls")
    rows = [
        (g["name"], _Markup("<br>".join(map(str, g["latents"]))), _interval(g["ablate"]), _n(g["control"]["mean"]),
         f"{g['control']['as_large']:.0%}", "yes" if g["stands"] else "no", _interval(g["resample"]),
         _source(f"effects.{b['name']}.csv", g["lines"]["ablate"]))
        for g in groups
    ]  # fmt: skip
    heads = ("group", "features", "without it", "controls", "as large", "more than controls", "resampled", "lines")
    return chart + _table(heads, rows, words=(0, 1, 5, 7))


def _patches(b: Mapping[str, Any]) -> str:
    if not b["groups"]:
        return ""
    positions = range(len(b["groups"][0]["patch"]))
    heads = ("patched at", *("the last token" if i == 0 else f"last but {i}" for i in positions), "lines")
    rows = [
        (g["name"], *(f"{p['share']:.0%}" for p in g["patch"]),
         _source(f"effects.{b['name']}.csv", g["lines"]["patch"]))
        for g in b["groups"]
    ]  # fmt: skip
    note = "Share of the way from the clean to the corrupt answer, when a group gets its values of the corrupt prompt."
    return _note(note) + _table(heads, rows, words=(0, len(heads) - 1))


def _prediction(b: Mapping[str, Any]) -> str:
    p = b["prediction"]
    points = p["points"]
    lead = (
        f"{p['n']} single features taken away where they stand, in the prompts of the graphs. Rank correlation "
        f"(Spearman) of what the graph says and what the model does: {p['spearman']:.2f}. "
    )
    x, ticks = _scale([*(q[0] for q in points), 0.0], _LEFT, _WIDTH - 20)
    y, levels = _scale([*(q[1] for q in points), 0.0], 300, 16)
    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{_n(v)}</text>'
        for v in levels
    )
    dots = "".join(
        f'<circle class="stands" cx="{x(q[0]):.1f}" cy="{y(q[1]):.1f}" r="4"><title>{_t(q[2])}: predicted {_n(q[0])}, '
        f"measured {_n(q[1])}</title></circle>"
        for q in points
    )
    chart = _svg(334, ticks, x, grid + dots, "Measured effects over predicted ones")
    return f'<p class="lead">{_t(lead)}{_source("singles." + b["name"] + ".csv", p["lines"])}</p>{chart}' + _note(
        "Across: predicted by the graph. Up: measured."
    )


def _svg(height: float, ticks: Sequence[float], at: Any, inside: str, label: str) -> str:
    bottom = height - 24
    axis = "".join(
        f'<line class="{"zero" if v == 0 else "grid"}" x1="{at(v):.1f}" x2="{at(v):.1f}" y1="0" y2="{bottom}"/>'
        f'<text x="{at(v):.1f}" y="{height - 8}" text-anchor="middle">{_n(v)}</text>'
        for v in ticks
    )
    box = f'viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg class="study" {box} role="img" aria-label="{_t(label)}">{axis}{inside}</svg>'


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


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    def cell(kind: str, i: int, text: str) -> str:
        own = "" if i in words else ' class="num"'
        return f"<{kind}{own}>{text if isinstance(text, _Markup) else _t(text)}</{kind}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _interval(of: Mapping[str, float]) -> str:
    return f"{_n(of['mean'])} ({_n(of['low'])} to {_n(of['high'])})"


def _source(file: str, lines: Sequence[int]) -> "_Markup":
    return _Markup(f"{_link(file, file)} {lines[0]} to {lines[1]}")


def _link(href: str, text: str) -> "_Markup":
    return _Markup(f'<a href="{_t(href)}">{_t(text)}</a>')


class _Markup(str):
    """Text that is HTML already."""


def _note(text: str) -> str:
    return f'<p class="note">{_t(text)}</p>'


def _line(text: str) -> str:
    """A prompt in one line: its line breaks are shown."""
    return text.replace("\n", "⏎")


def _n(value: float) -> str:
    return f"{value:.3g}".replace("-", "−") if math.isfinite(value) else "none"


def _t(text: Any) -> str:
    return html.escape("".join(c if c.isprintable() else "�" for c in str(text)))


def _id(name: str) -> str:
    return "b-" + "".join(c if c.isalnum() else "-" for c in name)
