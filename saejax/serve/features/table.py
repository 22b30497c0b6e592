"""A table of features, read through its index: one feature, a window of rows, what a search finds."""

import bisect
import dataclasses
import mmap
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.files import parsed, read_json
from saejax.report.read import check_feature
from saejax.serve.features.index import COLUMNS, SCOPES, VERSION

SORTS = ("id", "density", "max", "token")
_WINDOW = 8 << 20  # bytes that are searched at a time, so that other threads have their turn


class _Pieces:
    """Pieces of bytes in a file that is mapped into memory."""

    def __init__(self, folder: Path, name: str):
        self.starts = np.load(folder / f"{name}.at.npy", mmap_mode="r", allow_pickle=False)
        path = folder / name
        with path.open("rb") as handle:
            size = path.stat().st_size
            self._bytes: mmap.mmap | bytes = (
                mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""  # nothing cannot be mapped
            )
        if self.starts.dtype != np.int64 or self.starts.ndim != 1 or int(self.starts[-1]) != size:
            raise ValueError(f"{name} has {size} bytes")

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i: int) -> bytes:
        return self.between(int(self.starts[i]), int(self.starts[i + 1]))

    def between(self, start: int, stop: int) -> bytes:
        return bytes(self._bytes[start:stop])


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a search asks for: rows with text in a scope, a density within [low, high], perhaps only live ones."""

    text: str = ""
    scope: str = "any"
    low: float | None = None
    high: float | None = None
    live: bool = False

    @property
    def searched(self) -> str:
        """The text in lower case, with the signs that the page shows for white space as what they stand for."""
        text = self.text.lower().replace("\u00b7", " ").replace("\u21b5", "\n")
        return text if text.strip() or "\n" in text else ""


class FeatureTable:
    """An index that was opened; safe for threads. Its files may be deleted meanwhile.

    Attributes:
        source: the features.json.gz, for messages.
        key: the index's name: another one for another state of the file.
        head: what the file says beside its features: hook_point, model, d_sae, n_tokens, step.
        ids, density, strongest: [F], in the file's order.
        dead: how many never fired.

    Raises:
        DataError: the index is damaged.
    """

    def __init__(self, source: Path, index: Path):
        self.source, self.key = source, index.name
        self.head = read_json(index / "index.json")
        try:
            if self.head["version"] != VERSION:
                raise ValueError(f"it is of version {self.head['version']}")
            columns = {name: np.load(index / f"{name}.npy", allow_pickle=False) for name in COLUMNS}
            self._pieces = {name: _Pieces(index, name) for name in ("features", "vocab", "top", *SCOPES)}
            count = int(self.head["features"])
            lengths = {
                len(one) for one in (*columns.values(), *(self._pieces[n] for n in ("features", "top", *SCOPES)))
            }
            if lengths != {count}:
                raise ValueError(f"it should have {count} rows, and has {sorted(lengths)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"The index {index} is damaged ({error}); delete it.") from None
        self.ids, self.density, self.strongest, rank = (columns[name] for name in COLUMNS)
        self._columns = dict(zip(SORTS, (self.ids, self.density, np.abs(self.strongest), rank), strict=True))
        self._starts: dict[str, list[int]] = {}
        self.dead = int((~(self.density > 0)).sum())
        self._by_id = np.argsort(self.ids, kind="stable")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bytes(self) -> int:
        """Of memory, without what is mapped."""
        return 6 * 8 * len(self) + sum(8 * len(self._pieces[name].starts) for name in SCOPES)

    def row_of(self, feature: int) -> int | None:
        """The row of a feature by its number; None where the table does not have it."""
        at = int(np.searchsorted(self.ids, feature, sorter=self._by_id))
        if at == len(self) or self.ids[self._by_id[at]] != feature:
            return None
        return int(self._by_id[at])

    def rows_of(self, features: Iterable[int]) -> np.ndarray:
        """The rows of those features that the table has."""
        rows = [row for feature in features if (row := self.row_of(feature)) is not None]
        return np.asarray(rows, np.int64)

    def top(self, row: int) -> str | None:
        """The token that a feature promotes most."""
        return self._pieces["top"][row].decode() or None

    def feature(self, row: int) -> tuple[list[str], dict[str, Any]]:
        """(vocab, the feature as features.json.gz has it, with its token ids numbered in this vocab).

        Raises:
            DataError: it is not what a page can show; names the file.
        """
        try:
            feature = parsed(zlib.decompress(self._pieces["features"][row]))
        except (ValueError, zlib.error) as error:
            raise DataError(f"{self.source}, or its index, is damaged in row {row} ({error}). Make it again.") from None
        check_feature(self.source, feature, len(self._pieces["vocab"]))
        numbers: dict[int, int] = {}

        def number(token: Any) -> Any:
            return token if isinstance(token, str) else numbers.setdefault(token, len(numbers))

        parts = feature.get("quantiles") or []
        for example in (*(feature.get("examples") or []), *(e for part in parts for e in part["examples"])):
            example["tokens"] = [number(token) for token in example["tokens"]]
        for key in ("top_logits", "bottom_logits"):
            feature[key] = [[number(token), value] for token, value in feature.get(key) or []]
        return [self._pieces["vocab"][token].decode() for token in numbers], feature

    def order(self, column: str, down: bool) -> np.ndarray:
        """All rows by one of SORTS, [F]; equal ones by their number, rising."""
        values = self._columns[column]
        return np.lexsort((self.ids, -values if down else values)).astype(np.int32)

    def matching(self, wanted: Wanted, more: np.ndarray) -> np.ndarray:
        """Whether each row is wanted, bool [F].

        Args:
            more: rows that have the text elsewhere, in what was said of them since the index was made.
        """
        found = np.ones(len(self), bool)
        if wanted.live:
            found &= self.density > 0
        if wanted.low is not None:
            found &= self.density >= wanted.low
        if wanted.high is not None:
            found &= self.density <= wanted.high
        if text := wanted.searched:
            has = np.zeros(len(self), bool)
            has[more] = True
            number = text.strip().removeprefix("#")
            if number.isdecimal() and len(number) < 19 and (row := self.row_of(int(number))) is not None:
                has[row] |= str(int(number)) == number
            if wanted.scope in SCOPES and "\0" not in text:
                has[self._containing(wanted.scope, text)] = True
            found &= has
        return found

    def _containing(self, scope: str, text: str) -> list[int]:
        """The rows whose text of a scope has `text` in it."""
        pieces, word = self._pieces[scope], text.encode(errors="replace")
        if scope not in self._starts:
            self._starts[scope] = pieces.starts.tolist()  # bisect is faster on a list
        starts = self._starts[scope]
        row, rows = 0, []
        while row < len(pieces):
            first = starts[row]
            beyond = max(row + 1, bisect.bisect_right(starts, first + _WINDOW) - 1)
            window, at = pieces.between(first, starts[beyond]), 0
            while (at := window.find(word, at)) >= 0:
                # The next feature, as it is for words that most have, or one further on.
                row = row if first + at < starts[row + 1] else bisect.bisect_right(starts, first + at, row + 1) - 1
                rows.append(row)
                row += 1
                at = starts[row] - first
            row = beyond
        return rows
