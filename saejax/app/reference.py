"""The reference of all keys and the tables of coders and formats, as Markdown made from the code itself.

    python -m saejax.app.reference

writes docs/reference.md, and the tables between their marks in docs/coders.md and docs/formats.md, below the current
folder.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment
from saejax.coders import RECIPES, TOPOLOGIES, CoderConfig, build
from saejax.core.settings import Setting
from saejax.interop import format_table
from saejax.trained import Kind

COMMAND = "python -m saejax.app.reference"
END = "<!-- end -->"

_INTRODUCTION = f"""# All keys

This page is made by `{COMMAND}` from the fields of the code; change those, not this page.

A key is set in a config file as `c.coder.k = 64`, or on the command line as `--config.coder.k=64`. "Run" says whether
a key decides a run's numbers: a run cannot go on with another value of it. "Sweep" says whether the members of a sweep
may differ in it. Integers end at 2147483647 unless the range says otherwise or the key counts activations or steps.
"""


def reference() -> str:
    """Every key of an experiment, a table for each section."""
    return "\n".join([_INTRODUCTION, *_tables()])


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


def formats_table() -> str:
    """A row for each format of dictionaries: its files, what is read, what is written."""
    rows = [("saejax", "`saejax`", "coder.safetensors, saejax.json", "all", "all")]
    for form, cells in format_table():
        read, written = ([kind for kind, cell in cells.items() if holds(cell)] for holds in (_is_read, _is_written))
        rows.append((form.title, f"`{form.name}`", form.files, _kinds(read), _kinds(written)))
    return _table(("project", "format", "files", "in", "out"), rows)


def _is_read(cell: tuple[bool, str]) -> bool:
    return cell[0]


def _is_written(cell: tuple[bool, str]) -> bool:
    return not cell[1]


def _kinds(kinds: Iterable[Kind]) -> str:
    """topology: sparsities; topologies that share their sparsities together."""
    of: dict[str, list[str]] = {}
    for topology, sparsity in kinds:
        of.setdefault(topology, []).append(sparsity)
    alike: dict[str, list[str]] = {}
    for topology, sparsities in of.items():
        alike.setdefault(", ".join(sparsities), []).append(topology)
    return "; ".join(f"{', '.join(topologies)}: {sparsities}" for sparsities, topologies in alike.items()) or "no"


# The pages with a table between marks.
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/coders.md": ("<!-- coders table -->", coders_table),
    "docs/formats.md": ("<!-- formats table -->", formats_table),
}


def with_table(page: str, start: str, table: str) -> str:
    """The page with the table between its marks.

    Raises:
        ValueError: it has no marks.
    """
    before, after = page.index(start) + len(start), page.index(END, page.index(start))
    return f"{page[:before]}\n{table}\n{page[after:]}"


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of an experiment, as it is documented.

    Attributes:
        name: with its section, as train.lr.
        type: in words, as "list of str".
        optional: whether it may be None.
        default: what it is where nobody sets it.
        decides: whether it decides a run's numbers; or the key of its section whose being set makes it do so.
        per_member: whether the members of a sweep may differ in it.
        known: what its field says of it.
    """

    name: str
    type: str
    optional: bool
    default: Any
    decides: bool | str
    per_member: bool
    known: Setting


@dataclasses.dataclass(frozen=True)
class Section:
    """A section's own keys; the first one, of the experiment itself, has no name."""

    name: str
    doc: str
    keys: tuple[Key, ...]


def sections(
    cls: type = Experiment, name: str = "", doc: str = "", of_member: bool = False, decides: bool = True
) -> Iterator[Section]:
    """A section's own keys, then its sections. What holds of a section holds of its keys."""
    hints, keys = typing.get_type_hints(cls), []
    below: list[Section] = []
    for field in dataclasses.fields(cls):
        known: Setting = field.metadata["setting"]
        own, run = of_member or known.per_member, decides and known.decides
        if known.section:
            below += sections(known.section, f"{name}{field.name}.", known.doc, own, bool(run))
            continue
        kind = _without_none(hints[field.name])
        optional = kind is not hints[field.name]
        keys.append(Key(f"{name}{field.name}", _type(kind), optional, field.default, run, own, known))
    yield Section(name.rstrip("."), doc, tuple(keys))
    yield from below


def _tables() -> Iterator[str]:
    """A heading and a table for each section; what is of the experiment itself stands first, without one."""
    for section in sections():
        if section.name:
            yield f"\n## {section.name}\n\n{section.doc}\n"
        rows = []
        for key in section.keys:
            when = f"where {key.decides} is set" if isinstance(key.decides, str) else _yes(key.decides)
            range_ = _words(key.known.choices) if key.known.choices is not None else key.known.range()
            cells = (key.type, _default(key.default, key.known), range_, key.known.doc, when, _yes(key.per_member))
            rows.append((f"`{key.name}`", *cells))
        yield _table(("key", "type", "default", "range", "meaning", "run", "sweep"), rows)


def _default(value: Any, known: Setting) -> str:
    """What a key is where nobody sets it."""
    if known.base is not None:
        return f"the preset's, else `{known.base}`"
    listed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return "`" + listed.replace("\n", "\\n") + "`" if listed else "empty"


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
    """Write all pages."""
    for name, (start, table) in TABLES.items():
        path = Path(name)
        page = path.read_text(encoding="utf-8") if path.is_file() else f"{start}\n{END}\n"
        path.parent.mkdir(exist_ok=True)
        path.write_text(with_table(page, start, table()), encoding="utf-8")
    Path("docs/reference.md").write_text(reference() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
