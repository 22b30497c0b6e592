"""One writer at a time for a store in a bucket, where no kernel can lock: an object that its holder keeps renewing.

The object is made and replaced only if it is what it was when it was read (tensorstore's `if_equal`; one request at AWS
and Google, a look and a write elsewhere). Its holder renews it every 10 seconds. Whoever finds it watches it by their
own clock: one that has not changed for 45 seconds is of a writer that was killed, and is taken over. A writer that
finds another's object in the place of its own stops before its next commit, so two never go on for long; and since
both would have written the same bytes, nothing is lost.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Self

from saejax.core.errors import BusyError, DataError
from saejax.core.lease import LOCK
from saejax.store.files import StoreFiles

RENEW_SECONDS = 10.0
STALE_SECONDS = 45.0
_RELEASE_SECONDS = 5.0
_TRIES = 20
_LARGEST_LEASE_BYTES = 4096
_MACHINE = Path("/proc/sys/kernel/random/boot_id")


class RemoteLease:
    """The lease of a store given as a URL, or of a part of it, held for the duration of a `with` block."""

    def __init__(self, files: StoreFiles, part: int | None = None) -> None:
        self._files, self._key = files, LOCK if part is None else f"{LOCK}.{part}"
        self._what = files.url if part is None else f"Part {part} of {files.url}"
        self._own = {"token": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), **_process()}
        self._renewals = 0
        self._generation = b""
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_stopped, name="store-lease", daemon=True)

    def check(self) -> None:
        """Raise BusyError if another process has taken the lease since."""
        if self._lost is not None:
            raise BusyError(
                f"{self._what} has been taken over by another process ({self._lost}), because this one was not heard "
                "of. Let that one finish, or stop it and run the same command again."
            )

    def __enter__(self) -> Self:
        """Take the lease, watching for up to 45 s whether one that is there is still renewed.

        Raises:
            BusyError: it is.
            DataError: the server cannot be reached, or refuses.
        """
        watched: tuple[bytes, float] | None = None
        tries = 0
        while True:
            generation, holder = self._look()
            if self._is_own(holder):  # an answer was lost: what was written is ours all the same
                self._generation = generation
                break
            runs = _still_runs(holder)
            if not holder or runs is False:
                free = True
            elif runs or (watched is not None and watched[0] != generation):
                raise BusyError(
                    f"{self._what} is being written by another process ({_holder(holder)}). Wait for it, stop it, or "
                    "choose another name."
                )
            else:
                free = watched is not None and time.monotonic() - watched[1] >= STALE_SECONDS
            if free and self._put(generation):
                break
            if free:  # another was faster; or there is no bucket, which is the same to tensorstore and not to a listing
                self._files.list("commits")
                if (tries := tries + 1) == _TRIES:
                    raise DataError(
                        f"{self._files.name(self._key)} could not be written in {tries} tries: the server refuses "
                        "writes that depend on what is there, or others are always faster. Use a store on a disk."
                    )
                time.sleep(0.1)
            else:
                if watched is None:
                    watched = (generation, time.monotonic())
                    print(
                        f"{self._what} was last written by another process ({_holder(holder)}); waiting up to "
                        f"{STALE_SECONDS:.0f} s to see whether it still runs",
                        file=sys.stderr,
                        flush=True,
                    )
                time.sleep(min(1.0, STALE_SECONDS / 10))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop renewing, and remove the object if it is still ours; a server that is gone is no error here."""
        self._stop.set()
        self._thread.join(_RELEASE_SECONDS)
        if self._lost is None:
            with contextlib.suppress(Exception):
                self._files.kv.write(self._key, None, if_equal=self._generation).result(timeout=_RELEASE_SECONDS)

    def _is_own(self, holder: dict[str, Any]) -> bool:
        return holder.get("token") == self._own["token"]

    def _look(self) -> tuple[bytes, dict[str, Any]]:
        """(generation of the object, who holds it); {} where nobody does."""
        with self._files.trying(f"Cannot read {self._files.name(self._key)}"):
            answer = self._files.kv.read(self._key).result()
        raw = bytes(answer.value)[:_LARGEST_LEASE_BYTES] if answer.state == "value" else b""
        try:
            holder = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            holder = {"host": "unknown"}
        return answer.stamp.generation, holder if isinstance(holder, dict) else {"host": "unknown"}

    def _put(self, generation: bytes) -> bool:
        """Replace what had this generation; False where it is another one now."""
        value = json.dumps(self._own | {"renewals": self._renewals}).encode()
        with self._files.trying(f"{self._files.name(self._key)} could not be written"):
            stamp = self._files.kv.write(self._key, value, if_equal=generation).result()
        if stamp.generation:
            self._generation = stamp.generation
        return bool(stamp.generation)

    def _renew_until_stopped(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            self._renewals += 1
            with contextlib.suppress(DataError):  # not reached: tried again, and a commit would say so
                if not self._put(self._generation):
                    generation, holder = self._look()
                    if not self._is_own(holder):
                        self._lost = _holder(holder)
                        return
                    self._generation = generation


def _process() -> dict[str, Any]:
    """Identifies this process among all others: this start of this machine, in this space of process numbers."""
    with contextlib.suppress(OSError):
        machine = f"{_MACHINE.read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
        return {"machine": machine, "started": _started(os.getpid())}
    return {}


def _started(pid: int) -> str | None:
    """When the process began, in ticks since the machine did; None if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _still_runs(holder: dict[str, Any]) -> bool | None:
    """True or False where the holder is a process of this machine, that runs or has ended; None elsewhere."""
    if not isinstance(holder.get("pid"), int) or not holder.get("machine"):
        return None
    if holder["machine"] != _process().get("machine"):
        return None
    return _started(holder["pid"]) == holder.get("started")


def _holder(holder: dict[str, Any]) -> str:
    return f"pid {str(holder.get('pid', '?'))[:20]} on {str(holder.get('host', '?'))[:100]!r}"
