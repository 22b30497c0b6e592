"""notes.jsonl of a run: what people write beside its features, one JSON object a line.

    {"id": 7, "label": "opens a list", "note": "...", "time": 1764000000.0}

The last line of an id counts; a label and a note that are both empty take it away. A line that is answered is on disk.
Where eval.json beside it says which dictionary the folder is of, a line has that as "sha256" and counts for that alone:
another one may be evaluated or trained into the folder later.
"""

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.core.files import LARGEST_JSON, parsed, read_if_there, read_json, writing
from saejax.runs import Run

NOTES, EVALUATION = Run.notes, Run.evaluation
LONGEST_LABEL, LONGEST_NOTE = 200, 10_000
_LOCK = ".notes.lock"
_PATIENCE = 5.0  # seconds for another process that writes
_KEYS: dict[str, Any] = {"id": int, "label": str, "note": str, "time": (int, float)}

Note = dict[str, Any]


def read_notes(folder: Path) -> dict[int, Note]:
    """{feature: its note} of the folder's dictionary, those that count, in the order in which they were written.

    A torn last line (the process was killed before it answered) is ignored.

    Raises:
        DataError: a line that is no note; names it.
    """
    path = folder / NOTES
    notes: dict[int, Note] = {}
    dictionary = _dictionary(folder)
    lines = (read_if_there(path, LARGEST_JSON) or b"").split(b"\n")
    for number, line in enumerate(lines, 1):
        row = _note_of(line)
        if row is None:
            if line.strip() and number < len(lines):
                raise DataError(f"{path}, line {number} is damaged: {line[:80]!r} is no note. Remove that line.")
            continue
        if dictionary and row.get("sha256", dictionary) != dictionary:
            continue
        notes.pop(row["id"], None)
        if row["label"] or row["note"]:
            notes[row["id"]] = row
    return notes


def save_note(folder: Path, feature: int, label: str, note: str) -> Note:
    """Add a note, durably, and return it.

    Raises:
        ConfigError: a label or a note that is too long, a label of several lines, or a number that is no feature's.
        BusyError: other processes have held the file for 5 s.
        DataError: it cannot be written, or is full.
    """
    for name, text, most in (("label", label, LONGEST_LABEL), ("note", note, LONGEST_NOTE)):
        if len(text) > most:
            raise ConfigError(f"The {name} has {len(text):,} characters; it may have {most:,}.")
    if "\n" in label or "\r" in label:
        raise ConfigError("The label has several lines; a label is one line, and a note may have more.")
    if not 0 <= feature < 1 << 31:
        raise ConfigError(f"{feature} is no feature.")
    row = {"id": feature, "label": label, "note": note, "time": time.time()}
    row |= {"sha256": dictionary} if (dictionary := _dictionary(folder)) else {}
    raw = json.dumps(row).encode() + b"\n"
    path = folder / NOTES
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        with _held(folder), path.open("ab+") as handle:
            _mend(handle.fileno())
            if os.fstat(handle.fileno()).st_size + len(raw) > LARGEST_JSON:
                raise DataError(f"{path} is full ({LARGEST_JSON:,} bytes). Move it away to begin another.")
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        _remember(folder)
    return row


def _dictionary(folder: Path) -> str:
    """sha256 of the dictionary that the folder was evaluated with; empty where none is said."""
    try:
        content = read_json(folder / EVALUATION)
    except DataError:  # none yet, or damaged, which whoever shows it says
        return ""
    sha256 = content.get("sha256") if isinstance(content, dict) else None
    return sha256 if isinstance(sha256, str) else ""


def _note_of(line: bytes) -> Note | None:
    """The note of a line, or None where it is none."""
    try:
        row = parsed(line)
    except ValueError:
        return None
    fits = isinstance(row, dict) and all(
        isinstance(row.get(key), kind) and not isinstance(row[key], bool) for key, kind in _KEYS.items()
    )
    return row if fits else None


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The file's lock, for this thread of this process; it goes with the process. A training's lease is another."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise BusyError(f"{folder / NOTES} is being written by others. Save again.") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def _mend(handle: int) -> None:
    """End a last line that is whole but for its end, and cut off one that is torn."""
    size = os.fstat(handle).st_size
    if not size or os.pread(handle, 1, size - 1) == b"\n":
        return
    raw = os.pread(handle, min(size, 1 << 20), max(0, size - (1 << 20)))
    last = raw.rpartition(b"\n")[2]
    if _note_of(last) is None:
        os.ftruncate(handle, size - len(last))
    else:
        os.write(handle, b"\n")


def _remember(folder: Path) -> None:
    """The folder's entry of a new file, durable where the file system can do that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)
