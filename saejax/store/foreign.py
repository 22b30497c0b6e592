"""Activations that others wrote, read piece by piece: .npy, .npz, .safetensors, .pt, .parquet and .arrow files.

A file holds [tokens, d] or [sequences, positions, d] for one hook point or several, and integers beside them. The sizes
that a header declares are compared with the file's length before anything is mapped or allocated. Nothing is ever
unpickled.
"""

import abc
import ast
import functools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from saejax.core.archives import ZIP_DAMAGE, StoredTensor, opened_zip, stored_offset
from saejax.core.errors import ConfigError, DataError
from saejax.core.extras import installing
from saejax.core.torch_file import stored_tensors
from saejax.store.layout import BF16

_NPY_MAGIC = b"\x93NUMPY"
_NPY_HEADER_BYTES = 1 << 14
_SAFETENSORS_HEADER_BYTES = 100_000_000
_SAFETENSORS = {
    **{f"F{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    **{f"I{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
    "BF16": BF16,
    "BOOL": np.dtype(np.bool_),
}
_ARROW_END = b"\xff" * 4 + b"\0" * 4
_DAMAGE = (ValueError, SyntaxError, TypeError, LookupError, AttributeError, MemoryError, RecursionError, struct.error)


def open_tensors(path: Path, name: str) -> "Tensors":
    """The tensors of a file, by its ending; `name` is that of an array without one (.npy, a bare tensor in .pt).

    Raises:
        ConfigError: another ending, or pyarrow is not installed.
        DataError: the file cannot be read, is damaged or contradicts its header; names it.
    """
    if path.suffix not in _OPENERS:
        raise ConfigError(f"{path} ends in {path.suffix!r}; activations are read from {', '.join(ENDINGS)}.")
    try:
        return _OPENERS[path.suffix](path, name)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


class Kind(NamedTuple):
    """Axes of a tensor and the type of its numbers, as in float32."""

    axes: int
    dtype: str

    @property
    def floats(self) -> bool:
        """It may hold activations."""
        return self.axes in (2, 3) and self.dtype in ("float16", "float32", "float64", "bfloat16")

    @property
    def integers(self) -> bool:
        """It may hold token ids, documents, positions or a mask."""
        return self.axes in (1, 2) and self.dtype.startswith(("int", "uint", "bool"))


class Column(NamedTuple):
    """A tensor of a file as rows: activations [..., d], flattened but for d, or integers."""

    path: Path
    tensors: "Tensors"
    name: str
    shape: tuple[int, ...]
    width: int  # 0: integers

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes that are flattened to rows."""
        return self.shape[:-1] if self.width else self.shape

    @property
    def rows(self) -> int:
        return math.prod(self.lead)

    def read(self, low: int, high: int) -> np.ndarray:
        """Rows [low, high) of a mapped tensor."""
        assert isinstance(self.tensors, Arrays), "a table is read in pieces"
        each = math.prod(self.lead[1:])
        first, last = low // each, -(-high // each)
        try:
            mapped = self.tensors.stored[self.name].map(self.path)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{self.path} changed while it was read ({error}). Run the command again.") from None
        flat = mapped[first:last].reshape(-1, *self.shape[len(self.lead) :])
        return flat[low - first * each : high - first * each]


class Arrays:
    """Tensors that lie in a file as they are. They are mapped when a piece is read, and not kept open.

    Args:
        stored: by name.
        others: kinds of tensors that are there and cannot be read.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], others: Mapping[str, Kind] | None = None) -> None:
        self.stored = stored
        kinds = {name: Kind(len(tensor.shape), tensor.dtype.name) for name, tensor in stored.items()}
        self.kinds = kinds | dict(others or {})

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[name].shape


def _open_npy(path: Path, name: str) -> Arrays:
    try:
        with path.open("rb") as handle:
            tensor = _npy_header(handle)
    except _DAMAGE as error:
        raise DataError(f"{path} is no readable .npy file: {error}.") from None
    wanted, there = math.prod(tensor.shape) * tensor.dtype.itemsize, path.stat().st_size - tensor.offset
    if wanted != there:
        raise DataError(
            f"{path} says it holds {list(tensor.shape)} {tensor.dtype}, {wanted:,} bytes, but {there:,} follow."
        )
    return Arrays({name: tensor})


def _open_npz(path: Path, name: str) -> Arrays:
    stored = {}
    try:
        with opened_zip(path) as (archive, members):
            for member in members:
                begin = stored_offset(path, member)
                with archive.open(member) as handle:
                    tensor = _npy_header(handle)
                if math.prod(tensor.shape) * tensor.dtype.itemsize != member.file_size - tensor.offset:
                    raise ValueError(f"{member.filename} says it is {list(tensor.shape)}, its size is another")
                stored[member.filename.removesuffix(".npy")] = tensor._replace(offset=begin + tensor.offset)
    except (*ZIP_DAMAGE, *_DAMAGE) as error:
        raise DataError(f"{path} is no readable .npz file: {error}.") from None
    return Arrays(stored)


def _npy_header(handle: Any) -> StoredTensor:
    """The array of a handle at its beginning, without numpy's reader, which may allocate first."""
    magic = handle.read(8)
    if magic[:6] != _NPY_MAGIC or magic[6:7] not in (b"\x01", b"\x02", b"\x03"):
        raise ValueError("it does not begin as one")
    code = "<H" if magic[6] == 1 else "<I"
    (length,) = struct.unpack(code, handle.read(struct.calcsize(code)))
    if length > _NPY_HEADER_BYTES:
        raise ValueError(f"its header claims {length:,} bytes")
    header = ast.literal_eval(handle.read(length).decode("utf-8").strip())
    descr, shape, fortran = header["descr"], header["shape"], header["fortran_order"]
    if not isinstance(descr, str) or "O" in descr:
        raise ValueError(f"it holds {descr!r}: Python objects and records are never read")
    # What np.save makes of ml_dtypes.bfloat16: two bytes without a meaning.
    dtype = BF16 if descr in ("<V2", "|V2") else np.dtype(descr)
    if dtype != BF16 and (dtype.kind not in "fiub" or dtype.itemsize > 8):
        raise ValueError(f"it holds {descr!r}, not float16, float32, float64, bfloat16, integers or bool")
    if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"its shape is {shape!r}")
    # Column by column: each axis steps over all those before it.
    steps = tuple(math.prod(shape[:axis]) * dtype.itemsize for axis in range(len(shape))) if fortran else None
    return StoredTensor(dtype, shape, handle.tell(), steps)


def _open_safetensors(path: Path, name: str) -> Arrays:
    try:
        with path.open("rb") as handle:
            header, begin = _safetensors_header(handle, path.stat().st_size)
        stored, others = {}, {}
        for key, entry in header.items():
            shape, (low, high) = tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, low, high)):
                raise ValueError(f"{key!r} has shape {shape!r} at {low!r} to {high!r}")
            dtype = _SAFETENSORS.get(entry["dtype"])
            if dtype is None:
                others[key] = Kind(len(shape), str(entry["dtype"]))
                continue
            if math.prod(shape) * dtype.itemsize != high - low or begin + high > path.stat().st_size:
                raise ValueError(
                    f"{key!r} says it is {entry['dtype']}{list(shape)} in the bytes {low:,} to {high:,}, which does "
                    f"not fit its size or the file's {path.stat().st_size:,} bytes"
                )
            stored[key] = StoredTensor(dtype, shape, begin + low)
    except _DAMAGE as error:
        raise DataError(f"{path} is no readable .safetensors file: {error}.") from None
    return Arrays(stored, others)


def _safetensors_header(handle: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """(entries of the tensors by name, where their data begin)"""
    (length,) = struct.unpack("<Q", handle.read(8))
    if length > min(_SAFETENSORS_HEADER_BYTES, size - 8):
        raise ValueError(f"its header claims {length:,} bytes, the file has {size:,}")
    header = json.loads(handle.read(length))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def _open_torch(path: Path, name: str) -> Arrays:
    return Arrays({key or name: tensor for key, tensor in stored_tensors(path).items()})


class Table(abc.ABC):
    """Columns of numbers, or of lists of one length, one in another; pyarrow reads them, record by record.

    A reader of a format gives `_records`, the batches of some columns from a record on.
    """

    def __init__(self, path: Path, name: str) -> None:
        try:
            import pyarrow
        except ImportError:
            raise ConfigError(f"{path}: reading {path.suffix} needs pyarrow: {installing('data')}") from None
        self.path, self._failures = path, (pyarrow.ArrowException, OSError)
        try:
            schema, self.records = self._open()
        except self._failures as error:
            raise DataError(f"{path} is no readable {path.suffix} file: {_one_line(error)}.") from None
        self.kinds = {field.name: _kind_of(field.type) for field in schema}

    @abc.abstractmethod
    def _open(self) -> tuple[Any, int]:
        """(schema, records)"""

    @abc.abstractmethod
    def _records(self, names: list[str], first: int, count: int) -> Iterator[Any]:
        """Batches of at most `count` records from `first` on, which have the columns `names`."""

    def shape(self, name: str) -> tuple[int, ...]:
        """[records, ...], as the first record is."""
        tail: list[int] = []
        for batch in self._batches([name], 0, 1):
            values = _storage(batch.column(name))
            while len(tail) < self.kinds[name].axes - 1:
                values = values.flatten()
                tail.append(len(values) // math.prod(tail))
            break
        return (self.records, *tail)

    def pieces(self, columns: Mapping[str, Column], start: int, size: int) -> Iterator[dict[str, np.ndarray]]:
        """Rows of `columns`, which have as many, from `start` on: about `size` at once."""
        each = next(iter(columns.values())).rows // self.records
        record, skip = divmod(start, each)
        names = list(dict.fromkeys(column.name for column in columns.values()))
        for batch in self._batches(names, record, max(1, size // each)):
            yield {target: self._dense(batch, column, record)[skip:] for target, column in columns.items()}
            record, skip = record + batch.num_rows, 0

    def _batches(self, names: list[str], first: int, count: int) -> Iterator[Any]:
        record = first
        try:
            for batch in self._records(names, first, count):
                batch.validate(full=True)  # lists that lead out of their numbers
                yield batch
                record += batch.num_rows
        except self._failures as error:
            raise DataError(f"{self.path} is damaged at row {record:,} or behind: {_one_line(error)}.") from None

    def _dense(self, batch: Any, column: Column, record: int) -> np.ndarray:
        values = _storage(batch.column(column.name))
        for length in column.shape[1:]:
            fixed = not hasattr(values, "value_lengths")
            lengths = np.array([values.type.list_size]) if fixed else np.asarray(values.value_lengths())
            if values.null_count or (lengths != length).any():
                raise self._ragged(column, record, batch)
            values = values.flatten()
        if values.null_count:
            raise self._ragged(column, record, batch)
        flat: np.ndarray = values.to_numpy(zero_copy_only=False)
        return flat.reshape(-1, column.width) if column.width else flat

    def _ragged(self, column: Column, record: int, batch: Any) -> DataError:
        lengths = ", ".join(map(str, column.shape[1:]))
        every = f"every list must hold {lengths} numbers and " if lengths else ""
        return DataError(
            f"{self.path}: column {column.name!r}, rows {record:,} to {record + batch.num_rows:,}: {every}nothing may "
            "be missing."
        )


class Parquet(Table):
    """A .parquet file."""

    def _open(self) -> tuple[Any, int]:
        from pyarrow import parquet

        self._reader = functools.partial(parquet.ParquetFile, self.path)
        with self._reader() as file:
            return file.schema_arrow, file.metadata.num_rows

    def _records(self, names: list[str], first: int, count: int) -> Iterator[Any]:
        row = 0
        with self._reader() as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                end = row + rows
                if end <= first:
                    row = end
                    continue
                for batch in file.iter_batches(count, row_groups=[group], columns=names):
                    before = max(0, first - row)  # rows of this batch that lie before `first`
                    if before < batch.num_rows:
                        yield batch.slice(before)
                    row += batch.num_rows
                if row != end:
                    held = row - end + rows
                    raise DataError(f"{self.path}: its row group {group} says {rows:,} rows and holds {held:,}.")


class ArrowStream(Table):
    """An .arrow file, as `datasets` saves it and as pyarrow.ipc writes it; the numbers are mapped."""

    def _open(self) -> tuple[Any, int]:
        from pyarrow import ipc, memory_map

        with self.path.open("rb") as handle:
            seekable = handle.read(6) == b"ARROW1"
            handle.seek(max(0, self.path.stat().st_size - len(_ARROW_END)))
            if not seekable and handle.read() != _ARROW_END:  # else a cut one would only be shorter
                raise OSError("its end is missing")
        self._reader: Callable[[], Any] = lambda: (ipc.open_file if seekable else ipc.open_stream)(
            memory_map(str(self.path))
        )
        return self._reader().schema, sum(batch.num_rows for batch in self._stored())

    def _stored(self) -> Iterator[Any]:
        reader = self._reader()
        if hasattr(reader, "num_record_batches"):
            return (reader.get_batch(number) for number in range(reader.num_record_batches))
        return iter(reader)

    def _records(self, names: list[str], first: int, count: int) -> Iterator[Any]:
        row = 0
        for batch in self._stored():
            columns = batch.select(names)
            for low in range(max(0, first - row), batch.num_rows, count):
                yield columns.slice(low, count)
            row += batch.num_rows


Tensors = Arrays | Table
_OPENERS: dict[str, Callable[[Path, str], Tensors]] = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".safetensors": _open_safetensors,
    **dict.fromkeys((".pt", ".pth"), _open_torch),
    ".parquet": Parquet,
    ".arrow": ArrowStream,
}
ENDINGS = tuple(_OPENERS)


def _kind_of(kind: Any) -> Kind:
    """Axes and numbers of a column of pyarrow's type."""
    from pyarrow import types

    axes, kind = 1, getattr(kind, "storage_type", kind)
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        axes, kind = axes + 1, kind.value_type
    numbers = types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)
    return Kind(axes, np.dtype(kind.to_pandas_dtype()).name if numbers else str(kind))


def _storage(column: Any) -> Any:
    """The lists of a column; `datasets` has a type of its own for arrays of two axes."""
    return getattr(column, "storage", column)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
