"""Small JSON files that are either the old version or the new one, never half of each."""

import contextlib
import errno
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from saejax.core.errors import DataError

LARGEST_JSON = 256 << 20
# Levels of lists and objects in one another. Ours have ten; Python's own functions end at some hundred.
_DEEPEST = 100


class Stamp(NamedTuple):
    """Identifies one version of a file: it differs once the file was written or replaced."""

    inode: int
    size: int
    mtime_ns: int


def stamp(path: str | os.PathLike) -> Stamp | None:
    """The stamp of a file or folder as it is now; None where there is none, or none that can be looked at."""
    try:
        known = os.stat(path)
    except OSError:
        return None
    return Stamp(known.st_ino, known.st_size, known.st_mtime_ns)


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write through a temporary file, fsync and rename.

    Raises:
        DataError: the folder is read-only or the disk is full.
    """
    write_bytes(path, f"{json.dumps(finite(value), indent=2, allow_nan=False)}\n".encode())


def write_bytes(path: str | os.PathLike, raw: bytes) -> None:
    """As `write_json`, of bytes."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as handle:
                handle.write(raw)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


def finite(value: Any) -> Any:
    """`value` with every number that no float holds (NaN, infinities, 10^400) as None: JSON has no word for these."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) <= sys.float_info.max else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read_bounded(path: str | os.PathLike, limit: int) -> bytes:
    """The file's bytes, of which there are at most `limit`: a hostile file is refused before memory is taken for it.

    Raises:
        DataError: it is missing, cannot be read, is longer, or a device or a pipe, which a reader might wait on for
            ever; names it.
    """
    try:
        with opened(path) as handle:
            size = os.fstat(handle.fileno()).st_size
            raw = b"" if size > limit else handle.read(size + 1)
            if len(raw) > size:  # it grows, or is of a kind that does not tell its size
                raw += handle.read(limit + 1 - len(raw))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if max(size, len(raw)) > limit:
        raise DataError(
            f"{path} has {max(size, len(raw)):,} bytes; such a file has at most {limit:,}. It is damaged or not "
            "what its name says: restore it, or delete it."
        )
    return raw


def opened(path: str | os.PathLike, buffering: int = -1) -> BinaryIO:
    """The file, open to be read. A folder, a pipe or a device is an OSError, and is not waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        what = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "It is not a file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, what, str(path))
    return os.fdopen(handle, "rb", buffering)


def read_if_there(path: str | os.PathLike, limit: int) -> bytes | None:
    """As `read_bounded`; None where nothing has this name. A link that leads nowhere is damage and not nothing."""
    return read_bounded(path, limit) if os.path.lexists(path) else None


def parsed(raw: bytes) -> Any:
    """The JSON value of bytes that may be damaged: what `write_json` could have written.

    Every number is one that a float holds, or None (`finite`).

    Raises:
        ValueError: they are not JSON, not UTF-8, or nested deeper than anything that is ours.
    """
    try:
        value = json.loads(raw.decode())
        check_depth(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return finite(value)


def read_object(path: str | os.PathLike, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """The JSON object that a file of ours holds, as `parsed` has it.

    Raises:
        DataError: it is missing, longer than `limit` bytes, or not one; names it.
    """
    return object_of(path, read_bounded(path, limit))


def value_of(path: str | os.PathLike, raw: bytes, remedy: str = "restore it or delete it") -> Any:
    """As `parsed`, of what was read from `path`. Raises DataError, which names it."""
    try:
        return parsed(raw)
    except ValueError as error:
        raise DataError(f"{path} is damaged: it is not JSON ({error}); {remedy}.") from None


def object_of(path: str | os.PathLike, raw: bytes, remedy: str = "restore it or delete it") -> dict[str, Any]:
    """As `read_object`, of a file that was read."""
    value = value_of(path, raw, remedy)
    if not isinstance(value, dict):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise DataError(f"{path} is damaged: it holds {kind}, not an object; {remedy}.")
    return value


def check_depth(value: Any, levels: int = _DEEPEST) -> None:
    """Raises ValueError for lists and objects in one another beyond what any file of ours has."""
    if levels < 0:
        raise ValueError("it is nested too deeply")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, dict | list):
            check_depth(item, levels - 1)


def read_json(path: str | os.PathLike, limit: int = LARGEST_JSON) -> Any:
    """Raises DataError, naming the file, when it is missing, longer than `limit` bytes or not JSON."""
    try:
        return json.loads(read_bounded(path, limit).decode())
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8 or not JSON
        raise DataError(f"{path} is damaged ({error}); restore it or delete it.") from None


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises DataError with a remedy for an OSError of a block that does nothing but write `path`."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from None


@contextlib.contextmanager
def replacing(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder beside `folder` to fill, which takes its place as a whole when the block ends without an error.

    Raises:
        DataError: it cannot be written.
    """
    folder = Path(folder)
    beside, old = (folder.with_name(f".{folder.name}.{state}") for state in ("saving", "old"))
    with writing(folder):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
    try:
        with writing(folder):
            yield beside
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.replace(old)
            beside.replace(folder)
    finally:
        for left in (beside, old):
            shutil.rmtree(left, ignore_errors=True)


def rename_first(begun: Path, folder: Path) -> None:
    """Rename the folder `begun` to `folder`, unless that is there, as by another process that has made it meanwhile."""
    try:
        begun.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def unwritable(path: str | os.PathLike, error: OSError) -> DataError:
    """The error to raise when writing `path` failed, with what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DataError(f"No space left to write {path}. Free some and run the same command again.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG):
        return DataError(f"{path} cannot be written: {error.strerror}. Choose another folder or mend its rights.")
    return DataError(f"{path} cannot be written: {error}.")
