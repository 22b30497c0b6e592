"""The header of a GGUF file: its metadata and where each tensor lies. No count in it is believed without room for it.

magic "GGUF", version 2 or 3, number of tensors, number of keys
each key:     name, type, value
each tensor:  name, dimensions (fastest first), type, offset
numbers of the tensors, from the next multiple of general.alignment
"""

import dataclasses
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_DIMENSIONS, _DEEPEST_ARRAY = 4, 4
_STRING, _ARRAY = 8, 9
# The scalars by their number in the file; a string and an array stand between them.
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor as the file holds it.

    Attributes:
        shape: slowest dimension first, as numpy has it.
        kind: number of the quantization.
        start: its first byte in the file.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Metadata {key: number, text or list} and {name: tensor} of a file."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Stored]

    def text(self, key: str, default: str = "") -> str:
        """A text of the metadata. Raises DataError where it is something else."""
        value = self.fields.get(key, default)
        if not isinstance(value, str):
            raise DataError(f"{self.path}: {key} is {str(value)[:100]!r}; it must be a text.")
        return value


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file; none of its tensors.

    Raises:
        DataError: it is no GGUF file of version 2 or 3, it ends early, or a number in it has no room in the file.
    """
    try:
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(path, content).header()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise DataError(f"{path} cannot be read as a GGUF file: {error}") from None


class _Reader:
    """The bytes of a file, taken in order; what reaches beyond its end is refused."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 0

    def header(self) -> Header:
        magic, version = self._take(4), self._number("<u4")
        if magic != _MAGIC:
            raise DataError(f"{self._path} is no GGUF file: it does not begin with {_MAGIC.decode()}.")
        if version not in _VERSIONS:
            raise DataError(
                f"{self._path} is a GGUF file of version {version}; versions 2 and 3 with the lowest byte first are "
                "read. Convert it with a newer llama.cpp."
            )
        n_tensors, n_keys = self._count(8 + 4 + 4 + 8), self._count(8 + 4 + 1)
        fields = dict(self._field() for _ in range(n_keys))
        infos = [self._info() for _ in range(n_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise self._wrong(f"general.alignment is {alignment!r}")
        first = -(-self._at // alignment) * alignment
        tensors = {name: Stored(shape, kind, first + offset) for name, shape, kind, offset in infos}
        if len(tensors) < n_tensors:
            raise self._wrong("two tensors have one name")
        return Header(self._path, fields, tensors)

    def _wrong(self, why: str) -> DataError:
        return DataError(f"{self._path} is not a usable GGUF file: {why} (byte {self._at:,}). Fetch it again.")

    def _take(self, n: int) -> bytes:
        if n > len(self._content) - self._at:
            raise self._wrong(f"it ends after {len(self._content):,} bytes, where {n:,} more are announced")
        self._at += n
        return self._content[self._at - n : self._at]

    def _number(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _count(self, least: int) -> int:
        """A number of things that take at least so many bytes each."""
        count: int = self._number("<u8")
        if count * least > len(self._content) - self._at:
            raise self._wrong(f"{count:,} entries have no room in its {len(self._content):,} bytes")
        return count

    def _text(self) -> str:
        return self._take(self._count(1)).decode(errors="surrogateescape")

    def _field(self) -> tuple[str, Any]:
        name, kind = self._text(), self._number("<u4")
        return name, self._value(kind, 0)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth == _DEEPEST_ARRAY:
            raise self._wrong(f"a value of type {kind}, {depth} arrays deep")
        kind = self._number("<u4")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self._take(self._count(dtype.itemsize) * dtype.itemsize), dtype).tolist()
        return [self._value(kind, depth + 1) for _ in range(self._count(8))]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, n = self._text(), self._number("<u4")
        if not 1 <= n <= _MOST_DIMENSIONS:
            raise self._wrong(f"tensor {name[:80]!r} has {n} dimensions")
        shape = tuple(self._number("<u8") for _ in range(n))[::-1]
        if not 0 < math.prod(shape) < 1 << 48:
            raise self._wrong(f"tensor {name[:80]!r} has the shape {shape}")
        return name, shape, self._number("<u4"), self._number("<u8")
