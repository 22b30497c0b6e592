"""Activations that others wrote: [N, d] in .npy, .safetensors and .parquet files, read piece by piece.

The sizes that a header declares are compared with the file's length before anything is mapped or allocated. Nothing is
ever unpickled.
"""

import ast
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.core.places import what_is
from saejax.store.layout import BF16, METADATA_NAMES

_NPY_MAGIC = b"\x93NUMPY"
_NPY_HEADER_BYTES = 1 << 14
_SAFETENSORS_HEADER_BYTES = 100_000_000
_SAFETENSORS = {
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{f"I{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
    "BF16": BF16,
}

Piece = tuple[np.ndarray, dict[str, np.ndarray]]


def open_foreign(path: str | os.PathLike[str], tensor: str = "") -> "ForeignRows":
    """The activations in a file, by its ending: .npy, .safetensors, .parquet.

    Args:
        path: of the file.
        tensor: name of the tensor or column; by default the only one that can be meant: two-dimensional, of floats
            (a column: lists of floats).

    Returns:
        The file's N and d (`n_rows`, `width`), which of token_id, document and position it has too (`metadata`), and
        its rows from one on in order: `pieces(start, size)` gives (float [n, d], {name: integers [n]}), n <= size.

    Raises:
        ConfigError: another ending, a name for a .npy file, or pyarrow is not installed.
        DataError: the file is missing or damaged or contradicts its header; the tensor does not exist, or several could
            be meant.
    """
    path = Path(path)
    openers: dict[str, Callable[[Path, str], ForeignRows]] = {
        ".npy": _open_npy,
        ".safetensors": _open_safetensors,
        ".parquet": ParquetRows,
    }
    if path.suffix not in openers and (path.suffix or path.is_file()):
        raise ConfigError(f"{path} ends in {path.suffix!r}; activations are read from {', '.join(openers)}.")
    if not path.is_file():
        raise DataError(f"{path} is no file: {what_is(path)}. Name files of activations.")
    try:
        rows = openers[path.suffix](path, tensor)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if rows.n_rows < 1 or rows.width < 1:
        raise DataError(f"{path} holds [{rows.n_rows}, {rows.width}] activations: there is nothing to import.")
    return rows


class MappedRows:
    """Activations and metadata as memory maps: pages are read when a piece is, and never kept."""

    def __init__(self, activations: np.ndarray, metadata: dict[str, np.ndarray]) -> None:
        self.n_rows, self.width = activations.shape
        self.metadata = tuple(metadata)
        self._activations, self._metadata = activations, metadata

    def pieces(self, start: int, size: int) -> Iterator[Piece]:
        for low in range(start, self.n_rows, size):
            piece = slice(low, min(self.n_rows, low + size))
            yield self._activations[piece], {name: np.asarray(values[piece]) for name, values in self._metadata.items()}


def _open_npy(path: Path, tensor: str) -> MappedRows:
    if tensor:
        raise ConfigError(f"{path}: an .npy file holds one array without a name; leave out --tensor={tensor}.")
    try:
        dtype, shape, fortran, offset = _npy_header(path)
    except (ValueError, SyntaxError, TypeError, LookupError, MemoryError, RecursionError, struct.error) as error:
        raise DataError(f"{path} is no readable .npy file: {error}.") from None
    if len(shape) != 2:
        raise DataError(f"{path} has shape {list(shape)}; activations are [N, d].")
    wanted, there = math.prod(shape) * dtype.itemsize, path.stat().st_size - offset
    if wanted != there:
        raise DataError(f"{path} says it holds {list(shape)} {dtype}, {wanted:,} bytes, but {there:,} follow.")
    return MappedRows(_mapped(path, dtype, shape, offset, "F" if fortran else "C"), {})


def _npy_header(path: Path) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """(dtype, shape, column by column, where the data begin), without numpy's reader, which may allocate first."""
    with path.open("rb") as handle:
        magic = handle.read(8)
        if magic[:6] != _NPY_MAGIC or magic[6:7] not in (b"\x01", b"\x02", b"\x03"):
            raise ValueError("it does not begin as one")
        code = "<H" if magic[6] == 1 else "<I"
        (length,) = struct.unpack(code, handle.read(struct.calcsize(code)))
        if length > _NPY_HEADER_BYTES:
            raise ValueError(f"its header claims {length:,} bytes")
        header = ast.literal_eval(handle.read(length).decode("utf-8").strip())
        offset = handle.tell()
    descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
    if not isinstance(descr, str) or "O" in descr:
        raise ValueError(f"it holds {descr!r}: Python objects and records are never read")
    # What np.save makes of ml_dtypes.bfloat16: two bytes without a meaning.
    dtype = BF16 if descr in ("<V2", "|V2") else np.dtype(descr)
    if dtype != BF16 and (dtype.kind != "f" or dtype.itemsize not in (2, 4, 8)):
        raise ValueError(f"it holds {descr!r}, not float16, float32, float64 or bfloat16")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its shape is {shape!r}")
    return dtype, shape, bool(fortran), offset


def _open_safetensors(path: Path, tensor: str) -> MappedRows:
    try:
        tensors = _safetensors_header(path)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
        raise DataError(f"{path} is no readable .safetensors file: {error}.") from None
    floats = [
        name for name, (dtype, shape, _) in tensors.items() if len(shape) == 2 and (dtype == BF16 or dtype.kind == "f")
    ]
    name = chosen(path, "two-dimensional tensor of floats", floats, tensor)
    dtype, shape, offset = tensors[name]
    metadata = {}
    for key in METADATA_NAMES:
        if key in tensors and key != name:
            kind, size, at = tensors[key]
            if size != shape[:1] or kind.kind not in "iu":
                raise DataError(f"{path}: {key} is {kind}{list(size)}; it must be integers [{shape[0]}].")
            metadata[key] = _mapped(path, kind, size, at) if shape[0] else np.zeros(0, np.int32)
    return MappedRows(_mapped(path, dtype, shape, offset), metadata)


def _safetensors_header(path: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    """name -> (dtype, shape, where its data begin), each checked to lie within the file."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > min(_SAFETENSORS_HEADER_BYTES, size - 8):
            raise ValueError(f"its header claims {length:,} bytes, the file has {size:,}")
        header = json.loads(handle.read(length))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in _SAFETENSORS:
            continue
        dtype, shape, (low, high) = _SAFETENSORS[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, low, high)):
            raise ValueError(f"{name!r} has shape {shape!r} at {low!r} to {high!r}")
        if math.prod(shape) * dtype.itemsize != high - low or 8 + length + high > size:
            raise ValueError(
                f"{name!r} says it is {entry['dtype']}{list(shape)} in the bytes {low:,} to {high:,}, which does not "
                f"fit its size or the file's {size:,} bytes"
            )
        tensors[name] = (dtype, shape, 8 + length + low)
    return tensors


class ParquetRows:
    """A column of lists of floats, all of one length, and columns of integers beside it; pyarrow reads it."""

    def __init__(self, path: Path, tensor: str) -> None:
        try:
            import pyarrow.parquet
            from pyarrow import types
        except ImportError:
            raise ConfigError(f"{path}: reading .parquet needs pyarrow; install saejax[data].") from None
        self._path, self._failures = path, (pyarrow.ArrowException, OSError)
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except self._failures as error:
            raise DataError(f"{path} is no readable .parquet file: {error}.") from None
        schema = self._file.schema_arrow
        is_one = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        lists = [field for field in schema if any(is_kind(field.type) for is_kind in is_one)]
        floats = [field.name for field in lists if types.is_floating(field.type.value_type)]
        self._column = chosen(path, "column of lists of floats", floats, tensor)
        self.metadata = tuple(name for name in METADATA_NAMES if name in schema.names and name != self._column)
        self.n_rows: int = self._file.metadata.num_rows
        self.width = 0
        first = next(self.pieces(0, 1), None)
        if first is not None:
            self.width = first[0].shape[1]

    def pieces(self, start: int, size: int) -> Iterator[Piece]:
        row = 0
        for group in range(self._file.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            end = row + rows
            if end <= start:
                row = end
                continue
            try:
                for batch in self._file.iter_batches(size, row_groups=[group], columns=[self._column, *self.metadata]):
                    before = max(0, start - row)  # rows of this batch that lie before `start`
                    if before < batch.num_rows:
                        yield self._arrays(batch.slice(before), row + before)
                    row += batch.num_rows
            except self._failures as error:
                raise DataError(f"{self._path} is damaged at row {row:,} or behind: {error}.") from None
            if row != end:
                held = row - end + rows
                raise DataError(f"{self._path}: its row group {group} says {rows:,} rows and holds {held:,}.")

    def _arrays(self, batch: Any, row: int) -> Piece:
        column = batch.column(self._column)
        flat = column.flatten()
        n = len(column)
        width = self.width or len(flat) // n
        lengths = np.asarray(column.value_lengths()) if hasattr(column, "value_lengths") else np.full(n, len(flat) // n)
        if column.null_count or flat.null_count or (lengths != width).any():
            raise DataError(
                f"{self._path}: column {self._column!r}, rows {row:,} to {row + n:,}: every list must hold {width} "
                "numbers and nothing may be missing."
            )
        metadata = {}
        for name in self.metadata:
            values = batch.column(name)
            if values.null_count:
                raise DataError(f"{self._path}: column {name!r} has missing values in rows {row:,} to {row + n:,}.")
            metadata[name] = values.to_numpy(zero_copy_only=False)
        return flat.to_numpy(zero_copy_only=False).reshape(n, width), metadata


ForeignRows = MappedRows | ParquetRows


def chosen(path: Path, what: str, there: list[str], wanted: str) -> str:
    """The name asked for, or the only one there is.

    Raises:
        DataError: no such name, none at all, or several.
    """
    if wanted in there:
        return wanted
    names = ", ".join(map(repr, there[:20])) or "none"
    if wanted:
        raise DataError(f"{path} has no {what} {wanted!r}; it has: {names}.")
    if len(there) != 1:
        raise DataError(f"{path} has {len(there)} candidates for a {what}: {names}. Name one with --tensor.")
    return there[0]


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int, order: Any = "C") -> np.ndarray:
    if 0 in shape:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, order)
