"""PyTorch's files of weights (.pt, .pth), read and written without torch; a pickle is read and never executed.

torch.save writes a zip: <name>/data.pkl, a pickle of containers, and <name>/data/<key>, the raw bytes of each storage.
The pickle is a program for a small stack machine. The machine here knows containers, strings, numbers and PyTorch's
tensors. It has no way to import or to call anything: a file that asks for more is refused, and says for what.
"""

import dataclasses
import math
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from saejax.core.archives import ZIP_DAMAGE, StoredTensor, check_regular, check_size, opened_zip, stored_offset
from saejax.core.errors import DataError

# A pickle of names and shapes: 250 bytes and 40 operations for each tensor.
_LARGEST_PICKLE, _MOST_OPERATIONS = 1 << 20, 200_000
# Tied weights share a storage.
_MOST_SHARED = 4
_TOO_LARGE = 1 << 62
_ZIP = b"PK\x03\x04"
_RESAVE = "If you trust who wrote it, load it with PyTorch and save its weights again, with torch.save or safetensors."
_TYPES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_DICT, _TENSOR, _PARAMETER = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)
_KNOWN = {_DICT, _TENSOR, _PARAMETER, *(f"torch.{name}" for name in _TYPES)}


def read_torch(path: Path) -> dict[str, Any]:
    """The dict that torch.save wrote: {name: array, str, number or such a dict}; arrays of floats become float32."""
    value = _run(path, mapped=False)
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}; weights are a dict of tensors (a state_dict).")
    return value


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the dict that torch.save wrote, of which nothing is read; "" names one without a dict."""
    value = _run(path, mapped=True)
    if isinstance(value, StoredTensor):
        return {"": value}
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}. Save a dict of names to tensors with torch.save.")
    return {name: tensor for name, tensor in value.items() if isinstance(tensor, StoredTensor)}


def _run(path: Path, mapped: bool) -> Any:
    pickled, prefix = _read_pickle(path)
    with zipfile.ZipFile(path) as archive:
        try:
            return _Machine(path, archive, prefix, mapped).run(pickled)
        except DataError:
            raise
        except (zipfile.BadZipFile, OSError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise DataError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]}).") from None
        except (EOFError, NotImplementedError, RuntimeError) as error:
            raise DataError(f"{path} is not readable ({type(error).__name__}: {str(error)[:200]}).") from None


def names_in(path: Path, *names: str) -> bool:
    """True where the file has all these names, in its pickle or, where that is damaged or old, at its beginning."""
    try:
        text, _ = _read_pickle(path)
    except DataError:
        if not path.is_file():
            return False
        with path.open("rb") as handle:
            text = handle.read(_LARGEST_PICKLE)
    return all(name.encode() in text for name in names)


def _read_pickle(path: Path) -> tuple[bytes, str]:
    """(the pickle, what stands before the names of the zip's members)"""
    check_regular(path)
    try:
        with path.open("rb") as handle:
            start = handle.read(len(_ZIP))
        if start != _ZIP:
            old = start[:1] == b"\x80"
            what = "was written by torch.save of before 1.6, as a bare pickle" if old else "is no file of torch.save"
            raise DataError(f"{path} {what}. {_RESAVE}")
        with opened_zip(path) as (archive, members):
            _check_members(path, members)
            names = {member.filename for member in members}
            pickles = [name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise DataError(f"{path} is a zip without one data.pkl: it is no file of torch.save.")
            prefix = pickles[0].removesuffix("data.pkl")
            if f"{prefix}constants.pkl" in names:
                raise DataError(f"{path} is a TorchScript program, which saejax does not run. Save its state_dict.")
            if f"{prefix}byteorder" in names and archive.read(f"{prefix}byteorder") != b"little":
                raise DataError(f"{path} was written on a big-endian machine. {_RESAVE}")
            if archive.getinfo(pickles[0]).file_size > _LARGEST_PICKLE:
                raise DataError(f"{path}: its data.pkl is larger than names and shapes of weights are. {_RESAVE}")
            return archive.read(pickles[0]), prefix
    except (*ZIP_DAMAGE, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable file of torch.save ({error}).") from None


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Every member is stored as it is, and all together are no longer than the file."""
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise DataError(f"{path}: {member.filename!r} is compressed, which torch.save never does.")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise DataError(f"{path}: its members say that they are longer than the file. It is damaged.")


@dataclasses.dataclass(frozen=True)
class _Global:
    """A name that the pickle would import."""

    name: str


@dataclasses.dataclass(frozen=True)
class _Storage:
    """The numbers of one or several tensors."""

    key: str
    dtype: np.dtype[Any]
    count: int


class _Machine:
    """The pickle machine, without imports and calls."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, prefix: str, mapped: bool) -> None:
        self.path, self.archive, self.prefix, self.mapped = path, archive, prefix, mapped
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, np.ndarray] = {}
        self.used_bytes = 0

    def run(self, pickled: bytes) -> Any:
        for count, (op, value, _) in enumerate(pickletools.genops(pickled)):
            if count > _MOST_OPERATIONS:
                raise DataError(f"{self.path}: its pickle has more than {_MOST_OPERATIONS:,} operations. {_RESAVE}")
            if op.name == "STOP":
                return self.stack.pop()
            self._step(op.name, value)
        raise DataError(f"{self.path}: its pickle does not end. The file is damaged.")

    def _step(self, name: str, value: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(value)
        elif name in _FRESH:
            stack.append(_FRESH[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[value] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._shared(self.memo[value]))
        elif name in ("PROTO", "FRAME"):
            pass
        elif name == "MARK":
            self.marks.append(stack)
            self.stack = []
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            n = int(name[-1])
            stack[-n:] = [tuple(self._top(n))]
        elif name in ("TUPLE", "LIST", "DICT"):
            items = self._marked()
            self.stack.append(self._pairs(items) if name == "DICT" else tuple(items) if name == "TUPLE" else items)
        elif name in ("APPEND", "APPENDS"):
            items = self._marked() if name == "APPENDS" else [stack.pop()]
            self._under(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._marked() if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
            self._under(dict).update(self._pairs(items))
        elif name == "GLOBAL":
            stack.append(self._global(*value.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = self._top(2)
            stack[-2:] = [self._global(module, attribute)]
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            callee, arguments = self._top(2)
            stack[-2:] = [self._call(callee, arguments)]
        elif name == "BUILD":  # an OrderedDict's attributes: the versions of modules, which nothing here asks for
            stack.pop()
            self._under(dict)
        else:
            raise self._refused(f"do {name}")

    def _top(self, n: int) -> list[Any]:
        if len(self.stack) < n:
            raise DataError(f"{self.path}: its pickle takes more than there is. The file is damaged.")
        return self.stack[-n:]

    def _marked(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def _shared(self, value: Any) -> Any:
        """A value used at several places: no container, of which sixty that hold twice the one before are 2^60."""
        if isinstance(value, dict | list) or (
            isinstance(value, tuple) and any(isinstance(item, dict | list | tuple) for item in value)
        ):
            raise self._refused("use a container twice")
        return value

    def _under(self, kind: type) -> Any:
        """The list or dict on top, into which items go."""
        if not isinstance(self.stack[-1], kind):
            raise self._refused(f"put items into a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _pairs(self, items: list[Any]) -> dict[str, Any]:
        """Names only: tuples and numbers can be made whose hashes take for ever, or are all the same."""
        if not all(isinstance(name, str) for name in items[::2]):
            raise self._refused("name a tensor by something other than text")
        return dict(zip(items[::2], items[1::2], strict=True))

    def _global(self, module: Any, attribute: Any) -> _Global:
        name = f"{module}.{attribute}" if isinstance(module, str) and isinstance(attribute, str) else "no name"
        if name not in _KNOWN:
            raise self._refused(f"use {name[:100]}")
        return _Global(name)

    def _refused(self, what: str) -> DataError:
        return DataError(f"{self.path} wants to {what}, which no file of weights needs: it is not read. {_RESAVE}")

    def _storage(self, reference: Any) -> _Storage:
        """('storage', type, key, device, count)"""
        kind, storage, key, _, count = reference
        dtype = _TYPES.get(storage.name.removeprefix("torch.")) if isinstance(storage, _Global) else None
        whole = isinstance(key, str) and type(count) is int and 0 <= count < _TOO_LARGE
        if kind != "storage" or dtype is None or not whole:
            raise self._refused("use an object that is no storage of numbers")
        return _Storage(key, dtype, count)

    def _call(self, callee: Any, arguments: Any) -> Any:
        """The result of a known function."""
        name = callee.name if isinstance(callee, _Global) else f"a {type(callee).__name__}"
        if name == _DICT and arguments == ():
            return {}
        if name == _TENSOR:
            return self._tensor(*arguments[:4])
        if name == _PARAMETER and isinstance(arguments[0], np.ndarray | StoredTensor):
            return arguments[0]
        raise self._refused(f"call {name}")

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> np.ndarray | StoredTensor:
        """The tensor, after it was seen to lie within its storage."""
        numbers = (offset, *shape, *strides)
        whole = all(type(n) is int and 0 <= n < _TOO_LARGE for n in numbers) and len(shape) == len(strides) <= 8
        if not isinstance(storage, _Storage) or not whole:
            raise DataError(f"{self.path}: the shape or the strides of a tensor are none. The file is damaged.")
        count = math.prod(shape)
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if count else offset - 1
        size = storage.dtype.itemsize
        if last >= storage.count or count > storage.count:
            raise DataError(
                f"{self.path}: a tensor of shape {shape} and strides {strides} at {offset} does not lie within its "
                f"storage of {storage.count:,} numbers. The file is damaged."
            )
        member = self.archive.getinfo(f"{self.prefix}data/{storage.key}")
        if storage.count * size > member.file_size:
            raise DataError(
                f"{self.path}: the storage {storage.key!r} is to hold {storage.count:,} numbers of {size} bytes, and "
                f"has {member.file_size:,} bytes. The file is damaged."
            )
        self.used_bytes += count * size
        if self.used_bytes > _MOST_SHARED * self.path.stat().st_size:
            raise DataError(f"{self.path}: its tensors are {_MOST_SHARED} times as large as the file. It is damaged.")
        steps = tuple(step * size for step in strides)
        if self.mapped:
            return StoredTensor(storage.dtype, tuple(shape), stored_offset(self.path, member) + offset * size, steps)
        check_size(self.path, self.used_bytes)
        if storage.key not in self.storages:
            self.storages[storage.key] = np.frombuffer(self.archive.read(member), np.uint8)
        flat = self.storages[storage.key][: storage.count * size].view(storage.dtype)[offset:]
        array = np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False)
        return array.astype(np.float32, copy=False) if storage.dtype.kind not in "iub" else array


# Operations whose argument is the value, and those that make something.
_VALUES = frozenset(
    [
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    ]
)
_FRESH: dict[str, Any] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}


# --- writing -----------------------------------------------------------------------------------------------------


def write_torch(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """A state_dict that torch.load(weights_only=True) reads; the caller turns OSError into a message.

    Floats are written in float32, whole numbers as they are.
    """
    names = {dtype: name for name, dtype in _TYPES.items()}
    pickled = [b"\x80\x02}("]  # protocol 2, a dict, a mark
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for key, (name, value) in enumerate(arrays.items()):
            array = np.asarray(value, np.float32 if np.asarray(value).dtype.kind == "f" else None)
            strides = [step // array.itemsize for step in np.empty(array.shape, array.dtype).strides]
            storage = b"(" + _text_op("storage") + f"ctorch\n{names[array.dtype]}\n".encode()
            storage += _text_op(str(key)) + _text_op("cpu") + _int_op(array.size) + b"tQ"
            shape, steps = (b"(" + b"".join(map(_int_op, ns)) + b"t" for ns in (array.shape, strides))
            hooks = b"\x89ccollections\nOrderedDict\n)R"  # requires_grad=False, and no backward hooks
            pickled += [
                _text_op(name),
                b"ctorch._utils\n_rebuild_tensor_v2\n(",
                storage,
                _int_op(0),
                shape,
                steps,
                hooks,
            ]
            pickled.append(b"tR")
            _add_member(archive, f"archive/data/{key}", array.tobytes())
        _add_member(archive, "archive/data.pkl", b"".join([*pickled, b"u."]))
        _add_member(archive, "archive/byteorder", b"little")
        _add_member(archive, "archive/version", b"3\n")


def _text_op(text: str) -> bytes:
    raw = text.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _int_op(n: int) -> bytes:
    """BININT, or LONG1 where four bytes do not hold it."""
    return b"J" + struct.pack("<i", n) if n < 1 << 31 else b"\x8a\x08" + struct.pack("<q", n)


def _add_member(archive: zipfile.ZipFile, name: str, raw: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name), raw)  # with zip's own first date, so that equal coders are equal files
