"""The reference of all keys and the table of coders, as Markdown made from the settings themselves.

    python -m saejax.app.reference

writes docs/reference.md, and the table between its marks in docs/coders.md, below the current folder.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment
from saejax.coders import RECIPES, TOPOLOGIES, CoderConfig, build
from saejax.core.settings import Setting

COMMAND = "python -m saejax.app.reference"
START, END = "<!-- coders table -->", "<!-- end -->"

_INTRODUCTION = f"""# All keys

This page is made by `{COMMAND}` from the fields of the code; change those, not this page.

A key is set in a config file as `c.coder.k = 64`, or on the command line as `--config.coder.k=64`. "Run" says whether
a key decides a run's numbers: a run cannot go on with another value of it. "Sweep" says whether the members of a sweep
may differ in it. Integers end at 2147483647 unless the range says otherwise or the key counts activations or steps.
"""


def reference() -> str:
    """Every key of an experiment, a table for each section."""
    return "\n".join([_INTRODUCTION, *_section(Experiment, "", False, True)])


def coders_table() -> str:
    """A row for each preset: its parts, the terms of its loss, where it was published."""
    rows = []
    for name, recipe in RECIPES.items():
        config = CoderConfig(preset=name).resolved()
        sites = (64, 64) if TOPOLOGIES[config.topology].stacked else 64
        terms = build(config, sites, 100).terms
        losses = " + ".join(f"`{term.name}`" for term in terms)
        paper = f"[paper]({recipe.paper})"
        rows.append((f"`{name}`", recipe.title, f"`{config.topology}`", f"`{config.sparsity}`", losses, paper))
    return _table(("preset", "what it is", "topology", "sparsity", "loss", "after"), rows)


def with_table(page: str) -> str:
    """The page with the table of coders between its marks.

    Raises:
        ValueError: it has no marks.
    """
    before, after = page.index(START) + len(START), page.index(END, page.index(START))
    return f"{page[:before]}\n{coders_table()}\n{page[after:]}"


def _section(cls: type, prefix: str, of_member: bool, decides: bool) -> Iterator[str]:
    """The table of a section's own keys, then its sections. What holds of a section holds of its keys."""
    hints, rows, below = typing.get_type_hints(cls), [], []
    for field in dataclasses.fields(cls):
        known: Setting = field.metadata["setting"]
        own, run = of_member or known.per_member, decides and known.decides
        if known.section:
            below.append(f"\n## {field.name}\n\n{known.doc}\n")
            below += _section(known.section, f"{field.name}.", own, bool(run))
            continue
        kind = _without_none(hints[field.name])
        when = f"where {run} is set" if isinstance(run, str) else _yes(run)
        range_ = _words(known.choices) if known.choices is not None else known.range()
        default = _default(field.default, known)
        rows.append((f"`{prefix}{field.name}`", _type(kind), default, range_, known.doc, when, _yes(own)))
    yield _table(("key", "type", "default", "range", "meaning", "run", "sweep"), rows)
    yield from below


def _default(value: Any, known: Setting) -> str:
    """What a key is where nobody sets it."""
    if known.base is not None:
        return f"the preset's, else `{known.base}`"
    listed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{listed}`" if listed else "empty"


def _type(kind: Any) -> str:
    name = "section" if dataclasses.is_dataclass(_item(kind)) else str(_item(kind).__name__)
    return f"list of {name}" if typing.get_origin(kind) is tuple else name


def _item(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def _without_none(hint: Any) -> Any:
    arms = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    return arms[0] if isinstance(hint, types.UnionType) else hint


def _words(choices: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in choices)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Write both pages."""
    coders = Path("docs/coders.md")
    page = coders.read_text(encoding="utf-8") if coders.is_file() else f"# Coders\n\n{START}\n{END}\n"
    coders.write_text(with_table(page), encoding="utf-8")
    Path("docs/reference.md").write_text(reference() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
