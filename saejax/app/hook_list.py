"""The table of `saejax hooks`: what a model is, and every place in it where it can be watched, edited and captured."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from saejax.app.experiment import Experiment
from saejax.capture import expand_hook_points
from saejax.lm import HookList, HookPoint, list_hook_points
from saejax.lm.pair import PREFIX

T = TypeVar("T")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_OPEN = "#"  # where a name has the number of its block
_TABLE_HEAD = ("hook point", "a token has", "stored", "TransformerLens", "module", "captured")


@dataclasses.dataclass(frozen=True)
class Line:
    """One row of the table: one hook point, or the same one in each of several blocks.

    Attributes:
        point: with `blocks.{0..11}` in its names where it stands for several; capture.hook_points takes them so.
        captured: the blocks in which the experiment captures it, as in "3, 6..9"; "yes" for a single point.
    """

    point: HookPoint
    captured: str = ""


def of_experiment(e: Experiment) -> list[tuple[HookList, list[HookPoint], frozenset[str]]]:
    """(model, its points by their names in the experiment, those captured) of lm.model, and of lm.second if there is.

    Raises:
        ConfigError: capture.hook_points names one that does not exist; or as `list_hook_points`.
        DataError: as `list_hook_points`.
    """
    how = (e.lm.backend, e.lm.dtype, e.lm.device)
    listed = [(list_hook_points(e.lm.model, e.lm.revision, *how), "")]
    if e.lm.second:
        listed.append((list_hook_points(e.lm.second, e.lm.second_revision, *how), PREFIX))
    parts = []
    for model, prefix in listed:
        names = [name.removeprefix(PREFIX) for name in e.capture.hook_points if name.startswith(PREFIX) == bool(prefix)]
        captured = frozenset(prefix + name for name in expand_hook_points(names, model))
        parts.append((model, [dataclasses.replace(p, name=prefix + p.name) for p in model.points], captured))
    return parts


def header(model: HookList) -> list[str]:
    """The model in figures, one fact a line."""
    c = model.shape
    heads = "not said"
    if c.n_head:
        heads = f"{c.n_head}" + (f" of {c.d_head}" if c.d_head else "")
        heads += f", {c.kv_heads} of keys and values" if c.kv_heads != c.n_head else ""
    runs = "the JAX decoder" if model.backend == "jax" else "PyTorch"
    facts = {
        "architecture": f"{model.architecture}, run by {runs}",
        "blocks": f"{c.n_layer}",
        "d_model": f"{c.d_model:,}",
        "heads": heads,
        "d_mlp": f"{c.d_mlp:,}" if c.d_mlp else "not said",
        "vocabulary": f"{c.vocab_size:,}",
        "context": f"{c.context_length:,}",
        "parameters": f"{c.n_parameters:,}",
        "weights": ", ".join(model.number_types) or "not here, or not all of them; the list needs none",
    }
    return [model.model, *(f"  {name:<12}  {value}" for name, value in facts.items())]


def folded(points: Sequence[HookPoint], captured: frozenset[str] = frozenset()) -> list[Line]:
    """One line for all blocks in which a point is the same but for the block's number, in order of first appearance."""
    groups: dict[HookPoint, list[tuple[int, HookPoint]]] = {}
    for point in points:
        match = _NUMBER.search(point.name)
        group = _renamed(point, rf"(?<=\.){match[0]}(?=\.)", _OPEN) if match else point
        groups.setdefault(group, []).append((int(match[0]) if match else 0, point))
    lines = []
    for group, members in groups.items():
        for run in _consecutive(members, lambda member: member[0]):
            spans = _consecutive([number for number, point in run if point.name in captured], int)
            (first, point), (last, _) = run[0], run[-1]
            if first == last:
                lines.append(Line(point, "yes" if spans else ""))
                continue
            blocks = ", ".join(f"{span[0]}..{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)
            lines.append(Line(_renamed(group, _OPEN, f"{{{first}..{last}}}"), blocks))
    return lines


def each(points: Sequence[HookPoint], captured: frozenset[str] = frozenset()) -> list[Line]:
    """One line for each point."""
    return [Line(point, "yes" if point.name in captured else "") for point in points]


def hook_table(lines: Sequence[Line]) -> list[str]:
    """The lines in columns; a column that is empty throughout is left out."""
    rows = [
        (p.name, shape_text(p), "yes" if p.stored else "no: watch, edit", p.alias, p.module, line.captured)
        for line in lines
        for p in [line.point]
    ]
    columns = [(head, *cells) for head, cells in zip(_TABLE_HEAD, zip(*rows, strict=True), strict=True) if any(cells)]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    ]


def shape_text(point: HookPoint) -> str:
    """`768`; `12 x 64 = 768` where several axes are stored as one; `12 x S` where S tokens are read."""
    text = " x ".join(map(str, point.shape))
    if not point.stored or len(point.shape) == 1:
        return text
    return f"{text} = {math.prod(int(size) for size in point.shape)}"


def _renamed(point: HookPoint, pattern: str, new: str) -> HookPoint:
    """The point with the first match of the pattern replaced in each of its names."""
    name, alias, module = (re.sub(pattern, new, old, count=1) for old in (point.name, point.alias, point.module))
    return dataclasses.replace(point, name=name, alias=alias, module=module)


def _consecutive(members: Iterable[T], number: Callable[[T], int]) -> list[list[T]]:
    """Members whose numbers follow each other without a gap: 3, 6, 7, 8 -> [3], [6, 7, 8]."""
    counted = enumerate(sorted(members, key=number))
    grouped = itertools.groupby(counted, key=lambda item: number(item[1]) - item[0])
    return [[member for _, member in group] for _, group in grouped]
