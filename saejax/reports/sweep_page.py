"""The result of a sweep: a table of its members, one over seeds, a picture of L0 and FVE, and a page that holds them.

Made from the content of sweep.json alone: {"name", "tokens", "tokens_per_second", "members": [row, ...], "settings": as
of `evals.seeds.over_seeds`, "choice": [line, ...]}.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saejax.core.figures import COLOURS, MARKERS, blank_figure, log_axis, panels, say_inside
from saejax.reports.paper import seeds_table, write_for_paper
from saejax.reports.table_page import Columns, Row, Table, cells, write_table_page
from saejax.runs import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INCHES = (9.0, 5.6)
# So many points carry their member's name, where there is one seed: those of several seeds lie too close.
_FEW_ENOUGH = 12

_COLUMNS: Columns = (
    ("member", "member", ""),
    ("preset", "preset", ""),
    ("d_sae", "d_sae", ",d"),
    ("k", "k", "g"),
    ("lr", "lr", "g"),
    ("seed", "seed", "d"),
    ("sparsity scale", "sparsity_scale", "g"),
    ("L0", "l0", ".1f"),
    ("FVE", "fve", ".4f"),
    ("dead", "dead_fraction", ".2%"),
    ("relative error", "relative_error", ".4f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("status", "status", ""),
)
_WORDS = (0, 1, len(_COLUMNS) - 1)
# Figures of the table over seeds; with them a table for a paper, without what is about the training.
_FIGURES: Columns = tuple(
    column for column in _COLUMNS if column[1] in ("l0", "fve", "dead_fraction", "relative_error")
)
_FOR_PAPER: Columns = (*(column for column in _COLUMNS if column[1] in ("member", "d_sae")), *_FIGURES)


def render_sweep(folder: Path, content: dict[str, Any]) -> None:
    """Write sweep.html, a page that needs no other file, and sweep.{md,png,csv,tex,svg,pdf} into `folder`."""
    each, rate = (f"{content[key]:,.0f}" for key in ("tokens", "tokens_per_second"))
    lead = f"{len(content['members'])} coders, {each} activations each, {rate} a second."
    tables, page = _tables(content), Sweep(folder).result.with_suffix(".html")
    figure = sweep_picture(content["members"], f"{content['name']}: {content['tokens']:,} activations each")
    write_table_page(page, f"Sweep {content['name']}", lead, tables, figure, "FVE over L0")
    of_paper = tables[1] if len(tables) > 1 else Table(cells(_FOR_PAPER, content["members"]))
    write_for_paper(page, content["members"], of_paper, figure)


def sweep_table(content: dict[str, Any]) -> str:
    """The members, the choice and the figures over seeds as Markdown whose columns also line up as text."""
    return "\n\n".join(table.text for table in _tables(content))


def _tables(content: dict[str, Any]) -> list[Table]:
    """The members, and where they differ in seeds the figures over these."""
    members = Table(cells(_COLUMNS, content["members"]), _WORDS, content["choice"])
    over_seeds = seeds_table(content["settings"], _FIGURES)
    return [members, *([over_seeds] if over_seeds else [])]


def sweep_picture(rows: Sequence[Row], title: str) -> "Figure":
    """FVE over L0 on held-out activations: a line for each preset, width and hook point, a marker for each seed.

    A line joins a seed's members in the order of their L0. A few members carry their names; those that failed are not
    drawn.
    """
    good = [row for row in rows if row["fve"] is not None and row["l0"] and row["l0"] > 0]
    figure = blank_figure(_INCHES)
    (axes,) = panels(figure)
    axes.set(title=title, xlabel="L0: latents a token (log scale)", ylabel="FVE: fraction of variance explained")
    if not good:
        say_inside(axes, "no member finished")
        return figure
    seeds = sorted({row["seed"] for row in good})
    of_seed = {seed: MARKERS[i % len(MARKERS)] for i, seed in enumerate(seeds)}
    families = _families(good)
    for i, (label, family) in enumerate(families.items()):
        colour, style = COLOURS[i % len(COLOURS)], "-" if i < len(COLOURS) else "--"
        axes.plot([], [], color=colour, linestyle=style, label=label)
        for seed in seeds:
            points = sorted((row["l0"], row["fve"]) for row in family if row["seed"] == seed)
            axes.plot(*zip(*points, strict=True) if points else ((), ()), marker=of_seed[seed], markersize=7,
                      color=colour, linestyle=style, linewidth=1.2, markeredgecolor="white")  # fmt: skip
    for row in good if len(good) <= _FEW_ENOUGH and len(seeds) == 1 else []:
        axes.annotate(
            row["member"], (row["l0"], row["fve"]), (6, -10), textcoords="offset points", fontsize=8, color="0.35"
        )
    log_axis(axes, [row["l0"] for row in good])
    from matplotlib.lines import Line2D

    markers = [Line2D([], [], color="0.3", linestyle="", marker=of_seed[seed], label=f"seed {seed}") for seed in seeds]
    lines = axes.get_legend_handles_labels()[0]
    axes.legend(
        handles=[*lines, *(markers if len(seeds) > 1 else [])],
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )
    return figure


def _families(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by label, which says of preset, width and hook point what is needed to tell them apart."""
    several = len({tuple(row["reads"]) for row in rows}) > 1
    families: dict[str, list[Row]] = {}
    for row in rows:
        where = f"\n{' '.join(row['reads'])}" if several else ""
        families.setdefault(f"{row['preset']}, {row['d_sae']:,} latents{where}", []).append(row)
    return families
