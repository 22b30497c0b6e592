"""Rows of files of text, by their endings: from the first on, one after the other."""

import contextlib
import csv
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from saejax.core.errors import DataError
from saejax.core.extras import installing
from saejax.text.compressed import LONGEST, lines_of, longest, opened_bytes, opened_text, pieces_of, too_long
from saejax.text.paths import kind_of, short, shown

# What stands between two values of a list, before the first and behind the last.
_BETWEEN = re.compile(r"\s*([,\]]?)\s*")
_JSON_PIECE = 1 << 20


def read_rows(path: Path, by_line: bool = False) -> Iterator[dict[str, Any] | str]:
    """The rows of a file; a text where it has no columns. A .txt is one text; `by_line` one for each line.

    Raises:
        DataError: it cannot be read, or is not what its ending says; the message names it.
    """
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    readers[".tsv"] = functools.partial(_read_csv, delimiter="\t")
    with readable(path):
        if reader := readers.get(kind_of(path)):
            yield from reader(path)
        elif by_line:
            yield from (line.removesuffix("\n") for line in _text(path, lines_of))
        else:
            yield "".join(_text(path, pieces_of))


def _text(path: Path, parts: Callable[[Path, TextIO], Iterator[str]], newline: str | None = None) -> Iterator[str]:
    """The lines, each with its end, or the pieces of a file of UTF-8, without a byte order mark in front.

    Raises:
        DataError: a byte that is no UTF-8, or a NUL, which text has none of; names the byte.
    """
    with _utf8(path), opened_text(path, newline) as handle:
        for part in parts(path, handle):
            if "\0" in part:
                raise _not_text(path)
            yield part


@contextlib.contextmanager
def _utf8(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise _not_text(path) from None


def _not_text(path: Path) -> DataError:
    before = 0
    with opened_bytes(path) as handle:
        for raw in lines_of(path, handle):
            try:
                raw.decode()
                at = raw.find(b"\0")
            except UnicodeDecodeError as error:
                at = raw.find(b"\0", 0, error.start) if b"\0" in raw[: error.start] else error.start
            if at >= 0:
                return DataError(
                    f"{shown(path)} is not UTF-8 text: byte {before + at:,} is 0x{raw[at]:02x}. Convert it, as by "
                    "iconv -t UTF-8 -f <its encoding>, or leave it out of text.paths."
                )
            before += len(raw)
    return DataError(f"{shown(path)} changed while it was read. Run the command again.")


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with opened_bytes(path) as handle:
        for number, line in enumerate(lines_of(path, handle), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number without end, too deep
                raise DataError(f"{shown(path)}, line {number} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise DataError(f"{shown(path)}, line {number} is a {kind}, not an object with columns.")
            yield row


def _read_json(path: Path) -> Iterator[dict[str, Any] | str]:
    """The values of a list, objects or texts. One of them and a piece of the file are in memory."""
    with _utf8(path), opened_text(path) as handle:
        text = handle.read(_JSON_PIECE).lstrip()
        if not text.startswith("["):
            raise DataError(f"{shown(path)} holds no list; name a file of one object a line .jsonl.")
        decode, at, number = json.JSONDecoder().raw_decode, 1, 1
        while (between := cast(re.Match[str], _BETWEEN.match(text, at)))[1] != "]":
            try:
                if bool(between[1]) != (number > 1):
                    raise ValueError("Expecting ',' or the end of the list")
                value, after = decode(text, between.end())
            except (ValueError, RecursionError) as error:  # it may only be cut where the piece ends
                piece = "" if isinstance(error, RecursionError) else handle.read(max(_JSON_PIECE, len(text) - at))
                if not piece or len(text) - at > LONGEST:
                    why = getattr(error, "msg", error)
                    raise DataError(f"{shown(path)}, record {number} is not JSON, or the file is cut: {why}.") from None
                text, at = text[at:] + piece, 0
                continue
            if not isinstance(value, dict | str):
                kind = type(value).__name__
                raise DataError(f"{shown(path)}, record {number} is a {kind}, not an object with columns or a text.")
            yield value
            at, number = after, number + 1
        if (text[between.end() :] + handle.read(_JSON_PIECE)).strip():
            raise DataError(f"{shown(path)} goes on behind its list of {number - 1:,} records. Write it as one list.")


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[dict[str, Any]]:
    """The rows below the first, which names the columns."""
    left = most = longest(path)
    csv.field_size_limit(max(csv.field_size_limit(), most))  # of Python 128 KB, for the whole process

    def lines() -> Iterator[str]:
        nonlocal left
        for line in _text(path, lines_of, newline=""):
            left -= len(line)
            if left < 0:
                raise too_long(path, f"the row that holds line {reader.line_num + 1}")
            yield line

    reader = csv.reader(lines(), strict=True, delimiter=delimiter)
    head: list[str] = []
    try:
        for values in filter(None, reader):  # a blank line has none
            left = most
            if head and len(values) != len(head):
                raise DataError(
                    f"{shown(path)}, line {reader.line_num} ends a row of {len(values)} fields; its first has "
                    f"{len(head)}."
                )
            if head:
                yield dict(zip(head, values, strict=True))
            elif len(set(values)) < len(values):
                raise DataError(
                    f"{shown(path)} names a column twice: {column_names(dict.fromkeys(values))}. Rename one."
                )
            head = head or values
    except csv.Error as error:
        raise DataError(f"{shown(path)}, line {reader.line_num} is not CSV: {error}.") from None


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"Reading {shown(path)} needs pyarrow: {installing('data')}") from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"{shown(path)} is not a readable parquet file: {why}") from None


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises DataError, naming the file, where it cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{shown(path)} cannot be read: {error.strerror or error}. Mend it, or leave it out of text.paths."
        ) from None


def column_names(row: Mapping[str, Any]) -> str:
    """Its columns for a message."""
    return short(", ".join(name if name.isprintable() else repr(name) for name in map(str, row)))
