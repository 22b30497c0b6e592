"""The reference of all keys and flags and the tables of coders and formats, as Markdown made from the code itself.

    python -m saejax.commands._reference

writes docs/reference.md, the tables between their marks in docs/coders.md and docs/formats.md, and the keys of
`saejax.train` for type checkers, below the current folder.
"""

import collections
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from saejax.app.array_training import keys_of_train
from saejax.app.keys import sections, type_text, without_none
from saejax.coders import RECIPES, TOPOLOGIES, CoderConfig, build
from saejax.commands import COMMANDS
from saejax.core.settings import Setting
from saejax.interop import format_table
from saejax.trained import Kind

COMMAND = "python -m saejax.commands._reference"
END = "<!-- end -->"
TYPED_KEYS = Path("saejax/app/train_settings.py")
_YES = {True: "yes", False: "no"}

_INTRODUCTION = f"""# All keys and flags

This page is made by `{COMMAND}` from the fields of the code; change those, not this page.

A key is set in a config file as `c.coder.k = 64`, or on the command line as `--config.coder.k=64`. "Run" says whether
a key decides a run's numbers: a run cannot go on with another value of it. "Sweep" says whether the members of a sweep
may differ in it. Integers end at 2147483647 unless the range says otherwise or the key counts activations or steps.
Flags of commands stand at the end.
"""


def reference() -> str:
    """Every key of an experiment, a table for each section, and the flags of each command."""
    return "\n".join([_INTRODUCTION, *_key_tables(), *_flag_tables()])


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
    return _markdown_table(("preset", "what it is", "topology", "sparsity", "loss", "after"), rows)


def formats_table() -> str:
    """A row for each format of dictionaries: its files, what is read, what is written."""
    rows = [("saejax", "`saejax`", "coder.safetensors, saejax.json", "all", "all")]
    for form, cells in format_table():
        read = [kind for kind, (is_read, _) in cells.items() if is_read]
        written = [kind for kind, (_, why_not) in cells.items() if not why_not]
        rows.append((form.title, f"`{form.name}`", form.files, _kinds(read), _kinds(written)))
    return _markdown_table(("project", "format", "files", "in", "out"), rows)


def _kinds(kinds: Iterable[Kind]) -> str:
    """topology: sparsities; topologies that share their sparsities together."""
    of, alike = collections.defaultdict(list), collections.defaultdict(list)
    for topology, sparsity in kinds:
        of[topology].append(sparsity)
    for topology, sparsities in of.items():
        alike[", ".join(sparsities)].append(topology)
    return "; ".join(f"{', '.join(topologies)}: {sparsities}" for sparsities, topologies in alike.items()) or "no"


_TYPED_KEYS = f'''"""The keys of `coder` and `train` as arguments of `saejax.train`, for type checkers and editors.

Made by `{COMMAND}` from the settings; change those, not this file.
"""

from collections.abc import Sequence
from typing import TypedDict


class TrainSettings(TypedDict, total=False):
    """Arguments of `saejax.train` besides its own."""

'''


def typed_keys() -> str:
    """The module with the class of the keys of `saejax.train`."""
    lines = []
    for key, hint, _ in keys_of_train():
        items = typing.get_args(hint)[:1] if typing.get_origin(hint) is tuple else ()
        kind = f"Sequence[{items[0].__name__}]" if items else getattr(hint, "__name__", "") or str(hint)
        lines.append(f"    {key}: {str(hint) if isinstance(hint, types.UnionType) else kind}")
    return _TYPED_KEYS + "\n".join(lines) + "\n"


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


def _key_tables() -> Iterator[str]:
    """A heading and a table for each section; what is of the experiment itself stands first, without one."""
    for section in sections():
        if section.name:
            yield f"\n## {section.name}\n\n{section.doc}\n"
        rows = []
        for key in section.keys:
            when = f"where {key.decides} is set" if isinstance(key.decides, str) else _YES[key.decides]
            choices = ", ".join(f"`{word}`" for word in key.known.choices or ())
            range_ = key.known.range() if key.known.choices is None else choices
            cells = (key.type, _default(key.default, key.known), range_, key.known.doc, when, _YES[key.per_member])
            rows.append((f"`{key.name}`", *cells))
        yield _markdown_table(("key", "type", "default", "range", "meaning", "run", "sweep"), rows)


def _flag_tables() -> Iterator[str]:
    """A heading and a table for each command that has flags besides --config."""
    yield "\n## Flags of commands\n"
    for name, command in COMMANDS.items():
        hints, defaults = typing.get_type_hints(command), vars(command())
        rows = []
        for (flag, known), (field, value) in zip(command.flags().items(), defaults.items(), strict=True):
            words, kind = ", ".join(known.words), type_text(without_none(hints[field]))
            rows.append((f"`--{flag}`", kind, _default(value, known), known.range(), words, known.doc))
        if rows:
            yield f"\n### saejax {name}\n\n{command.summary()}\n"
            yield _markdown_table(("flag", "type", "default", "range", "with", "meaning"), rows)


def _default(value: Any, known: Setting) -> str:
    """The value of a key that nobody sets."""
    if known.base is not None:
        return f"the preset's, else `{known.base}`"
    listed = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return "`" + listed.replace("\n", "\\n") + "`" if listed else "empty"


def _markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_reference() -> None:
    """Write all pages."""
    for name, (start, table) in TABLES.items():
        path = Path(name)
        page = path.read_text(encoding="utf-8") if path.is_file() else f"{start}\n{END}\n"
        path.parent.mkdir(exist_ok=True)
        path.write_text(with_table(page, start, table()), encoding="utf-8")
    Path("docs/reference.md").write_text(reference() + "\n", encoding="utf-8")
    TYPED_KEYS.parent.mkdir(parents=True, exist_ok=True)
    TYPED_KEYS.write_text(typed_keys(), encoding="utf-8")


if __name__ == "__main__":
    write_reference()
