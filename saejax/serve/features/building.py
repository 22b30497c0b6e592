"""Indexes of features.json.gz in the user's cache folder: found, made once for each state of a file, and pruned."""

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from saejax.core.errors import BusyError, DataError, SaejaxError
from saejax.core.lease import lease
from saejax.serve.caches import Cache
from saejax.serve.features.index import VERSION, build, progress, progress_writer
from saejax.serve.features.table import FeatureTable

VARIABLE = "SAEJAX_INDEXES"
LARGEST = 8 << 30  # bytes of all indexes
_SMALL = 4 << 20  # bytes of a file that is indexed in this process: that takes a second or two
_FIRST_LOOK = 2.0  # seconds that whoever asks first waits for a small one


@dataclasses.dataclass(frozen=True)
class Preparing:
    """An index that is being made: bytes of the file that are read, of all."""

    done: int
    total: int


class Indexes:
    """Opens the index of a file, or begins to make it.

    Args:
        cache: keeps those that are open.
        folder: where they lie; by default SAEJAX_INDEXES, or saejax/features in the user's cache folder.
        largest: bytes of all of them; the longest unused are deleted.
        small: files of fewer bytes are indexed by a thread, others by a process of low priority.
    """

    def __init__(self, cache: Cache, folder: Path | None = None, largest: int = LARGEST, small: int = _SMALL):
        self._cache, self._largest, self._small = cache, largest, small
        self._folder = _folder() if folder is None else folder
        self._lock = threading.Lock()
        self._making: dict[str, threading.Thread] = {}
        self._failed: dict[str, SaejaxError] = {}
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def table(self, source: Path) -> FeatureTable | Preparing:
        """The table of a features.json.gz, or how far its index is.

        Raises:
            DataError: there is no such file, or it is damaged; names it.
        """
        key, size = _key(source)
        index = self._folder / key
        small = size < self._small
        if not index.is_dir() and (maker := self._maker(key, source, index, small)):
            maker.join(_FIRST_LOOK if small else 0)
        if error := self._failed.get(key):
            raise error
        if not index.is_dir():
            return Preparing(min(progress(index), size), size)

        def opened() -> FeatureTable:
            with contextlib.suppress(OSError):
                os.utime(index / "index.json")  # it is in use, and not the one to delete
            return FeatureTable(source, index)

        try:
            return self._cache.get(("table", key), opened, lambda table: table.bytes)
        except DataError:
            # A machine that lost its power may leave half of one: it is a cache, and made again.
            shutil.rmtree(index, ignore_errors=True)
            return Preparing(0, size)

    def close(self) -> None:
        """End what is being made, and wait for it."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.terminate()
            making = list(self._making.values())
        for thread in making:
            thread.join()

    def _maker(self, key: str, source: Path, index: Path, small: bool) -> threading.Thread | None:
        with self._lock:
            if key not in self._making and key not in self._failed and not self._closed:
                arguments = (key, source, index, small)
                self._making[key] = threading.Thread(
                    target=self._make, args=arguments, name="saejax-index", daemon=True
                )
                self._making[key].start()
            return self._making.get(key)

    def _make(self, key: str, source: Path, index: Path, small: bool) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            beside = index.with_name(f".{index.name}.making")
            if small:
                with contextlib.suppress(BusyError), lease(beside):  # a BusyError: another server makes it
                    if not index.is_dir():
                        build(source, index, progress_writer(beside))
            else:
                self._make_apart(source, index)
            _prune(self._folder, index, self._largest)
        except SaejaxError as error:
            self._failed[key] = error
        except OSError as error:
            self._failed[key] = DataError(f"The index of {source} cannot be made in {self._folder}: {error}.")
        finally:
            with self._lock:
                self._making.pop(key, None)

    def _make_apart(self, source: Path, index: Path) -> None:
        """By a process of its own: this one goes on answering, and takes no memory for it."""
        words = [sys.executable, "-P", "-m", "saejax.serve.features.index", str(source), str(index)]
        with self._lock:
            if self._closed:
                return
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            self._processes.add(process)
        said = process.communicate()[1].decode(errors="replace").strip()
        with self._lock:
            self._processes.discard(process)
        if process.returncode > 0 and process.returncode != os.EX_TEMPFAIL and not self._closed:
            raise DataError(said.splitlines()[-1] if said else f"The index of {source} could not be made.")


def _key(source: Path) -> tuple[str, int]:
    """(the name of the index of a file as it is now, the file's bytes)."""
    try:
        known = source.stat()
        real = os.path.realpath(source)
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}.") from None
    text = f"{real}\0{known.st_size}\0{known.st_mtime_ns}\0{VERSION}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:40], known.st_size


def _folder() -> Path:
    try:
        if chosen := os.environ.get(VARIABLE):
            return Path(chosen).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "saejax" / "features"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / f"saejax-features-{os.getuid()}"


def _prune(folder: Path, newest: Path, largest: int) -> None:
    """Delete the indexes of the oldest use until all have at most `largest` bytes, and what killed makers left."""
    kept = {}
    for path in folder.iterdir():
        name = path.name
        if name.startswith(".") and name.rpartition(".")[2] in ("making", "saving", "old"):
            at = path.with_name(f"{name.rpartition('.')[0]}.making")
            with contextlib.suppress(SaejaxError), lease(at):  # a BusyError: it is being made
                shutil.rmtree(path, ignore_errors=True)
                shutil.rmtree(at, ignore_errors=True)
        elif path != newest:
            with contextlib.suppress(OSError):  # another server deletes it
                kept[path] = (path / "index.json").stat().st_mtime
    sizes = {path: _size(path) for path in (newest, *kept)}
    for path in sorted(kept, key=lambda one: kept[one]):
        if sum(sizes.values()) <= largest:
            break
        shutil.rmtree(path, ignore_errors=True)
        del sizes[path]


def _size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        total = sum(one.stat().st_size for one in folder.iterdir())
    return total
