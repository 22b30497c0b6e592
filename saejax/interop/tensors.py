"""Arrays and small texts of files that strangers wrote: bounded before memory is taken, nothing is executed."""

import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from saejax.core.archives import LONGEST_HEADER, MOST_TENSORS, ZIP_DAMAGE, check_regular, check_size, opened_zip
from saejax.core.errors import DataError
from saejax.core.files import read_bounded, read_json

LARGEST_CONFIG, _BEGINNING = 4 << 20, 1 << 16
# The longest configuration there is has a line for each of some hundred layers.
_LARGEST_YAML, _MOST_BRACKETS, _MOST_TOKENS = 16 << 10, 100, 3000
# The loader's own converters raise them too, for words that a tag (!!bool x) or digits take for something else.
_YAML_ERRORS = (ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_BOMB_BYTES, _BOMB_RATIO = 64 << 20, 100
_FLOATS = ("float64", "float32", "float16", "bfloat16")


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object. Raises DataError for anything else."""
    value = read_json(path, LARGEST_CONFIG)
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a configuration: it holds no JSON object.")
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping of plain values, without aliases, of which a short file can make 10^9. Raises DataError."""
    import yaml

    try:
        text = read_bounded(path, _LARGEST_YAML).decode()
        # Before it is parsed: the parser is slow, slower by the square in brackets, and nests without an end.
        if max(text.count("["), text.count("{")) > _MOST_BRACKETS:
            raise DataError(f"{path} is no configuration: it has more than {_MOST_BRACKETS} brackets.")
        for n, token in enumerate(yaml.scan(text, Loader=yaml.SafeLoader)):
            if isinstance(token, yaml.AliasToken):
                raise DataError(f"{path} has YAML aliases; a configuration needs none. Write out what they stand for.")
            if n > _MOST_TOKENS:
                raise DataError(f"{path} is no configuration: it has more than {_MOST_TOKENS:,} words and signs.")
        value = yaml.safe_load(text)
    except (yaml.YAMLError, TypeError, *_YAML_ERRORS) as error:
        raise DataError(f"{path} is not readable YAML ({type(error).__name__}).") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a configuration: it holds no YAML mapping.")
    return value


def mentions(path: Path, text: str) -> bool:
    """True where a small text file has this at its beginning: a folder may lack its weights."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as handle:
            return text.encode() in handle.read(_BEGINNING)
    except OSError:
        return False


def whole_number(config: Mapping[str, Any], key: str, path: Path, low: int = 1) -> int:
    """config[key], a whole number of at least `low`. Raises DataError."""
    value = config.get(key)
    if type(value) is not int or value < low:
        raise DataError(f"{path}: {key} is {value!r}; it must be a whole number of at least {low}.")
    return value


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors as float32 (float64 and 16-bit ones too), with names as in the file."""
    _check_header(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as handle:
            names = list(handle.keys())
            if len(names) > MOST_TENSORS:
                raise DataError(f"{path} holds {len(names):,} tensors; a dictionary has at most {MOST_TENSORS:,}.")
            check_size(path, sum(4 * math.prod(handle.get_slice(name).get_shape()) for name in names))
            return {name: _floats(path, name, handle.get_tensor(name)) for name in names}
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path} is not a readable safetensors file ({error}).") from None


def half_precision_notes(*files: Path) -> tuple[str, ...]:
    """The remark on safetensors files with weights of 16 bits. Raises DataError for what cannot be read."""
    types = set[str]()
    for path in files:
        _check_header(path)
        try:
            with safetensors.safe_open(path, framework="numpy") as handle:
                types |= {handle.get_slice(name).get_dtype() for name in list(handle.keys())}
        except (safetensors.SafetensorError, OSError) as error:
            raise DataError(f"{path} is not a readable safetensors file ({error}).") from None
    return ("The weights are of 16 bits; saejax multiplies in 32.",) if types & {"BF16", "F16"} else ()


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """float32 tensors; the caller has the folder made and turns OSError into a message."""
    raw = {name: np.ascontiguousarray(value, np.float32) for name, value in arrays.items()}
    path.write_bytes(safetensors.numpy.save(raw, metadata={"format": "pt"}))


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz file as float32; nothing pickled is read."""
    check_regular(path)
    try:
        with opened_zip(path) as (archive, members):
            check_size(path, sum(member.file_size for member in members))
            for member in members:
                _check_member(path, archive, member)
        with np.load(path, allow_pickle=False) as data:
            return {name: _floats(path, name, data[name]) for name in data.files}
    except (*ZIP_DAMAGE, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a readable .npz file ({error}).") from None


def _check_member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raises DataError for an array that is shorter than its header says, and for what unpacks to nearly nothing."""
    if member.file_size > _BOMB_BYTES and member.file_size > _BOMB_RATIO * max(1, member.compress_size):
        raise DataError(
            f"{path}: {member.filename} unpacks from {member.compress_size:,} to {member.file_size:,} bytes. Weights "
            "never do; the file is not read."
        )
    with archive.open(member) as handle:
        version = np.lib.format.read_magic(handle)
        reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, _, dtype = reader[version](handle)
    if math.prod(shape) * dtype.itemsize > member.file_size:
        raise DataError(f"{path}: {member.filename} says {shape}, but is shorter. It is damaged.")


def _check_header(path: Path) -> None:
    """Raises DataError for no file, or a safetensors header that takes long to read; its first 8 bytes are its size."""
    check_regular(path)
    with path.open("rb") as handle:
        start = handle.read(8)
    if len(start) == 8 and (size := struct.unpack("<Q", start)[0]) > LONGEST_HEADER:
        raise DataError(f"{path} has a header of {size:,} bytes; a dictionary's has at most {LONGEST_HEADER:,}.")


def _floats(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.name not in _FLOATS and array.dtype.kind not in "iub":
        raise DataError(f"{path}: {name} is of type {array.dtype}; a dictionary holds real numbers.")
    return array.astype(np.float32, copy=False)


def only_name(path: Path, name: Any) -> str:
    """A file's name that a configuration gives. Raises DataError for one that leads out of its folder."""
    if not isinstance(name, str) or not name or Path(name).name != name or name in (".", ".."):
        raise DataError(f"{path} names the file {name!r}; a plain file name in the same folder is expected.")
    return name
