"""metrics.jsonl while it is written: whole rows from a byte offset on, whatever happens to the file."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from saejax.core.files import opened
from saejax.core.metrics import row_of

# Of whole lines in one piece.
PIECE = 1 << 18


@dataclasses.dataclass
class Cursor:
    """A place in a file of lines, always behind a whole one.

    Attributes:
        at: the offset, in bytes.
    """

    path: Path
    at: int = 0
    _file: int | None = None

    def next(self) -> tuple[list[dict[str, Any]], bool, bool]:
        """(the rows behind the cursor, at most PIECE bytes of them; whether there may be more; whether it was reset).

        A reset says that the file was begun anew: it is shorter than the cursor, another file, or has no line that ends
        there. The cursor is then at 0. A line that is no row is passed over; a torn last line waits for its rest.
        """
        try:
            # Without a buffer: one that was filled before a torn line was replaced would be read with its new end.
            handle = opened(self.path, buffering=0)
        except OSError:
            gone, self.at, self._file = self.at > 0, 0, None
            return [], False, gone
        with handle:
            known = os.fstat(handle.fileno())
            other = self._file is not None and self._file != known.st_ino
            self._file = known.st_ino
            if self.at and (other or known.st_size < self.at or not _ends_at(handle, self.at)):
                self.at = 0
                return [], known.st_size > 0, True
            handle.seek(self.at)
            raw = handle.read(PIECE)
            end = raw.rfind(b"\n") + 1
            if not end and len(raw) == PIECE:
                before, self.at = self.at, _next_line(handle, self.at)
                return [], self.at > before, False
            self.at += end
            rows = [row for line in raw[:end].splitlines() if (row := row_of(line)) is not None]
            return rows, len(raw) == PIECE, False


def behind_step(path: Path, step: int) -> int:
    """The offset behind the last row of a step, in the order of the file; 0 where no row is of it."""
    wanted, at, found = b'"step": %d' % step, 0, 0
    try:
        with opened(path) as handle:
            for line in handle:
                at += len(line)
                if wanted in line and line.endswith(b"\n") and (row_of(line) or {}).get("step") == step:
                    found = at
    except OSError:
        return 0
    return found


def _ends_at(handle: Any, at: int) -> bool:
    handle.seek(at - 1)
    return bool(handle.read(1) == b"\n")


def _next_line(handle: Any, at: int) -> int:
    """Behind the end of a line that is longer than a piece; where it has no end yet, the line's own start."""
    handle.seek(at)
    passed = at
    while raw := handle.read(PIECE):
        if (end := raw.find(b"\n")) >= 0:
            return int(passed + end + 1)
        passed += len(raw)
    return at
