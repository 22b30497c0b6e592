"""What an evaluation says beside its metrics, checked before the page draws it: intervals, breakdowns, gates."""

from collections.abc import Mapping, Sequence
from typing import Any

_FIGURES = ("fve", "loss_recovered", "l0")


def failed_of(gates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the gates by which an evaluation does not end well. Earlier versions knew no gate that was not measured
    and yet did not fail."""
    return [str(gate.get("name")) for gate in gates if not gate.get("ends_well", gate.get("passed"))]


def counted(gates: Sequence[Mapping[str, Any]]) -> str:
    """The result in words: "6 of 6", "5 of 6, 1 not measured", or "fails r2"."""
    if failed := failed_of(gates):
        return f"fails {', '.join(failed)}"
    passed = sum(bool(gate.get("passed")) for gate in gates)
    return f"{passed} of {len(gates)}" + (f", {len(gates) - passed} not measured" if passed < len(gates) else "")


def wrong_in(evaluation: dict[str, Any]) -> str | None:
    """What is wrong with "intervals", "documents" and "breakdown" of eval.json; None where nothing is.

    Earlier versions wrote none of them.
    """
    intervals, documents = evaluation.get("intervals") or {}, evaluation.get("documents") or {}
    breakdown = evaluation.get("breakdown") or {}
    if not all(isinstance(part, dict) for part in (intervals, documents, breakdown)):
        return "'intervals', 'documents' or 'breakdown' is not an object"
    if not all(map(_is_interval, intervals.values())):
        return "an interval is not [low, high]"
    if not all(_is_number(documents.get(key, 0)) for key in ("count", "resamples")):
        return "'documents' holds something that is not a number"
    if not isinstance(documents.get("note", ""), str):
        return "the note of 'documents' is not text"
    for name, part in breakdown.items():
        if not isinstance(part, dict) or not _is_breakdown(part):
            return f"the breakdown {name!r} does not have a value for each group"
    return None


def _is_breakdown(part: dict[str, Any]) -> bool:
    groups = part.get("groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(group, str) for group in groups):
        return False
    lists = [part.get("tokens"), part.get("documents"), *(part[key] for key in _FIGURES if key in part)]
    ends = [part.get(f"{key}_interval") for key in _FIGURES if key in part]
    if not all(isinstance(values, list) and len(values) == len(groups) for values in (*lists, *ends)):
        return False
    numbers = all(value is None or _is_number(value) for values in lists for value in values or [])
    return numbers and all(_is_interval(value) for values in ends for value in values or [])


def _is_interval(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
