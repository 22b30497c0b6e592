"""The shape of a JSON value, said as data, and what is wrong with a value of another shape.

float, str, int, bool, list, dict, object   of this kind; a float may be a whole number, an object is anything
[shape], {"key": shape, ...: shape}         a list of it; an object, where ... stands for all keys without a name
Maybe(shape)                                may be missing, or null
(shape, shape)                              all of them
a function of the value                     the rest of a sentence about its name that says what is wrong, or ""
"""

import dataclasses
from typing import Any

_KINDS = {
    float: "a number",
    int: "a whole number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True)
class Maybe:
    """A shape that may be missing, and null unless that is refused."""

    shape: Any
    null: bool = True


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def fault(value: Any, shape: Any, name: str = "it") -> str:
    """The first thing that is wrong with a value, as a sentence; empty where nothing is."""
    if isinstance(shape, Maybe):
        return "" if value is None and shape.null else fault(value, shape.shape, name)
    if isinstance(shape, tuple):
        return next(filter(None, (fault(value, part, name) for part in shape)), "")
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{name} is not {_KINDS[list]}"
        return next(filter(None, (fault(item, shape[0], name) for item in value)), "")
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{name} is not {_KINDS[dict]}"
        named = {**dict.fromkeys(value, shape[...]), **shape} if ... in shape else shape
        return next(filter(None, (_of_key(value, key, of, name) for key, of in named.items() if key is not ...)), "")
    if isinstance(shape, type):
        fits = shape is object or (is_number(value) if shape is float else type(value) is shape)
        return "" if fits else f"{name} holds {str(value)[:80]!r}, which is not {_KINDS[shape]}"
    return f"{name} {rest}" if (rest := shape(value)) else ""


def _of_key(value: dict[str, Any], key: str, shape: Any, name: str) -> str:
    if key not in value:
        return "" if isinstance(shape, Maybe) else f"{name} has no {key}"
    kind = shape.shape if isinstance(shape, Maybe) else shape
    what = fault(value[key], shape, repr(key))
    if what and kind in (float, int, str, bool):
        return f"{name} has the {key} {str(value[key])[:80]!r}, which is not {_KINDS[kind]}"
    return what


def histogram(edges: str) -> Any:
    """A histogram whose edges have this key."""

    def one_edge_more(value: Any) -> str:
        more = len(value[edges]) == len(value["counts"]) + 1
        return "" if more else "does not have one edge more than counts"

    return ({edges: [float], "counts": [float]}, one_edge_more)
