"""The size of a store to be, and the room on its disk."""

import contextlib
import shutil

from saejax.core.errors import DataError
from saejax.core.lease import LOCK
from saejax.store.files import StoreFiles
from saejax.store.manifest import Header

_SLACK = 1.01
_CHECKSUM_BYTES = 4
_INDEX_ENTRY_BYTES = 16  # offset and size of an inner chunk in its shard's index
_COMMIT_BYTES = 1024
_SUM_BYTES = 11  # float64 of one unit in a commit, in base64


def predicted_bytes(header: Header) -> int:
    """Bytes of the finished store, to within a thousandth for shards of a megabyte and more.

    Arrays: whole inner chunks, each with its crc32c, and the index of each shard; and a commit for each shard.
    The manifest and the rounding of files to blocks are below the slack that `check_space` leaves.
    """
    layout, rows = header.layout, header.requested_tokens
    shards, chunks = layout.shards(rows), -(-rows // layout.chunk_rows)
    total = 0
    for kind in header.arrays:
        chunk = layout.chunk_rows * (kind.width or 1) * kind.dtype.itemsize
        index = layout.shard_rows // layout.chunk_rows * _INDEX_ENTRY_BYTES
        total += chunks * (chunk + _CHECKSUM_BYTES) + shards * (index + _CHECKSUM_BYTES)
    return total + shards * (_COMMIT_BYTES + _SUM_BYTES * sum(header.hook_points.values()))


def check_space(files: StoreFiles, header: Header) -> None:
    """Nothing when the rest of the store fits on its disk with 1 % to spare; URLs are not checked.

    What lies in the folder already is part of the store: it stays, or is dropped before it is written again.

    Raises:
        DataError: too little room; names the bytes needed and free, and what to do.
    """
    if files.local is None:
        return
    present = bytes_on_disk(files) or 0
    wanted, free = int(_SLACK * predicted_bytes(header)) - present, shutil.disk_usage(files.local).free
    if wanted > free:
        raise DataError(
            f"Store {files.url}: {header.requested_tokens:,} rows need {wanted:,} bytes more on disk, and only "
            f"{free:,} bytes are free there. Ask for fewer tokens or hook points, free space, or choose another disk."
        )


def bytes_on_disk(files: StoreFiles) -> int | None:
    """Bytes of all files of a local store but the lease; None for a URL."""
    if files.local is None:
        return None
    total = 0
    for path in files.local.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a writer may be at work
            total += path.stat().st_size if path.is_file() and not path.name.startswith(LOCK) else 0
    return total
