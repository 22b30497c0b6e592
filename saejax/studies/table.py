"""Tables of results on disk: CSV files that grow block by block, and go on after any stop.

A table is the rows of a list of jobs that is the same each time, so that a number of rows says how far it came. What
a killed process left of a block is cut off and computed again: the file ends as that of an undisturbed run, byte for
byte.
"""

import bisect
import csv
import io
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.files import read_bounded, write_bytes, writing

_LARGEST_TABLE = 4 << 30


class Table:
    """A CSV file with a header: texts (a line break as in Python), whole numbers, float32 in its shortest form."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)

    def keep(self, sizes: Sequence[int]) -> int:
        """The number of blocks of so many rows each that are there whole; what stands behind them is cut off.

        Raises:
            DataError: the file is none of this table.
        """
        raw, head = read_bounded(self.path, _LARGEST_TABLE) if self.path.exists() else b"", _csv_line(self.columns)
        if not raw.startswith(head):
            if not head.startswith(raw):
                raise self._foreign()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # killed within its first line
            self._append(head)
            raw = head
        lines = raw.splitlines(keepends=True)
        done = sum(line.endswith(b"\n") for line in lines[1:])
        stops = list(itertools.accumulate(sizes, initial=0))
        whole = bisect.bisect_right(stops, done) - 1
        if (length := len(b"".join(lines[: 1 + stops[whole]]))) < len(raw):
            with writing(self.path), open(self.path, "r+b") as file:
                file.truncate(length)
        return whole

    def extend(self, rows: Iterable[Sequence[Any]]) -> None:
        """More rows, on the disk when this returns."""
        self._append(b"".join(map(_csv_line, rows)))

    def replace(self, rows: Iterable[Sequence[Any]]) -> None:
        """The table with these rows and no others, at once."""
        write_bytes(self.path, b"".join(map(_csv_line, [self.columns, *rows])))

    def read(self) -> list[dict[str, str]]:
        """All rows, as texts by column."""
        head, *lines = read_bounded(self.path, _LARGEST_TABLE).splitlines(keepends=True) or [b""]
        if head != _csv_line(self.columns):
            raise self._foreign()
        rows = []
        for number, line in enumerate(lines, 2):
            try:
                (values,) = csv.reader([line.decode()], strict=True)
            except (ValueError, csv.Error):
                values = []
            if len(values) != len(self.columns):
                raise self._damaged(number)
            rows.append(dict(zip(self.columns, values, strict=True)))
        return rows

    def numbers(self, name: str, rows: Sequence[Mapping[str, str]]) -> np.ndarray:
        """A column of rows of this table as float64. Raises DataError where one is no number; names its line."""
        values = np.empty(len(rows))
        for i, row in enumerate(rows):
            try:
                values[i] = float(row[name])
            except ValueError:
                raise self._damaged(i + 2) from None
        return values

    def _foreign(self) -> DataError:
        return DataError(f"{self.path} is not the table of {', '.join(self.columns)}. Move it away.")

    def _damaged(self, line: int) -> DataError:
        return DataError(
            f"{self.path}, line {line} is damaged: it must have {', '.join(self.columns)}. Delete the file, and it is "
            "computed again."
        )

    def _append(self, raw: bytes) -> None:
        with writing(self.path), open(self.path, "ab") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())


def _csv_line(values: Sequence[Any]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([_cell(value) for value in values])
    return buffer.getvalue().encode()


def _cell(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return str(np.float32(value))
    # A row is a line: what cuts a damaged end off counts lines.
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
