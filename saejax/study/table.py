"""Tables of results on disk: CSV files that grow block by block, and go on after any stop.

A table is the rows of a list of jobs that is the same each time, so that a number of rows says how far it came. What
a killed process left of a block is cut off and computed again: the file ends as that of an undisturbed run, byte for
byte.
"""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.files import read_bounded, writing

_LARGEST = 4 << 30


class Table:
    """A CSV file with a header.

    Attributes:
        path: of the file.
        columns: names; a row has a value for each: texts (a line break is written as in Python), whole numbers, and
            numbers in float32's shortest form.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)

    def begin(self) -> int:
        """How many whole rows are there; what a killed process left of another is cut off.

        Raises:
            DataError: the file is none of this table.
        """
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(_line(self.columns))
            return 0
        lines = read_bounded(self.path, _LARGEST).splitlines(keepends=True)
        if not lines or lines[0] != _line(self.columns):
            if b"".join(lines) and not _line(self.columns).startswith(b"".join(lines)):
                raise DataError(f"{self.path} is not the table of {', '.join(self.columns)}. Move it away.")
            self.path.unlink()  # killed within its first line
            return self.begin()
        whole = [line for line in lines[1:] if line.endswith(b"\n")]
        self.cut(len(whole))
        return len(whole)

    def cut(self, rows: int) -> None:
        """Keep the first so many rows."""
        lines = read_bounded(self.path, _LARGEST).splitlines(keepends=True)
        with writing(self.path), open(self.path, "r+b") as file:
            file.truncate(len(b"".join(lines[: 1 + rows])))

    def extend(self, rows: Iterable[Sequence[Any]]) -> None:
        """More rows, on the disk when this returns."""
        self._append(b"".join(map(_line, rows)))

    def read(self) -> list[dict[str, str]]:
        """All rows, as texts by column."""
        text = read_bounded(self.path, _LARGEST).decode()
        return list(csv.DictReader(io.StringIO(text)))

    def column(self, name: str) -> np.ndarray:
        """One column as float64."""
        return np.asarray([float(row[name]) for row in self.read()])

    def _append(self, raw: bytes) -> None:
        with writing(self.path), open(self.path, "ab") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())


def _line(values: Sequence[Any]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([_text(value) for value in values])
    return buffer.getvalue().encode()


def _text(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(np.float32(value))
    # A row is a line: what cuts a damaged end off counts lines.
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
