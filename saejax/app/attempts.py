"""attempts.json of a run that was tried again (`gates.retries`): each attempt, and which one is kept.

The run itself is attempt-0. The others are whole runs in folders of it: runs/<name>/attempt-1, attempt-2.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.core.files import read_object, write_json
from saejax.evals.attempts import FIRST, Attempt

ATTEMPTS = "attempts.json"
_LARGEST = 1 << 20


@dataclasses.dataclass(frozen=True)
class Record:
    """The content of attempts.json.

    Attributes:
        attempts: in order; the last may be under way.
        kept: the name of the best so far.
        why: it is, in words.
    """

    attempts: tuple[Attempt, ...]
    kept: str = FIRST
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "why": self.why, "attempts": [one.to_json() for one in self.attempts]}


def read_record(run: Path) -> Record | None:
    """The record of a run's folder; None where it was not tried again.

    Raises:
        DataError: it is damaged.
    """
    path = run / ATTEMPTS
    if not os.path.lexists(path):
        return None
    content = read_object(path, _LARGEST)
    remedy = f"Delete it, and run `saejax pipeline` again: what is trained in {run} stays."
    try:
        attempts = tuple(Attempt.from_json(one) for one in content["attempts"])
        record = Record(attempts, str(content["kept"]), str(content["why"]))
    except (KeyError, TypeError, DataError) as error:
        raise DataError(f"{path} is damaged ({error}). {remedy}") from None
    names = [one.name for one in attempts]
    known = names == [f"attempt-{i}" for i in range(len(names))] and record.kept in names
    if not known or any(one.begins_from not in names[:i] for i, one in enumerate(attempts) if i):
        raise DataError(f"{path} is damaged (its attempts are {names}, and {record.kept!r} is kept). {remedy}")
    return record


def write_record(run: Path, record: Record) -> None:
    write_json(run / ATTEMPTS, record.to_json())


def attempt_folder(run: Path, name: str) -> Path:
    return run if name == FIRST else run / name


def kept_folder(run: Path) -> Path:
    """The folder of the attempt that is kept; the run's own where it was not tried again.

    Raises:
        DataError: attempts.json is damaged, or the attempt's folder is gone.
    """
    record = read_record(run)
    if record is None or record.kept == FIRST:
        return run
    folder = attempt_folder(run, record.kept)
    if not (folder / "config.json").is_file():
        raise DataError(f"{run / ATTEMPTS} keeps {record.kept}, and {folder} holds no run. Bring it back.")
    return folder


def is_attempt(run: Path) -> bool:
    """Whether the folder is an attempt of the run above it."""
    return bool(re.fullmatch(r"attempt-[1-9]\d*", run.name)) and (run.parent / ATTEMPTS).is_file()
