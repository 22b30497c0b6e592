"""escalation.md of a run whose gates still fail after all attempts: what was tried, figures, and what is left."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.figures import COLOURS, blank_figure, panels, png_of
from saejax.core.files import write_bytes
from saejax.reports.evaluation import failed_of
from saejax.reports.table_page import markdown
from saejax.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What could not be measured, or is further from its bar, is drawn here.
_FURTHEST = 10.0


def write_escalation(run: Run, content: Mapping[str, Any]) -> Path:
    """Write escalation.md and escalation.png into the run's folder; returns the first's path.

    Args:
        content: that of attempts.json, with `about` {name: text}, `stages` {attempt: tokens and seconds of its
            training} and `settled`: why no more was tried before the number of retries was reached, or empty.
    """
    figure = gates_picture(content["attempts"], f"{run.path.name}: gates by attempt")
    write_bytes(run.escalation.with_suffix(".png"), png_of(figure))
    write_bytes(run.escalation, _markdown(run.path.name, content).encode())
    return run.escalation


def remove_escalation(run: Run) -> None:
    """Remove what an earlier `write_escalation` left."""
    for path in (run.escalation, run.escalation.with_suffix(".png")):
        path.unlink(missing_ok=True)


def share_of_bar(gate: Mapping[str, Any]) -> float:
    """value / bar, or bar / value where a gate must exceed its bar: below 1 it passes."""
    value, bar = gate["value"], gate["bar"]
    if value is None or bar is None:
        return math.inf
    above, below = (value, bar) if gate["comparison"] == "<" else (bar, value)
    if below <= 0:  # a bar of 0 has no shares
        return 0.0 if gate["passed"] else math.inf
    return float(above / below)


def gates_picture(attempts: Sequence[Mapping[str, Any]], title: str) -> "Figure":
    """A group of bars for each gate, a bar for each attempt: `share_of_bar` on a log axis. Above the line it fails.

    What could not be measured has no bar.
    """
    figure = blank_figure((9.0, 4.5))
    (axes,) = panels(figure, grid=False)
    done = [one for one in attempts if one["gates"]]
    names = [gate["name"] for gate in done[0]["gates"]]
    wide = 0.8 / len(done)
    for i, one in enumerate(done):
        drawn = [gate for gate in one["gates"] if gate["name"] in names and not gate.get("unmeasured")]
        shares = [min(max(share_of_bar(gate), 1 / _FURTHEST), _FURTHEST) for gate in drawn]
        at = [names.index(gate["name"]) + (i - (len(done) - 1) / 2) * wide for gate in drawn]
        heights = [math.log10(share) for share in shares]
        axes.bar(at, heights, 0.9 * wide, color=COLOURS[i % len(COLOURS)], label=one["name"])
    axes.axhline(0.0, color="0.2", linewidth=1)
    axes.set_xticks(range(len(names)), names)
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_yticks([math.log10(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
    axes.set(title=title, ylabel="share of the bar: above 1 it fails", ylim=(-1.05, 1.05))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _markdown(name: str, content: Mapping[str, Any]) -> str:
    attempts = [one for one in content["attempts"] if one["gates"]]
    kept = next(one for one in attempts if one["name"] == content["kept"])
    failed = [gate for gate in kept["gates"] if gate["name"] in failed_of(kept["gates"])]
    about = ", ".join(f"{key} {value}" for key, value in content["about"].items() if value not in (None, ""))
    parts = [
        f"# {name}: gates fail after {len(attempts) - 1} {'retry' if len(attempts) == 2 else 'retries'}",
        f"{about}.",
        f"{kept['name']} is kept. {content['why']}",
        "## What was tried",
        markdown(_tried(attempts, content)),
        *([content["settled"]] if content["settled"] else []),
        "## Gates",
        markdown(_gates(attempts)),
        f"![The gates of each attempt, relative to their bars]({Path(Run.escalation).stem}.png)",
        "## What is left",
        "\n".join(
            f"- `{gate['name']}`: {gate['title']}, {_figure(gate['value'])}. {gate.get('unmeasured') or gate['advice']}"
            for gate in failed
        ),
        "Retries make no training longer and no coder wider. More tokens (train.tokens), more text (capture.tokens), a "
        "wider dictionary (coder.expansion) or another preset (coder.preset) are for you to decide. The report page of "
        "each attempt shows its curves.",
    ]
    return "\n\n".join(parts) + "\n"


def _tried(attempts: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> list[list[str]]:
    lines = [["attempt", "from", "changes", "L0", "FVE", "dead", "activations", "seconds"]]
    for one in attempts:
        changes = "; ".join(f"{c['key']} {c['before']:g} to {c['after']:g}" for c in one["changes"])
        took, metrics = content["stages"].get(one["name"], {}), one["metrics"]
        dead = metrics.get("dead_fraction")
        figures = [
            *(_figure(metrics.get(key)) for key in ("l0", "fve")),
            _figure(dead) if dead is None else f"{dead:.2%}",
        ]
        spent = [f"{took[key]:,.0f}" if key in took else "" for key in ("tokens", "seconds")]
        lines.append([one["name"], one["begins_from"], changes, *figures, *spent])
    return lines


def _gates(attempts: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    lines = [["gate", "bar", *(one["name"] for one in attempts)]]
    for gate in attempts[0]["gates"]:
        gates = [next((g for g in one["gates"] if g["name"] == gate["name"]), None) for one in attempts]
        values = ["-" if g is None else f"{_figure(g['value'])}{_word(g)}" for g in gates]
        lines.append([gate["name"], f"{gate['comparison']} {_figure(gate['bar'])}", *values])
    return lines


def _word(gate: Mapping[str, Any]) -> str:
    return " pass" if gate["passed"] else " FAIL" if failed_of([gate]) else ""


def _figure(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
