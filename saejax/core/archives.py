"""Zips and other files of tensors that strangers wrote, looked at before memory is taken for them."""

import contextlib
import io
import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from saejax.core.errors import DataError

MOST_TENSORS = 4096
LONGEST_HEADER = MOST_TENSORS << 8  # a name and a shape for each
# What zipfile raises; the last two for a compression that it does not have, and for a member that is encrypted.
ZIP_DAMAGE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError)
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class StoredTensor(NamedTuple):
    """A tensor in a file, of which nothing is read yet: where its numbers begin, and its strides in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...] | None = None  # one row after the other

    def map(self, path: Path) -> np.ndarray:
        """The numbers, mapped: a page is read when it is used. Raises what numpy does where the file is too short."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, np.memmap(path, np.uint8, "r"), self.offset, self.strides)


def check_size(path: Path, n_bytes: int) -> None:
    """Raises DataError where so many bytes would not fit into this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n_bytes > memory:
        raise DataError(
            f"{path} says that it holds {n_bytes / 1e9:,.0f} GB of numbers; this machine has {memory / 1e9:,.0f} GB. "
            "The file is damaged, or needs a larger machine."
        )


class _Short(io.FileIO):
    """A file that is not read further at once than `LONGEST_HEADER` bytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > LONGEST_HEADER:
            raise DataError(f"{self.name} has a directory of {size:,} bytes; a dictionary's is shorter.")
        return super().read(size)


@contextlib.contextmanager
def opened_zip(path: Path) -> Iterator[tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]]:
    """(the zip, its members).

    Raises:
        DataError: its list of members alone would take seconds, or there are more than `MOST_TENSORS`.
        One of `ZIP_DAMAGE`: it is damaged.
    """
    with _Short(path) as handle, zipfile.ZipFile(handle):
        pass
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > MOST_TENSORS:
            raise DataError(f"{path} holds {len(members):,} arrays; at most {MOST_TENSORS:,} are read.")
        yield archive, members


def check_regular(path: Path) -> None:
    """Raises DataError for what is no file: a pipe would be waited on for ever."""
    if not path.is_file():
        raise DataError(f"{path} {'is not a file' if path.exists() else 'does not exist'}.")


def stored_offset(path: Path, member: zipfile.ZipInfo) -> int:
    """The place in the zip at which the bytes of a member begin, which is not compressed.

    Raises:
        DataError: it is compressed, or does not lie within the file; names both.
    """
    if member.compress_type != zipfile.ZIP_STORED:
        raise DataError(f"{path}: {member.filename!r} is compressed. Save it as it is, as by np.savez.")
    with path.open("rb") as handle:
        handle.seek(member.header_offset)
        start = handle.read(_LOCAL_HEADER.size)
    magic, name, extra = _LOCAL_HEADER.unpack(start.ljust(_LOCAL_HEADER.size, b"\0"))
    offset = member.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
    if magic != b"PK\x03\x04" or offset + member.file_size > path.stat().st_size:
        raise DataError(f"{path}: {member.filename!r} does not lie where the zip says. The file is damaged.")
    return offset
