"""Files of text that may be compressed (.gz, .zst), as streams: what is unpacked is never in memory as a whole."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from saejax.core.errors import DataError
from saejax.core.extras import installing
from saejax.text.paths import COMPRESSED, ending, shown

_PIECE = 1 << 16
# zstd makes up to 2^15 bytes of one, and gives all that it makes of its input at once.
_ZST_PIECE = 1 << 12
# What is unpacked may be a bomb: one line, one row or one document of it has at most so many bytes or letters.
LONGEST = 256 << 20


def opened_bytes(path: Path) -> BinaryIO:
    """The file's bytes, unpacked by its ending.

    Raises:
        DataError: as it is opened or read: it is damaged or cut, or zstandard is not installed; the message names it.
    """
    if not ending(path).endswith(COMPRESSED):
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(_Pieces(_unpacked(path)), _PIECE))


def opened_text(path: Path, newline: str | None = None) -> TextIO:
    """As `opened_bytes`, decoded from UTF-8 without a byte order mark; `newline` as of the function open."""
    return io.TextIOWrapper(opened_bytes(path), encoding="utf-8-sig", newline=newline)


def lines_of(path: Path, handle: Any) -> Iterator[Any]:
    """The lines of a handle of `path`, each with its end.

    Raises:
        DataError: a compressed file has a line of more than LONGEST bytes; names its number.
    """
    most = longest(path)
    for number in range(1, 1 << 62):
        line = handle.readline(most + 1)
        if not line:
            return
        if len(line) > most:
            raise too_long(path, f"line {number}")
        yield line


def pieces_of(path: Path, handle: TextIO) -> Iterator[str]:
    """All of a handle of `path`, piece by piece. Raises DataError as `lines_of` does, for the whole of it."""
    left = longest(path)
    while piece := handle.read(1 << 20):
        left -= len(piece)
        if left < 0:
            raise too_long(path, "one document,")
        yield piece


def longest(path: Path) -> int:
    """The bytes that one line or document may have. What is not compressed may be as long as its file."""
    return max(LONGEST, path.stat().st_size)


def too_long(path: Path, what: str) -> DataError:
    return DataError(
        f"{shown(path)}, {what} is unpacked longer than {LONGEST:,} bytes. Split it, or leave it out of text.paths."
    )


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _unpacked(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as handle:
            if not path.stat().st_size:
                raise EOFError("it is empty")
            if ending(path).endswith(".gz"):
                with gzip.GzipFile(fileobj=handle) as stream:
                    while piece := stream.read(_PIECE):
                        yield piece
            else:
                yield from _unpacked_zst(path, handle)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{shown(path)} is damaged or cut ({error}). Restore it, or leave it out of text.paths."
        ) from None


def _unpacked_zst(path: Path, handle: BinaryIO) -> Iterator[bytes]:
    """Raises EOFError where it is damaged or cut, which the library's streams do not tell from its end."""
    try:
        import zstandard
    except ImportError:
        raise DataError(f"Reading {shown(path)} needs zstandard: {installing('data')}") from None
    frame = None
    try:
        while raw := handle.read(_ZST_PIECE):
            while raw:
                if frame is None or frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(raw)
                raw = frame.unused_data
    except zstandard.ZstdError as error:
        raise EOFError(error) from None
    if frame is None or not frame.eof:
        raise EOFError("its end is missing")
