"""RESULTS.md from the JSON: machine, figures to reach, the sections' tables, what is missing, and remarks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.frame import Result, Section, read
from benchmarks.bench.markdown import number, table

REMARKS = Path(__file__).with_name("remarks.md")


def write(sections: Sequence[Section], results: Path, page: Path) -> None:
    """Writes `page`, and the pictures into the folder of the results."""
    document = read(results)
    text = "\n".join(lines(sections, document, results.parent)) + "\n"
    if page.parent == results.parent:  # a page of its own, beside its pictures
        text = text.replace("](bench/", "](")
    page.write_text(text, encoding="utf-8")


def lines(sections: Sequence[Section], document: dict[str, Any], folder: Path) -> list[str]:
    about, results = document["about"], document["results"]
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    days = sorted({r["measured"][:10] for r in results})
    # A later run of other rows keeps those that are there.
    written = about.get("command") or "python -m benchmarks.bench"
    commands = dict.fromkeys([*(r.get("command") or written for r in results), *([] if results else [written])])
    found = [
        "# Side by side",
        "",
        f"Written by {' and '.join(f'`{command}`' for command in commands)}; do not edit. `make bench` measures anew.",
        "",
        f"Machine: {about.get('machine', 'unknown')}; {versions}. Measured {' to '.join(days[:1] + days[1:][-1:])}; "
        f"processes that wanted to run before it began: {about.get('load', 'unknown')}.",
    ]
    if any(r.get("quick") for r in results):
        names = ", ".join(r["row"] for r in results if r.get("quick"))
        found += ["", f"In few rounds, with --quick: {names}."]
    found += ["", "## Figures to reach", "", *_figures(figures_of(sections, results))]
    for section in sections:
        own = [r for r in results if r["section"] == section.NAME]
        if body := section.page([r for r in own if "left_out" not in r and "failed" not in r], folder):
            found += ["", f"## {section.TITLE}", "", *body]
    found += _missing(results)
    if REMARKS.exists():
        found += ["", REMARKS.read_text(encoding="utf-8").strip()]
    return found


def figures_of(sections: Iterable[Section], results: Sequence[Result]) -> list[dict[str, Any]]:
    """All figures that have an aim: those in the results, and those that a section finds over its results."""
    found = [{"row": r["row"], **figure} for r in results for figure in r.get("figures", ())]
    for section in sections:
        if over := getattr(section, "figures", None):
            found += over([r for r in results if r["section"] == section.NAME])
    return found


def reached(figure: dict[str, Any]) -> bool:
    above = figure["value"] >= figure["aim"]
    return above if figure["better"] == "more" else not above or figure["value"] == figure["aim"]


def _figures(figures: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each kind of figure: in how many rows it was reached, and each row that missed it."""
    kinds: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for figure in figures:
        kinds.setdefault((figure["what"], figure["aim"], figure["better"]), []).append(figure)
    rows = []
    for (what, aim, better), there in kinds.items():
        missed = sorted((f for f in there if not reached(f)), key=lambda f: f["value"], reverse=better == "less")
        values = sorted(f["value"] for f in there)
        rows.append(
            [
                what,
                f"at {'least' if better == 'more' else 'most'} {number(aim)}",
                f"{number(values[0])} to {number(values[-1])}" if len(values) > 1 else number(values[0]),
                f"{len(there) - len(missed)} of {len(there)}",
                ", ".join(f"{f['row']} {number(f['value'])}" for f in missed) or "none",
            ]
        )
    return (
        table(("figure", "aim", "measured", "reached in", "missed in"), rows)
        if rows
        else ["No row that has an aim was measured."]
    )


def _missing(results: Sequence[Result]) -> list[str]:
    found = [f"- {r['row']}: left out, {r['left_out']}." for r in results if "left_out" in r]
    found += [f"- {r['row']}: failed, {r['failed']}" for r in results if "failed" in r]
    for r in results:
        for name, said in r.get("contestants", {}).items():
            if "failed" in said:
                found.append(f"- {r['row']}, {name}: {said['failed']}")
    return ["", "## Not measured", "", *found] if found else []
