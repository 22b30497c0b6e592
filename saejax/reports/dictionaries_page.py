"""Dictionaries from anywhere, evaluated on one text: one table, one picture, and a page that holds both.

Made from rows: {"name", "source", "coder", "reads", "writes", "d_sae", "metrics", "gates", "notes"} and, of evaluations
that have them, "intervals"; and of those that could not be evaluated {"name", "source", "error"}.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.figures import COLOURS, MARKERS, blank_figure, log_axis, panels, say_inside
from saejax.reports.evaluation import counted
from saejax.reports.paper import seeds_table, write_for_paper
from saejax.reports.table_page import Columns, Row, Table, cells, write_table_page
from saejax.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS: Columns = (
    ("dictionary", "name", ""),
    ("L0", "l0", ".1f"),
    ("L0 with sinks", "l0_with_sinks", ".1f"),
    ("FVE", "fve", ".4f"),
    ("95 %", "fve_interval", ""),
    ("FVE with sinks", "fve_with_sinks", ".4f"),
    ("loss recovered", "loss_recovered", ".4f"),
    ("95 %", "loss_recovered_interval", ""),
    ("loss recovered with sinks", "loss_recovered_with_sinks", ".4f"),
    ("loss recovered in turn", "loss_recovered_in_turn", ".4f"),
    ("sinks", "sinks", ".2%"),
    ("CE", "ce_sae", ".4f"),
    ("KL", "kl", ".4f"),
    ("dead", "dead_fraction", ".2%"),
    ("d_sae", "d_sae", ",d"),
    ("coder", "coder", ""),
    ("hook point", "at", ""),
    ("gates", "gates", ""),
    ("notes", "notes", ""),
)
_WORDS = ("name", "coder", "at", "gates", "notes")
# Figures of the table over seeds, and all columns of one for a paper.
_OVER_SEEDS = ("l0", "fve", "loss_recovered", "dead_fraction")
_FOR_PAPER = ("name", "d_sae", *_OVER_SEEDS, "fve_interval", "loss_recovered_interval")
# (metric, what its axis says): the panels of the picture.
_PANELS = (
    ("fve", "FVE: fraction of variance explained"),
    ("loss_recovered", "loss recovered"),
    ("dead_fraction", "dead: latents that never fired"),
)
_INCHES = (13.5, 5.6)
# So many points carry their names.
_MOST_NAMED = 24


def render_dictionaries(
    folder: Path,
    title: str,
    lead: str,
    rows: Sequence[dict[str, Any]],
    sections: Sequence[dict[str, Any]] = (),
    settings: Sequence[dict[str, Any]] = (),
) -> str:
    """Write table.html, which needs no other file, and table.{md,png,csv,tex,svg,pdf} into `folder`; returns the text.

    Args:
        sections: more tables: {"title", "lead", "columns": as of `cells`, "rows"}.
        settings: figures over seeds, as of `evals.seeds.over_seeds`.
    """
    rows = [_flat_row(row) for row in rows]
    if len({row["at"] for row in rows if "at" in row}) > 1:
        lead += " They are at different hook points, where the same FVE or loss recovered does not mean the same."
    errors = [f"{row['name']}: {row['error']}" for row in rows if "error" in row]
    columns = _shown(rows)
    words = tuple(i for i, (_, key, _) in enumerate(columns) if key in _WORDS)
    over_seeds = seeds_table(settings, [column for column in _COLUMNS if column[1] in _OVER_SEEDS])
    tables = [
        Table(cells(columns, rows), words, errors),
        *([over_seeds] if over_seeds else []),
        *(Table(cells(s["columns"], s["rows"]), title=s["title"], lead=s["lead"]) for s in sections),
    ]
    path = Run(folder).table.with_suffix(".html")
    figure = _over_l0(rows, title)
    of_paper = over_seeds or Table(cells([column for column in _COLUMNS if column[1] in _FOR_PAPER], rows))
    write_for_paper(path, [_numbers(row) for row in rows], of_paper, figure)
    return write_table_page(path, title, lead, tables, figure, "FVE over L0")


def _numbers(row: Row) -> dict[str, Any]:
    """A flat row with the ends of its intervals as numbers: fve_low, fve_high."""
    numbers = {key: value for key, value in row.items() if not key.endswith(("_interval", "_ends"))}
    for key in (key for key in row if key.endswith("_ends")):
        numbers |= dict(zip((key.replace("_ends", "_low"), key.replace("_ends", "_high")), row[key], strict=True))
    return numbers


def _shown(rows: Sequence[Row]) -> Columns:
    """The columns; those about sinks where a row has some."""
    return [column for column in _COLUMNS if "sinks" not in column[1] or any(column[1] in row for row in rows)]


def _flat_row(row: Row) -> dict[str, Any]:
    """A row as the columns name its parts."""
    if "error" in row:
        return {"name": row["name"], "notes": "not evaluated, see below", "error": row["error"]}
    reads, writes = (", ".join(row[key]) for key in ("reads", "writes"))
    intervals = {metric: ends for metric, ends in (row.get("intervals") or {}).items() if ends}
    return {
        **{key: value for key, value in row["metrics"].items() if value is not None},
        **{f"{m}_interval": f"{ends[0]:.4f} to {ends[1]:.4f}" for m, ends in intervals.items()},
        **{f"{m}_ends": ends for m, ends in intervals.items()},
        **{key: row[key] for key in ("name", "d_sae", "coder")},
        "at": reads if reads == writes else f"{reads} -> {writes}",
        "gates": counted(row["gates"]),
        "notes": "; ".join(row["notes"]),
    }


def _over_l0(rows: Sequence[Row], title: str) -> "Figure":
    """FVE, loss recovered and dead latents over L0: a point for each dictionary, a colour for each kind and place."""
    good = [row for row in rows if row.get("l0")]
    figure = blank_figure(_INCHES)
    figure.suptitle(title, parse_math=False)
    families = list(dict.fromkeys((row["coder"], row["at"]) for row in good))
    side_by_side = panels(figure, len(_PANELS))
    for axes, (metric, label) in zip(side_by_side, _PANELS, strict=True):
        axes.set(xlabel="L0: latents a token (log scale)", ylabel=label)
        for (coder, at), colour, marker in zip(families, itertools.cycle(COLOURS), itertools.cycle(MARKERS)):
            members = [row for row in good if (row["coder"], row["at"]) == (coder, at) and metric in row]
            points = [(row["l0"], row[metric]) for row in members]
            axes.plot(*zip(*points, strict=True) if points else ((), ()), marker, color=colour, markersize=8,
                      markeredgecolor="white", label=f"{coder}, {at}")  # fmt: skip
            ends = [(row["l0"], *row[f"{metric}_ends"]) for row in members if f"{metric}_ends" in row]
            axes.vlines(*zip(*ends, strict=True) if ends else ((), (), ()), color=colour, linewidth=1.2)
        if not any(metric in row for row in good):
            say_inside(axes, "not measured")
        if good:
            log_axis(axes, [row["l0"] for row in good])
        axes.margins(y=0.12)  # for names below the lowest point
    if families:
        handles, labels = side_by_side[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False)
    if len(good) <= _MOST_NAMED:
        figure.draw_without_rendering()  # where a name has room is known once the panels have their places
        for axes, (metric, _) in zip(side_by_side, _PANELS, strict=True):
            _label_points(axes, [row for row in good if metric in row], metric)
    return figure


def _label_points(axes: Any, rows: Sequence[Row], metric: str) -> None:
    """Writes the names beside the points, towards the middle, and moves those down that would lie on another."""
    taken: list[Any] = []
    for row in sorted(rows, key=lambda row: -row[metric]):
        at = (row["l0"], row[metric])
        left = axes.transAxes.inverted().transform(axes.transData.transform(at))[0] < 0.5
        aside, down = 8 if left else -8, 0.0
        text = axes.annotate(row["name"], at, (aside, 0), textcoords="offset points", fontsize=8, color="0.35",
                             va="center", ha="left" if left else "right", in_layout=False)  # fmt: skip
        box = text.get_window_extent()
        while any(box.translated(0, -down).overlaps(other) for other in taken):
            down += box.height / 4
        text.set_position((aside, -down * 72 / axes.figure.dpi))
        taken.append(box.translated(0, -down))
