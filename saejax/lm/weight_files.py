"""The safetensors files of a Hugging Face folder: those that transformers takes, and which tensors they hold."""

import hashlib
import json
import math
from pathlib import Path

import safetensors

from saejax.core.errors import DataError
from saejax.core.files import read_bounded, read_json

# Bytes, far more than any model comes with.
LARGEST_CONFIG, LARGEST_INDEX = 16 << 20, 64 << 20
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The files to read, in order: `model.safetensors`, or where that is not there, those of the index."""
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


def tensor_files(folder: Path) -> dict[str, Path]:
    """{tensor name: safetensors file}, by the files' headers; of a name in two files the last one's counts."""
    return {name: path for path in weight_files(folder) for name in _tensor_sizes(path)}


def numbers_in_files(folder: Path) -> tuple[int, int]:
    """(tensors, numbers in all of them), by the headers of the safetensors files."""
    sizes = [size for path in weight_files(folder) for size in _tensor_sizes(path).values()]
    return len(sizes), sum(sizes)


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


def _tensor_sizes(path: Path) -> dict[str, int]:
    """{tensor name: its numbers} of one file."""
    try:
        with safetensors.safe_open(path, framework="numpy") as handle:
            names = handle.keys()  # the handle itself cannot be walked over
            return {name: math.prod(handle.get_slice(name).get_shape()) for name in names}
    except (safetensors.SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a readable safetensors file: {error}") from None


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
