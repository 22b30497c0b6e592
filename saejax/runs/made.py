"""Artifacts on disk: one counts as done where it was made from what it would be made from now.

An artifact is JSON that holds, beside its figures, what they were made from: digests of content and settings, by name.
What its file or its inputs are called decides nothing: another folder of data may have the same name.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.config import differences
from saejax.core.errors import DataError
from saejax.core.files import finite, read_object, write_json

# Differences that an error lists.
_LISTED = 5


def digest(*parts: Any) -> str:
    """sha256 of arrays and texts, one after the other."""
    of_all = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            of_all.update(f"{part.dtype}{part.shape}".encode())
            of_all.update(np.ascontiguousarray(part).data)
        else:
            of_all.update(repr(part).encode())
    return of_all.hexdigest()


def differing(content: Mapping[str, Any], of: Mapping[str, Any]) -> list[str]:
    """`key: there -> now` for all of `of` that `content` was made from and that is another now."""
    now = json.loads(json.dumps(finite(of)))
    return differences({key: content.get(key) for key in now}, now)


def listed(changed: list[str]) -> str:
    """Differences in one line, the first of many."""
    rest = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
    return "; ".join(changed[:_LISTED]) + rest


def already_done(stage: str, place: object) -> str:
    """The line about what is there and would not be made otherwise now."""
    return f"{stage}: already done, {place}"


def other_settings(folder: Path, what: str, changed: list[str]) -> DataError:
    """The error for a folder of another run or sweep: each difference, and what to do."""
    return DataError(
        f"{folder} holds {what} with another configuration:\n  " + "\n  ".join(changed) + "\n"
        "Choose another --config.name, restore these settings, or delete the folder."
    )


def refusal(path: Path, changed: list[str]) -> DataError:
    """The error for an artifact that was made from something else: each difference, and what to do."""
    return DataError(
        f"{path} was made from something else ({listed(changed)}). Pass --redo to make it again, "
        "restore what it was made from, or choose another --config.name."
    )


def existing(
    path: Path,
    of: Mapping[str, Any],
    redo: bool = False,
    stage: str = "",
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any] | None:
    """The content of an artifact that is there and was made from `of`, of which a line is told; None where it is not.

    Raises:
        DataError: it was made from something else and not to be made again, or is damaged.
    """
    if redo or not path.is_file():
        return None
    content = read_object(path)
    if changed := differing(content, of):
        raise refusal(path, changed)
    tell(already_done(stage, path))
    return content


def made(
    path: Path,
    of: Mapping[str, Any],
    make: Callable[[], Mapping[str, Any]],
    redo: bool,
    stage: str,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The content of an artifact: `existing`, or what `make` gives, written with `of`.

    Raises:
        DataError: as `existing`; or it cannot be written.
    """
    if (content := existing(path, of, redo, stage, tell)) is not None:
        return content
    write_json(path, {**of, **make()})
    return read_object(path)
