"""metrics.jsonl: the truth about a run. One JSON object a line, appended; other writers stand beside it."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from saejax.core.errors import DataError
from saejax.core.extras import installing
from saejax.core.files import opened, parsed, read_bounded, writing

# Bytes from the end of metrics.jsonl in which the last rows are looked for: some hundred of them.
_TAIL = 1 << 16
# Two L0, further apart than this share of the training's, are of two coders.
_APART = 0.2
# Some million rows. A longer file is none of ours.
LARGEST_METRICS = 1 << 30


class Writer(Protocol):
    def write(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """Appends `{"step": step, **row}` lines; each line reaches the file system before `write` returns."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            mend_last_line(self._path)
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, row: Mapping[str, float]) -> None:
        clean = {k: (v if math.isfinite(v) else None) for k, v in row.items()}
        with writing(self._path):
            self._file.write(json.dumps({"step": step, **clean}) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


class TensorBoardWriter:
    """The same rows as TensorBoard scalars. Needs the `tensorboard` extra."""

    def __init__(self, folder: str | os.PathLike):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise DataError(f"train.tensorboard=true needs tensorboardX: {installing('tensorboard')}") from None
        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        with writing(self._folder):
            for name, value in row.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Rows of metrics by column, "step" int64 [R] and every other float64 [R]: NaN where a row says nothing of it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: np.array([row[name] for row in rows], np.int64)
        if name == "step"
        else np.array([np.nan if row.get(name) is None else row[name] for row in rows], np.float64)
        for name in names
    }


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, in order of step.

    After a resume some steps are written again: of rows with the same step and the same keys the last one
    counts. A torn last line (the process was killed) is ignored.

    Raises:
        DataError: no such file, or a whole line that is not a row.
    """
    raw = read_bounded(path, LARGEST_METRICS)
    lines = raw.rstrip(b"\n").split(b"\n")
    rows: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if (row := row_of(line)) is not None:
            rows[row["step"], tuple(sorted(row))] = row
        elif number < len(lines) or raw.endswith(b"\n"):
            raise DataError(f"{path}, line {number} is damaged; remove that line.")
    return [rows[key] for key in sorted(rows, key=lambda key: key[0])]


def row_of(line: bytes) -> dict[str, Any] | None:
    """The row of a line, its numbers finite or None; None where the line is no row: torn, or damaged."""
    try:
        row = parsed(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def last_rows(path: Path) -> dict[str, float | None]:
    """The newest value of each key among the last rows; a long file is read from its end alone, {} where there is none.

    One dict says where a training is: "step" and "tokens" of its last row, the last validation's figures, the pace.

    Raises:
        DataError: it cannot be read, or a line of these is damaged.
    """
    if not os.path.lexists(path):
        return {}
    try:
        with opened(path) as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - _TAIL))
            # The first line of a tail and the last of any file may be torn.
            lines = handle.read(_TAIL).split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    newest: dict[str, float | None] = {}
    for number, line in enumerate(lines):
        if (row := row_of(line)) is not None:
            newest |= {key: value for key, value in row.items() if value is None or type(value) in (int, float)}
        elif line.strip() and (number or size <= _TAIL) and number < len(lines) - 1:
            raise DataError(f"{path} is damaged: {line[:80]!r} is no row; remove that line.")
    return newest


def mend_last_line(path: Path) -> None:
    """Cut off a last line without its newline, so that the next row does not run into it."""
    if path.is_file() and not (raw := path.read_bytes()).endswith(b"\n") and raw:
        with path.open("r+b") as handle:
            handle.truncate(raw.rfind(b"\n") + 1)


def l0_note(l0_in_training: float | None, l0: float | None) -> str:
    """A warning about two L0 that are more than a fifth apart; empty where they are not, or one is unknown."""
    if l0_in_training is None or l0 is None or abs(l0 - l0_in_training) <= _APART * l0_in_training:
        return ""
    return (
        f"the coder keeps {l0:.3g} latents for a token and kept {l0_in_training:.3g} in training. On the same text its "
        "threshold, or the average of its weights, has not followed: train for more steps, or lower "
        "coder.threshold_decay or train.ema_decay."
    )
