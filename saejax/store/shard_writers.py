"""Shards on their way from memory to disk, in threads of their own; each counts from its commit on, in their order."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from saejax.core.errors import BusyError, DataError, SaejaxError
from saejax.core.host import give_way
from saejax.store.commits import Commit, write_commit
from saejax.store.files import StoreFiles
from saejax.store.layout import open_array, write_zarr_json
from saejax.store.manifest import Header
from saejax.store.quantize import as_read, as_stored
from saejax.store.shard import Shard
from saejax.store.statistics import sums_of

_IN_FLIGHT = 2
_HASHERS = 4  # sha256 runs at a few hundred MB/s a core: slower than a good disk


class ShardWriters:
    """At most two shards are written at a time; after a failure none is.

    Args:
        files, header: the store.
        commits: of the shards of this part that are durable already.
        still_ours: raises BusyError if another process writes this part now; asked before each commit. None where the
            kernel holds the lease.

    Attributes:
        commits: of all shards of this part known to be durable, in order.
    """

    def __init__(
        self, files: StoreFiles, header: Header, commits: list[Commit], still_ours: Callable[[], None] | None
    ) -> None:
        self.commits, self._still_ours = list(commits), still_ours
        self._files, self._header = files, header
        self._arrays: dict[str, Any] = {}
        self._under_way: deque[Future[Commit]] = deque()
        self._failure: SaejaxError | None = None
        self._writers = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="store-writer", initializer=give_way)
        self._hashers = ThreadPoolExecutor(_HASHERS, thread_name_prefix="store-hasher", initializer=give_way)

    def open_arrays(self, rows: int) -> None:
        """Give the arrays `rows` rows and write into them from now on; no shard may be on its way."""
        for kind in self._header.arrays:
            write_zarr_json(self._files, kind, rows, self._header.layout)
            self._arrays[kind.name] = open_array(self._files, kind, rows, self._header.layout)

    def send(self, shard: Shard, commit: Commit) -> None:
        """Hand a shard to the threads, waiting for room; its commit lacks only hashes and sums.

        Raises:
            DataError: an earlier shard failed.
        """
        self.wait(_IN_FLIGHT - 1)
        before = self._under_way[-1] if self._under_way else None
        self._under_way.append(self._writers.submit(self._write, shard, commit, before))

    def wait(self, allowed: int = 0) -> None:
        """Return when at most `allowed` shards are on their way; raises the DataError of one that failed."""
        while len(self._under_way) > allowed:
            commit = self._under_way[0].result()
            self._under_way.popleft()
            self.commits.append(commit)

    def check(self) -> None:
        """Raise the DataError of a shard that failed, without waiting for any."""
        while self._under_way and self._under_way[0].done():
            self.wait(len(self._under_way) - 1)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait for the shards on their way and stop the threads. Raises no shard's failure."""
        self._writers.shutdown(wait=True)
        while self._under_way:
            future = self._under_way.popleft()
            if future.exception() is None:
                self.commits.append(future.result())
        self._hashers.shutdown()
        self._arrays = {}

    def _write(self, shard: Shard, commit: Commit, before: Future[Commit] | None) -> Commit:
        """In a thread: write the shard's arrays, then, all durable and `before` committed, its commit."""
        if self._failure is not None:
            raise self._failure
        layout, hook_points = self._header.layout, self._header.hook_points
        rows = as_stored(shard.take(), hook_points, layout.dtype)
        start = shard.index * layout.shard_rows
        stop = start + shard.filled
        try:
            writes = [
                self._arrays[name][start:stop].write(values, can_reference_source_data_indefinitely=True)
                for name, values in rows.items()
            ]
            hashing = {name: self._hashers.submit(shard.digest, values) for name, values in rows.items()}
            sums = {name: sums_of(as_read(rows, name)) for name in hook_points}
            hashes = {name: future.result() for name, future in hashing.items()}
            for write in writes:
                write.result()
        except Exception as error:
            trouble = self._files.write_trouble(error)
            raise self._failed(
                f"shard {shard.index} (rows {start} to {stop}) could not be written: {trouble}"
            ) from error
        commit = replace(commit, sha256=hashes, sums=sums)
        if before is not None:
            before.result()  # a shard counts only after those before it; their failure is this one's too
        try:
            if self._still_ours is not None:
                self._still_ours()
            write_commit(self._files, self._header, commit)
        except BusyError as error:
            self._failure = error
            raise
        except DataError as error:
            raise self._failed(f"commit of shard {shard.index}: {error}") from error
        return commit

    def _failed(self, what: str) -> DataError:
        failure = DataError(f"Store {self._files.url}: {what}")
        self._failure = failure
        return failure
