"""One writer at a time for a folder, enforced by the kernel so that a killed writer leaves no stale lock."""

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from saejax.core.errors import BusyError, DataError
from saejax.core.files import writing

LOCK = ".lock"

_LOCKS = Path("/proc/locks")
# C's struct flock: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"


@contextlib.contextmanager
def lease(folder: str | os.PathLike, part: int | None = None) -> Iterator[None]:
    """Hold `<folder>/.lock` exclusively for the duration of the block; local folders only.

    With `part`, hold `<folder>/.lock.<part>`: what several processes write at a time, each a part of its own.

    The lock is an flock: it goes with the process, also on kill -9. The file's text (pid and machine)
    only serves the message that a second writer gets.

    Raises:
        BusyError: at once, when another process holds it.
        DataError: the folder cannot be written.
    """
    path = Path(folder)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path / (LOCK if part is None else f"{LOCK}.{part}"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "unknown"
            what = path if part is None else f"Part {part} of {path}"
            raise BusyError(
                f"{what} is being written by another process ({holder}). Wait for it, stop it, or choose another name."
            ) from None
        with writing(path):
            os.ftruncate(handle, 0)
            os.write(handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(handle)


def held(folder: str | os.PathLike, part: int | None = None) -> str | None:
    """The holder of the lease of `folder` ("pid 12 on machine"), or None; asks without taking it.

    Taking the lock for a moment could make a writer fail that starts in this moment. So the kernel is asked for its
    list of locks (/proc/locks); on a shared disk, where an flock is a record lock that another machine may hold, the
    file system is asked. Only where neither can tell (no such list, or the last holder was a container, whose locks the
    list hides) a shared lock is tried, for some microseconds.

    Raises:
        DataError: the lock's file cannot be read.
    """
    path = Path(folder) / (LOCK if part is None else f"{LOCK}.{part}")
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        known = os.fstat(handle)
        if not stat.S_ISREG(known.st_mode):
            raise DataError(f"{path} is not a file: remove it, and nobody holds the lease.")
        holder = os.read(handle, 200).decode(errors="replace").strip()
        try:
            locks = _LOCKS.read_text()
        except OSError:
            locks = None
        for pid, major, minor, inode in re.findall(
            r"^\d+: FLOCK +\S+ +WRITE +(-?\d+) +([0-9a-f]+):([0-9a-f]+):(\d+) ", locks or "", re.MULTILINE
        ):
            here = (int(major, 16), int(minor, 16)) == (os.major(known.st_dev), os.minor(known.st_dev))
            own = holder.startswith(f"pid {pid} on ")
            # Some file systems (btrfs, overlays) show programs another device than the kernel's list does.
            if int(inode) == known.st_ino and (here or own):
                return holder if own else f"pid {pid} on {socket.gethostname()}"
        if _record_locked(handle):
            return holder or "unknown"
        if locks is None or (holder and not holder.endswith(f" on {socket.gethostname()}")):
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return holder or "unknown"
        return None
    finally:
        os.close(handle)


def _record_locked(handle: int) -> bool:
    """True if another process or machine has a record lock of the file, as network file systems keep an flock."""
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        answer = fcntl.fcntl(handle, fcntl.F_GETLK, query)
    except OSError:  # the file system has no record locks
        return False
    return struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK
