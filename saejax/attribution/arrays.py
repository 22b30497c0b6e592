"""Arrays as the bytes of an .npz file, and back from a file that anyone may have written: nothing is run or unpacked.

An .npz is a zip of .npy files. Each has a checksum, so that a flipped bit is noticed.
"""

import io
import math
import zipfile
from collections.abc import Iterable, Mapping

import numpy as np

from saejax.core.errors import DataError

# What damaged or foreign bytes raise on the way.
_FAULTS = (ValueError, KeyError, TypeError, OSError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile)


def to_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An uncompressed .npz."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # the stub fears for allow_pickle
    return buffer.getvalue()


def from_bytes(raw: bytes, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of the named arrays that are there."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as file:
            there = {name: file.getinfo(f"{name}.npy") for name in names if f"{name}.npy" in file.namelist()}
            # Stored as they are, the entries are no longer than the file.
            if any(info.compress_type != zipfile.ZIP_STORED for info in there.values()):
                raise DataError("an array in it is compressed")
            return {name: _array(file.read(info)) for name, info in there.items()}
    except _FAULTS as error:
        raise DataError(f"{type(error).__name__}: {error}") from None


def _array(raw: bytes) -> np.ndarray:
    stream = io.BytesIO(raw)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise DataError("an array in it is of another version")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
    body = raw[stream.tell() :]
    if dtype.hasobject or by_columns or any(size < 0 for size in shape):
        raise DataError(f"an array in it is {dtype} {shape}")
    if math.prod(shape) * dtype.itemsize != len(body):
        raise DataError(f"an array in it is {dtype} {shape}, in {len(body)} bytes")
    return np.frombuffer(body, dtype).reshape(shape)
