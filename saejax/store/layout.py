"""Arrays of a store on disk: names, zarr3 metadata, and opening them without trusting the disk.

    <store>/manifest.json             identity and layout; statistics and checksums once complete
    <store>/commits/000000.json ...   one for each durable shard: the truth for resuming
    <store>/arrays/<hook point>/      zarr3 [tokens, d] bfloat16, or int8 with
    <store>/arrays/<hook point>.scale/    zarr3 [tokens] float32: x ~ scale * int8 (`quantize`)
    <store>/arrays/token_id|document|position/   zarr3 [tokens] int32

The zarr.json of an array is a pure function of (array, rows, layout), so a reader compares it byte for
byte with what the manifest implies before tensorstore sees it: a file that claims terabytes is refused
before anything is allocated.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from saejax.core.config import shortened
from saejax.core.errors import ConfigError, DataError
from saejax.store.files import StoreFiles, canonical_json

METADATA_NAMES = ("token_id", "document", "position")
DTYPES = ("bfloat16", "int8")
BF16 = np.dtype(ml_dtypes.bfloat16)
INT32 = np.dtype(np.int32)
FLOAT32 = np.dtype(np.float32)

_HOOK_POINT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_OF_SHARD = re.compile(r"commits/(\d+)\.json|arrays/[^/]+/c/(\d+)(?:/0)?")
_MAX_SHARD_ROWS = 1 << 24
_MAX_WIDTH = 1 << 20
_MAX_CHUNK_BYTES = 1 << 30
_ZARR_LIMIT_BYTES = 1 << 16


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True)
class StoreLayout:
    """Rows in a shard (one file, one commit) and in an inner chunk (what a random read fetches); type of the numbers.

    Raises:
        ConfigError: not positive integers, the chunk does not divide the shard, or another type than DTYPES.
    """

    shard_rows: int = 32768
    chunk_rows: int = 256
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not (_is_count(self.shard_rows) and _is_count(self.chunk_rows)):
            raise ConfigError(f"shard_rows={self.shard_rows!r}, chunk_rows={self.chunk_rows!r}: give integers >= 1.")
        if self.shard_rows > _MAX_SHARD_ROWS or self.shard_rows % self.chunk_rows:
            raise ConfigError(
                f"shard_rows={self.shard_rows} must be a multiple of chunk_rows={self.chunk_rows} "
                f"and at most {_MAX_SHARD_ROWS}."
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"The dtype of a store is {self.dtype!r}; it must be {' or '.join(DTYPES)}.")

    def shards(self, rows: int) -> int:
        """Number of shards that `rows` rows fill, the last one perhaps ragged."""
        return -(-rows // self.shard_rows)


@dataclass(frozen=True)
class ArrayKind:
    """One array of a store: its name, its width d if it is [tokens, d] (None: [tokens]), and its type."""

    name: str
    width: int | None
    dtype: np.dtype

    @property
    def folder(self) -> str:
        return f"arrays/{self.name}"

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.width is None else (rows, self.width)

    def shard_key(self, shard: int) -> str:
        return f"c/{shard}" if self.width is None else f"c/{shard}/0"


def shard_of(key: str) -> int | None:
    """The shard that a file of a store belongs to, by its name relative to the root; None for the other files."""
    match = _OF_SHARD.fullmatch(key)
    return int(match[1] or match[2]) if match else None


def check_hook_points(hook_points: dict[str, int], layout: StoreLayout) -> None:
    """Names must be file-safe and widths sane.

    Raises:
        ConfigError: a name that could leave its folder or clashes with the metadata arrays, or a width
            that is no positive integer or makes an inner chunk over 1 GiB.
    """
    if not hook_points:
        raise ConfigError("A store needs at least one hook point.")
    for name, width in hook_points.items():
        bad = not isinstance(name, str) or not _HOOK_POINT_NAME.fullmatch(name) or ".." in name or len(name) > 200
        if bad or name in METADATA_NAMES:
            raise ConfigError(
                f"Hook point name {name!r} cannot be a folder of a store: use letters, digits, '.', '_' and "
                f"'-', no leading dot, no '..', and none of {', '.join(METADATA_NAMES)}."
            )
        if layout.dtype == "int8" and scale_of(name) in hook_points:
            raise ConfigError(
                f"Hook point {scale_of(name)!r} has the name of an array that int8 needs beside {name!r}."
            )
        if not _is_count(width) or width > _MAX_WIDTH or layout.chunk_rows * width * 2 > _MAX_CHUNK_BYTES:
            raise ConfigError(
                f"Hook point {name!r} has width {width!r}: give an integer from 1 to {_MAX_WIDTH} "
                f"with chunk_rows * width * 2 <= {_MAX_CHUNK_BYTES} bytes."
            )


def scale_of(hook_point: str) -> str:
    return f"{hook_point}.scale"


def arrays_of(hook_points: dict[str, int], dtype: str = "bfloat16") -> tuple[ArrayKind, ...]:
    """Every array of a store: the hook points in their order, the scales of int8, then the metadata."""
    stored, scaled = (np.dtype(np.int8), hook_points) if dtype == "int8" else (BF16, ())
    hooks = tuple(ArrayKind(name, width, stored) for name, width in hook_points.items())
    scales = tuple(ArrayKind(scale_of(name), None, FLOAT32) for name in scaled)
    return hooks + scales + tuple(ArrayKind(name, None, INT32) for name in METADATA_NAMES)


def zarr_metadata(kind: ArrayKind, rows: int, layout: StoreLayout) -> dict[str, Any]:
    """The zarr.json of an array: sharded, uncompressed, crc32c on inner chunks and on the shard index."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    checked = [little, {"name": "crc32c"}]
    sharding = {
        "chunk_shape": list(kind.shape(layout.chunk_rows)),
        "codecs": checked,
        "index_codecs": checked,
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(kind.shape(rows)),
        "data_type": kind.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(kind.shape(layout.shard_rows))}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0 if kind.dtype.kind == "i" else 0.0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


def write_zarr_json(files: StoreFiles, kind: ArrayKind, rows: int, layout: StoreLayout) -> None:
    """Give the array `rows` rows: create its zarr.json, or replace one that differs."""
    key, wanted = f"{kind.folder}/zarr.json", canonical_json(zarr_metadata(kind, rows, layout))
    try:
        present = files.read(key, _ZARR_LIMIT_BYTES)
    except DataError:
        present = None  # unreadable or absurdly long: it is ours to replace
    if present != wanted:
        files.write(key, wanted)


def check_zarr_json(files: StoreFiles, kind: ArrayKind, rows: int, layout: StoreLayout) -> None:
    """Compare the array's zarr.json with what the manifest implies.

    Raises:
        DataError: missing, damaged or different; lists each differing key with both values.
    """
    key = f"{kind.folder}/zarr.json"
    wanted = zarr_metadata(kind, rows, layout)
    remedy = f"Delete {files.name(key)} and run the command that made the store again: the shards stay."
    raw = files.read(key, _ZARR_LIMIT_BYTES)
    if raw is None:
        raise DataError(f"Store {files.url}: array {kind.name!r} has no zarr.json. {remedy}")
    if raw == canonical_json(wanted):
        return
    try:
        stored = json.loads(raw)
        detail = "; ".join(
            f"{key}: file says {shortened(stored.get(key))}, the manifest implies {shortened(wanted.get(key))}"
            for key in sorted({*stored, *wanted})
            if key not in stored or key not in wanted or stored[key] != wanted[key]
        )
    except (ValueError, RecursionError, TypeError, AttributeError):
        detail = "it is no JSON object"
    detail = detail or "same values, other bytes"
    raise DataError(
        f"Store {files.url}: the zarr.json of array {kind.name!r} does not fit the manifest ({detail}). {remedy}"
    )


def open_array(files: StoreFiles, kind: ArrayKind, rows: int, layout: StoreLayout) -> Any:
    """The tensorstore handle of one array, after `check_zarr_json`.

    Missing data is an error (NOT_FOUND), never zeros; all-zero chunks are stored, so that they are not
    taken for missing ones.

    Raises:
        DataError: the metadata is missing, damaged or of another shape.
    """
    check_zarr_json(files, kind, rows, layout)
    spec = {
        "driver": "zarr3",
        "kvstore": files.kvstore(kind.folder),
        "metadata": zarr_metadata(kind, rows, layout),
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }
    with files.trying(f"Store {files.url}: cannot open array {kind.name!r}"):
        return ts.open(spec, open=True, context=files.context).result()
