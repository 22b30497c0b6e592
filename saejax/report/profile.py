"""profile.json of a run, checked: what the page draws of it is there, and numbers are numbers."""

from pathlib import Path
from typing import Any

from saejax.core.errors import DataError

_REMEDY = "delete it, or make it again with `saejax train --config=... --config.train.profile=true`"


def checked(path: Path, profile: dict[str, Any]) -> dict[str, Any]:
    """The profile as it is.

    Raises:
        DataError: something that the page shows is missing or of another kind; names it.
    """
    trace, session, memory = (profile.get(key) for key in ("trace", "session", "memory"))
    if trace is not None:
        _check_object(path, "trace", trace, ("first_step", "steps"), ("step_ms",))
        for key in ("components", "idle"):
            _check_rows(path, key, trace.get(key), ("ms", "share"))
    _check_object(path, "session", session, ("steps", "ms_per_step"))
    _check_rows(path, "phases", session["phases"] if session and "phases" in session else None, ("ms", "share"))
    _check_rows(path, "memory", memory, ("step",), ("host_bytes", "device_bytes"), named=False)
    _check_object(path, "step", profile.get("step"), (), ("flops", "bytes", "memory_bytes"))
    return profile


def _check_rows(
    path: Path, name: str, rows: Any, numbers: tuple[str, ...], others: tuple[str, ...] = (), named: bool = True
) -> None:
    if not isinstance(rows, list):
        raise _damaged(path, f"{name!r} is not a list")
    for row in rows:
        _check_object(path, name, row, numbers, others)
        if named and not isinstance(row.get("name"), str):
            raise _damaged(path, f"a row of {name!r} has no name")


def _check_object(path: Path, name: str, value: Any, numbers: tuple[str, ...], others: tuple[str, ...] = ()) -> None:
    """`numbers` must be there, `others` may be missing or null."""
    if not isinstance(value, dict):
        raise _damaged(path, f"{name!r} is not an object")
    for key in (*numbers, *others):
        if type(value.get(key)) not in (int, float) and not (key in others and value.get(key) is None):
            raise _damaged(path, f"{name!r} has the {key} {value.get(key)!r}, which is not a number")


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is damaged: {what}; {_REMEDY}")
