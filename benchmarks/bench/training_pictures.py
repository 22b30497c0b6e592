"""The pictures of train steps: how many times the faster peer, and how the time grows."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.bench.frame import Result
from benchmarks.bench.training_result import PEERS, chain, faster_peer, seconds

# Of Okabe and Ito, as in benchmarks/quality.
COLOURS = {"saejax": "#0072b2", "saelens": "#d55e00", "dictionary_learning": "#009e73"}
LABELS = {"saejax": "saejax", "saelens": "SAELens", "dictionary_learning": "dictionary_learning"}
_AXES = {"d_sae": "latents", "batch": "tokens in a batch", "k": "k"}


def write(rows: list[Result], folder: Path) -> dict[str, str]:
    """{file in `folder`: its title} of the pictures that there are results for."""
    made = {}
    compared = [r for r in rows if faster_peer(r)]
    if compared:
        _ratios(compared).savefig(folder / "ratios.png", dpi=110)
        made["ratios.png"] = "Seconds of a step: each peer's over ours"
    if any(len(chain(rows, axis)) > 1 for axis in _AXES):
        _growth(rows).savefig(folder / "growth.png", dpi=110)
        made["growth.png"] = "Milliseconds of a TopK step over width, batch and k"
    return made


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)


def _ratios(rows: list[Result]) -> Figure:
    """A row for each row: a dot for each peer, at its seconds over ours."""
    figure = _figure(9, 1.6 + 0.26 * len(rows))
    axes = figure.subplots()
    for name in PEERS:
        points = [
            ((seconds(r, name) or 0) / (seconds(r) or 1), y) for y, r in enumerate(rows) if seconds(r, name) is not None
        ]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, "o", color=COLOURS[name], label=f"{LABELS[name]} / saejax")
    axes.axvline(1, color="0.4", linewidth=1)
    axes.axvline(4, color="0.4", linewidth=1, linestyle=":")
    axes.text(4, -0.8, "the aim of topk and batchtopk", ha="center", va="bottom", color="0.4", fontsize=8)
    axes.set_yticks(range(len(rows)), [r["row"] for r in rows])
    axes.set_ylim(len(rows) - 0.5, -1)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of a step over saejax's: right of 1 saejax is faster")
    _plain(axes)
    axes.legend(frameon=False, loc="lower right")
    return figure


def _growth(rows: list[Result]) -> Figure:
    """Milliseconds over each axis, log by log: a slope of 1 is a doubling for a doubling."""
    figure = _figure(12, 4)
    for axes, (axis, label) in zip(figure.subplots(1, 3, sharey=True), _AXES.items(), strict=True):
        there = chain(rows, axis)
        for name, colour in COLOURS.items():
            points = [r for r in there if seconds(r, name) is not None]
            ms = [1000 * (seconds(r, name) or 0) for r in points]
            axes.plot([r["about"][axis] for r in points], ms, marker="o", color=colour, label=LABELS[name])
        floor = [1000 * (r["floor"]["products"] + r["floor"]["adam"]) for r in there]
        at = [r["about"][axis] for r in there]
        axes.plot(at, floor, linestyle="--", color="0.4", label="floor")
        axes.set(xscale="log", yscale="log", xlabel=f"{label} (log scale)")
        axes.set_xticks(at, [f"{value:,}" for value in at])
        axes.minorticks_off()
        _plain(axes)
        others = {"d_sae": "batch 2,048, k 32", "batch": "6,144 latents, k 32", "k": "6,144 latents, batch 2,048"}
        if not there or not there[0]["row"].startswith("gpu-"):
            axes.set_title(others[axis], fontsize=10)
    figure.axes[0].set_ylabel("ms of a topk step (log scale)")
    figure.axes[0].legend(frameon=False)
    return figure
