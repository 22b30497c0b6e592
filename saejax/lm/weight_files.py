"""The weight files of a model folder: the safetensors that transformers takes, or a GGUF file; their tensors."""

import hashlib
import json
import math
from collections.abc import KeysView, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from saejax.core.errors import DataError
from saejax.core.files import read_bounded, read_json
from saejax.lm.gguf import GGUF, GgufTensors

# Bytes, far more than any model comes with.
LARGEST_CONFIG, LARGEST_INDEX = 16 << 20, 64 << 20
FLOATS = ("F64", "F32", "F16", "BF16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_ROWS_COMPARED = 4096  # of two matrices that are compared, at a time


class TensorFiles:
    """The safetensors files of a folder, opened, read by tensor name; of a name in two files the last one's counts.

    Raises:
        DataError: no such files, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in weight_files(folder):
            try:
                handle = safetensors.safe_open(path, framework="numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise DataError(f"{path} is not a readable safetensors file: {error}") from None
            self._files |= dict.fromkeys(handle.keys(), (path, handle))

    @property
    def names(self) -> KeysView[str]:
        return self._files.keys()

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, type of the numbers) of a tensor; none of its numbers is read."""
        part = self._of(name, "get_slice")
        return tuple(part.get_shape()), part.get_dtype()

    def holds_floats(self, name: str) -> bool:
        return self.header(name)[1] in FLOATS

    def read(self, name: str) -> np.ndarray:
        array: np.ndarray = self._of(name, "get_tensor")
        return array

    def are_equal(self, first: str, second: str) -> bool:
        """True where the numbers of two matrices are the same."""
        shape = self.header(first)[0]
        if len(shape) != 2 or shape != self.header(second)[0]:
            return False
        a, b = (self._of(name, "get_slice") for name in (first, second))
        parts = [slice(start, min(start + _ROWS_COMPARED, shape[0])) for start in range(0, shape[0], _ROWS_COMPARED)]
        return all(np.array_equal(a[part], b[part]) for part in parts)

    def count(self) -> tuple[int, int]:
        """(tensors, numbers in all of them)."""
        return len(self._files), sum(math.prod(self.header(name)[0]) for name in self._files)

    def _of(self, name: str, method: str) -> Any:
        path, handle = self._files[name]
        try:
            return getattr(handle, method)(name)
        except safetensors.SafetensorError as error:
            raise DataError(f"{path}: tensor {name!r} cannot be read: {error}") from None


def open_tensors(folder: Path, config_json: Mapping[str, Any]) -> TensorFiles | GgufTensors:
    """The tensors of a model folder, whichever kind of file holds them. Raises as `TensorFiles` and `GgufTensors`."""
    path = folder / GGUF
    return GgufTensors(path, config_json) if path.is_file() else TensorFiles(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files to read, in order: a GGUF file alone, `model.safetensors`, or where that is not there, the index's."""
    if (folder / GGUF).is_file():
        return [folder / GGUF]
    _refuse_named_elsewhere(folder)
    single = folder / SINGLE
    if single.is_file():
        return [single]
    if not (folder / INDEX).is_file():
        raise DataError(f"No {SINGLE} in {folder}; convert the checkpoint to safetensors first.")
    names = shard_names(folder)
    for name in names:
        if not _is_file_in(folder, name):
            raise DataError(f"{folder / INDEX} names the file {name[:200]!r}, which is not in the folder.")
    return [folder / name for name in names]


def shard_names(folder: Path) -> list[str]:
    """The files that the index in the folder names, sorted."""
    index = folder / INDEX
    try:
        return sorted(
            {str(name) for name in dict(json.loads(read_bounded(index, LARGEST_INDEX))["weight_map"]).values()}
        )
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(f"{index} is not a usable index: {type(error).__name__} {error}.") from None


def weights_sha256(folder: Path) -> str:
    """One hash over all weight files, part of a store's identity."""
    digest = hashlib.sha256()
    for path in weight_files(Path(folder)):
        with path.open("rb") as handle:
            digest.update(path.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


def has_weights(folder: Path) -> bool:
    """Every weight file that is read is there."""
    try:
        return bool(weight_files(folder))
    except DataError:
        return False


def _refuse_named_elsewhere(folder: Path) -> None:
    """`transformers_weights` of config.json names the file that transformers reads in place of the usual ones."""
    path = folder / "config.json"
    config = read_json(path, LARGEST_CONFIG) if path.is_file() else {}
    named = config.get("transformers_weights") if isinstance(config, dict) else None
    if named not in (None, SINGLE):
        raise DataError(
            f"{path}: transformers_weights names {str(named)[:200]!r}; saejax reads {SINGLE} or the files of {INDEX}. "
            "Save the model again with save_pretrained."
        )


def _is_file_in(folder: Path, name: str) -> bool:
    try:
        return Path(name).name == name and (folder / name).is_file()
    except OSError:  # a name longer than a name may be
        return False
