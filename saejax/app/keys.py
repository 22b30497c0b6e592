"""Every key of an experiment as data: what the reference page and the form of `saejax serve` show."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any

from saejax.app.experiment import Experiment
from saejax.core.settings import Setting


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
        differs, run = of_member or known.per_member, decides and known.decides
        if known.section:
            below += sections(known.section, f"{name}{field.name}.", known.doc, differs, bool(run))
            continue
        kind = without_none(hints[field.name])
        optional = kind is not hints[field.name]
        keys.append(Key(f"{name}{field.name}", type_text(kind), optional, field.default, run, differs, known))
    yield Section(name.rstrip("."), doc, tuple(keys))
    yield from below


def type_text(kind: Any) -> str:
    """A type in words, as "list of str"."""
    name = "section" if dataclasses.is_dataclass(_item(kind)) else str(_item(kind).__name__)
    return f"list of {name}" if typing.get_origin(kind) is tuple else name


def _item(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


def without_none(hint: Any) -> Any:
    """The type of a key that may be None."""
    arms = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    return arms[0] if isinstance(hint, types.UnionType) else hint
