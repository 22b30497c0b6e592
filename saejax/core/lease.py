"""One writer at a time for a folder, enforced by the kernel so that a killed writer leaves no stale lock."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from saejax.core.errors import BusyError
from saejax.core.files import writing

LOCK = ".lock"


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
