"""Write a store: rows come in stream order and go to disk as whole, permuted, committed shards.

A run killed at any moment and finished later leaves the same bytes as one that was never disturbed:
shards are a pure function of the rows and the seed, and only a shard's commit file makes it count.
"""

import itertools
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.core.lease import lease
from saejax.core.threads import give_way
from saejax.store.commits import Commit, commit_key, committed_prefix, part_states, write_commit
from saejax.store.files import StoreFiles, make_context, write_trouble
from saejax.store.intake import Shard, as_bf16_rows, as_int32_rows
from saejax.store.layout import (
    METADATA_NAMES,
    StoreLayout,
    arrays_of,
    check_hook_points,
    open_array,
    shard_of,
    write_zarr_json,
)
from saejax.store.manifest import MANIFEST, Header, Manifest, check_parts, differences, plain_json, read_manifest
from saejax.store.space import check_space
from saejax.store.statistics import Sums, moments, sums_of, zero_sums

_IN_FLIGHT = 2
_HASHERS = 4  # sha256 runs at a few hundred MB/s a core: slower than a good disk


class StoreWriter:
    """The single writer of a store, or of a part of one; make it with `open`, use it as a context manager.

        with StoreWriter.open(path, ...) as writer:
            cursor, skip = writer.resume or (start, 0)
            while not writer.full:
                ... compute the batch at cursor, drop its first `skip` rows (once) ...
                writer.append(activations, tokens, cursor=cursor, counters=counted)
            writer.finish()

    Leaving the block without `finish` waits for the shards in flight and leaves a store to be resumed.

    Of a store of P parts, part p is the shards p, p + P, p + 2P... Each part has its own writer, in whatever process,
    its own rows and its own cursors; what is on disk in the end does not depend on which process wrote it, or when.
    Whoever finds that all parts are done writes the manifest.
    """

    def __init__(self, files: StoreFiles, header: Header, part: int, resources: ExitStack) -> None:
        self._files, self._header, self._part, self._resources = files, header, part, resources
        self._kinds = arrays_of(header.hook_points)
        self._commits: list[Commit] = []
        self._flight: deque[tuple[int, Future[Commit]]] = deque()
        self._failure: DataError | None = None
        self._complete = self._done = False
        self._missing: tuple[int, ...] = ()
        self._store_rows = 0
        self._shard: Shard | None = None
        self._next_shard = part
        self._rows = 0
        self._counters: dict[str, int] = {}
        self._resume: tuple[dict[str, Any], int] | None = None
        self._continued = False
        self._handles: dict[str, Any] = {}
        self._worker = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="store-writer", initializer=give_way)
        self._hashers = ThreadPoolExecutor(_HASHERS, thread_name_prefix="store-hasher", initializer=give_way)
        resources.callback(self._hashers.shutdown)
        resources.callback(self._worker.shutdown)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        identity: dict[str, Any],
        hook_points: dict[str, int],
        n_tokens: int,
        layout: StoreLayout | None = None,
        seed: int = 0,
        copy_threads: int | None = None,
        part: int = 0,
        parts: int = 1,
    ) -> Self:
        """Create the store, or continue an unfinished one after its last committed shard.

        Args:
            path: local folder or URL.
            identity: JSON dict of what the activations come from.
            hook_points: name -> width.
            n_tokens: rows wanted of all parts together; `full` turns True when this one has its share.
            layout: shard and chunk rows (default StoreLayout()).
            seed: of the permutation within shards.
            copy_threads: bound on tensorstore's encoding threads.
            part, parts: which part is written, and how many there are.

        Raises:
            ConfigError: an argument that cannot be.
            DataError: the store there has another identity, hook points, layout, seed or n_tokens (each
                difference is listed), or is damaged, or the disk has no room for all of it.
            BusyError: another process is writing it, or this part of it (local paths).
        """
        layout = layout or StoreLayout()
        check_hook_points(hook_points, layout)
        if isinstance(n_tokens, bool) or not isinstance(n_tokens, int) or n_tokens < 1:
            raise ConfigError(f"n_tokens={n_tokens!r}: give an integer >= 1.")
        if not 0 <= part < check_parts(parts):
            raise ConfigError(f"There is no part {part} of {parts}; parts are numbered from 0.")
        header = Header(plain_json(identity, "identity"), dict(hook_points), n_tokens, layout, int(seed), parts)
        files = StoreFiles(path, make_context(copy_threads=copy_threads))
        with ExitStack() as stack:
            if files.local is not None:
                stack.enter_context(lease(files.local, None if parts == 1 else part))
            writer = cls(files, header, part, stack)
            writer._load()
            writer._resources = stack.pop_all()
        if writer.done:
            writer.close()
        return writer

    @property
    def complete(self) -> bool:
        """The store is finished; there is nothing left to append."""
        return self._complete

    @property
    def done(self) -> bool:
        """This part is finished: all its rows are committed. The store is, when all its parts are."""
        return self._done

    @property
    def missing(self) -> tuple[int, ...]:
        """The parts that were not finished when this one was found or became so."""
        return self._missing

    @property
    def resume(self) -> tuple[dict[str, Any], int] | None:
        """(cursor, skip) as found at opening: recompute the batch of `cursor`, append it without its first
        `skip` rows. None at the start of a store and for a complete one."""
        return self._resume

    @property
    def committed_rows(self) -> int:
        """Rows of this part that survive a kill."""
        return sum(commit.rows for commit in self._commits)

    @property
    def store_rows(self) -> int:
        """Rows of the store, once it is complete; 0 before."""
        return self._store_rows

    @property
    def rows(self) -> int:
        """Rows of this part accepted so far, committed or not."""
        return self._rows

    @property
    def rows_wanted(self) -> int:
        """Rows that this part takes: n_tokens of a store of one part."""
        return self._header.rows_of(self._part)

    @property
    def counters(self) -> dict[str, int]:
        """Totals of the counters given to `append`, over all runs of this capture; of this part."""
        return dict(self._counters)

    @property
    def full(self) -> bool:
        """`rows_wanted` rows are accepted: stop appending and call `finish`."""
        return self._done or self._rows >= self.rows_wanted

    def append(
        self,
        activations: dict[str, np.ndarray],
        tokens: dict[str, np.ndarray],
        *,
        cursor: dict[str, Any],
        skipped: int | None = None,
        counters: dict[str, int] | None = None,
    ) -> None:
        """Add rows in stream order; blocks while two shards are being written.

        Args:
            activations: hook point -> [n, d], any float dtype, stored as bfloat16.
            tokens: token_id, document, position -> integers [n].
            cursor: JSON dict from which the caller can compute this very batch again.
            skipped: rows of this batch that were left out in front, because they are committed already; by default
                `resume`'s skip for the first batch, 0 for all others.
            counters: increments that belong to this whole batch (give them again when it is resumed).

        Raises:
            DataError: wrong names or shapes, a non-finite value (nothing of the batch is stored), a first
                batch that is not the one of `resume`, or a failed write of an earlier shard.
        """
        self._check_failure()
        if self.full:
            return
        rows = self._checked(activations, tokens)
        n = len(rows[METADATA_NAMES[0]])
        cursor = plain_json(cursor, "cursor")
        base = self._skipped(cursor) if skipped is None else skipped
        if n:
            self._submit_if_full(cursor, base)  # filled by an earlier batch: the next row is this one's first
        taken = 0
        while taken < n and not self.full:
            shard = self._open_shard()
            count = shard.fill(rows, taken)
            taken, self._rows = taken + count, self._rows + count
            if taken < n:
                self._submit_if_full(cursor, base + taken)
        for name, increment in (counters or {}).items():
            self._counters[name] = self._counters.get(name, 0) + int(increment)

    def finish(self) -> None:
        """Commit what is buffered; if all parts are done, cut the arrays to what there is and write the manifest.

        Raises:
            DataError: a shard could not be written, or there is not one row in the store.
        """
        self._check_failure()
        if self._done:
            return
        alone = self._header.parts == 1  # else other parts may be being written: the arrays are cut when all are done
        if self._rows == 0 and alone:
            raise self._no_row()
        if self._rows < self._header.requested_tokens and alone:
            self._drain(0)  # no write may run while the arrays change their shape
            self._open_arrays(self._rows)
        if self._shard is not None:
            self._submit(last=True, cursor=None, skip=0)
        self._drain(0)
        if not self._commits:
            none = {name: zero_sums(width) for name, width in self._header.hook_points.items()}
            self._commits = [Commit(self._part, 0, True, None, 0, dict(self._counters), {}, none)]
            write_commit(self._files, self._header, self._commits[0])
        self._done = True
        self._complete_if_all_done()
        self.close()

    def close(self) -> None:
        """Wait for the shards in flight, stop the thread, release the lease. Raises no shard's failure."""
        self._worker.shutdown(wait=True)
        while self._flight:
            future = self._flight.popleft()[1]
            if future.exception() is None:
                self._commits.append(future.result())
        self._shard = None
        self._handles = {}
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(self) -> None:
        """Compare with what is there, drop what is not committed, and take up the thread."""
        files, header = self._files, self._header
        manifest = read_manifest(files)
        if manifest is not None:
            found = differences(manifest.header.to_json(), header.to_json())
            if found:
                raise DataError(
                    f"The store {files.url} was made for something else:\n  " + "\n  ".join(found) + "\n"
                    "Choose another store path, restore these settings, or delete the store."
                )
        files.clear_stale_locks(self._is_mine)
        self._commits = committed_prefix(files, header, self._kinds, self._part)
        self._rows = self.committed_rows
        self._next_shard = self._part + header.parts * len(self._commits)
        last = self._commits[-1] if self._commits else None
        if manifest is not None and manifest.complete and self._has_all_of(manifest):
            for kind in self._kinds:
                write_zarr_json(files, kind, manifest.array_rows, header.layout)
            self._counters, self._store_rows = dict(manifest.counters or {}), manifest.n_tokens
            self._complete = self._done = True
            return
        if last is not None:
            self._counters = dict(last.counters)
        self._done = last.last if last is not None else self.rows_wanted == 0
        if self._done:
            self._complete_if_all_done()
            return
        if last is not None:
            assert last.cursor is not None
            self._resume = (last.cursor, last.skip)
        check_space(files, header)
        if manifest is None or manifest.complete:
            files.write(MANIFEST, Manifest(header).to_bytes())
        self._drop_uncommitted()
        self._open_arrays(header.requested_tokens)

    def _is_mine(self, key: str) -> bool:
        """Whether a file is this writer's alone; of several, each has its own shards."""
        shard = shard_of(key)
        return self._header.parts == 1 or (shard is not None and shard % self._header.parts == self._part)

    def _has_all_of(self, manifest: Manifest) -> bool:
        """Whether the commits of this part are those that the manifest names."""
        wanted = [shard for shard in manifest.committed if shard % self._header.parts == self._part]
        return wanted == [commit.index for commit in self._commits]

    def _drop_uncommitted(self) -> None:
        done = [commit.index for commit in self._commits]
        for folder, keep in (
            ("commits", {commit_key(i) for i in done}),
            *((k.folder, {f"{k.folder}/{key}" for key in ("zarr.json", *map(k.shard_key, done))}) for k in self._kinds),
        ):
            found = [f"{folder}/{key}" for key in self._files.list(folder)]
            self._files.delete([key for key in found if key not in keep and self._is_mine(key)])

    def _open_arrays(self, rows: int) -> None:
        for kind in self._kinds:
            write_zarr_json(self._files, kind, rows, self._header.layout)
            self._handles[kind.name] = open_array(self._files, kind, rows, self._header.layout)

    def _checked(self, activations: dict[str, np.ndarray], tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        wanted, given = set(self._header.hook_points), set(activations)
        if wanted != given or set(tokens) != set(METADATA_NAMES):
            raise DataError(
                f"append: the store has hook points {sorted(wanted)} and tokens {sorted(METADATA_NAMES)}, "
                f"got {sorted(given)} and {sorted(tokens)}."
            )
        n = len(tokens[METADATA_NAMES[0]])
        rows = {name: as_bf16_rows(name, activations[name], n, d) for name, d in self._header.hook_points.items()}
        return rows | {name: as_int32_rows(name, tokens[name], n) for name in METADATA_NAMES}

    def _skipped(self, cursor: dict[str, Any]) -> int:
        """Rows of this batch that were committed before it was resumed."""
        first, self._continued = not self._continued, True
        if self._resume is None or not first:
            return 0
        if cursor != self._resume[0]:
            self._continued = False
            raise DataError(
                f"Store {self._files.url} continues at cursor {self._resume[0]}, but the first batch given "
                f"has cursor {cursor}. Start from writer.resume."
            )
        return self._resume[1]

    def _open_shard(self) -> Shard:
        if self._shard is None:
            header = self._header
            left = header.requested_tokens - self._next_shard * header.layout.shard_rows
            self._shard = Shard(self._kinds, header.seed, self._next_shard, header.layout.shard_rows, left)
        return self._shard

    def _submit_if_full(self, cursor: dict[str, Any], skip: int) -> None:
        """Submit a full shard now that its next row's batch is known; the store's last waits for finish."""
        if self._shard is not None and self._shard.is_full and not self.full:
            self._submit(last=False, cursor=cursor, skip=skip)

    def _submit(self, *, last: bool, cursor: dict[str, Any] | None, skip: int) -> None:
        """Hand the current shard to the background thread, waiting for room."""
        self._drain(_IN_FLIGHT - 1)
        shard = self._open_shard()
        counters = dict(self._counters)
        before = self._flight[-1][1] if self._flight else None
        future = self._worker.submit(self._store, shard, last, cursor, skip, counters, before)
        self._flight.append((shard.index, future))
        self._shard, self._next_shard = None, self._next_shard + self._header.parts

    def _store(
        self,
        shard: Shard,
        last: bool,
        cursor: dict[str, Any] | None,
        skip: int,
        counters: dict[str, int],
        before: Future[Commit] | None,
    ) -> Commit:
        """In a background thread: write the shard's arrays, then, all durable and `before` committed, its commit."""
        if self._failure is not None:
            raise self._failure
        rows = shard.take()
        start = shard.index * self._header.layout.shard_rows
        try:
            writes = [
                self._handles[name][start : start + shard.filled].write(
                    values, can_reference_source_data_indefinitely=True
                )
                for name, values in rows.items()
            ]
            hashing = {name: self._hashers.submit(shard.digest, values) for name, values in rows.items()}
            sums = {name: sums_of(rows[name]) for name in self._header.hook_points}
            hashes = {name: future.result() for name, future in hashing.items()}
            for write in writes:
                write.result()
        except Exception as error:
            self._failure = DataError(
                f"Store {self._files.url}: shard {shard.index} (rows {start} to {start + shard.filled}) "
                f"could not be written: {write_trouble(self._files, error)}"
            )
            raise self._failure from error
        commit = Commit(shard.index, shard.filled, last, cursor, skip, counters, hashes, sums)
        if before is not None:
            before.result()  # a shard counts only after those before it; their failure is this one's too
        try:
            write_commit(self._files, self._header, commit)
        except DataError as error:
            self._failure = DataError(f"Store {self._files.url}: commit of shard {shard.index}: {error}")
            raise self._failure from error
        return commit

    def _drain(self, allowed: int) -> None:
        """Wait until at most `allowed` shards are in flight."""
        while len(self._flight) > allowed:
            commit = self._flight[0][1].result()
            self._flight.popleft()
            self._commits.append(commit)

    def _check_failure(self) -> None:
        while self._flight and self._flight[0][1].done():
            self._drain(len(self._flight) - 1)
        if self._failure is not None:
            raise self._failure

    def _complete_if_all_done(self) -> None:
        """Write the complete manifest, unless a part is missing.

        Several processes may do it at a time: what they write is the same, and a file is replaced in one go.
        """
        header = self._header
        if header.parts == 1:
            self._write_complete_manifest(self._commits, self._counters)
            return
        states = part_states(self._files, header)
        self._missing = tuple(part for part, state in enumerate(states) if not state.done)
        if self._missing:
            return
        of_parts = [committed_prefix(self._files, header, self._kinds, part) for part in range(header.parts)]
        whole = [sum(commit.rows for commit in commits) for commits in of_parts]
        self._missing = tuple(part for part, rows in enumerate(whole) if rows < states[part].rows)
        if self._missing:
            return  # a shard's file was lost: that part is to be written again
        counters: dict[str, int] = {}
        for commits in filter(None, of_parts):
            for name, count in commits[-1].counters.items():
                counters[name] = counters.get(name, 0) + count
        every = sorted(itertools.chain.from_iterable(of_parts), key=lambda commit: commit.index)
        self._write_complete_manifest(every, counters)

    def _write_complete_manifest(self, commits: list[Commit], counters: dict[str, int]) -> None:
        header, there = self._header, {commit.index: commit for commit in commits if commit.rows}
        if not there:
            raise self._no_row()
        sums: dict[str, Sums] = {name: zero_sums(width) for name, width in header.hook_points.items()}
        for commit in commits:
            sums = {name: total + commit.sums[name] for name, total in sums.items()}
        manifest = Manifest(
            header,
            True,
            sum(commit.rows for commit in commits),
            tuple((there[i].rows, there[i].sha256) if i in there else (0, {}) for i in range(max(there) + 1)),
            {name: moments(total) for name, total in sums.items()},
            counters,
        )
        for kind in self._kinds:
            write_zarr_json(self._files, kind, manifest.array_rows, header.layout)
        self._files.write(MANIFEST, manifest.to_bytes())
        self._complete, self._store_rows = True, manifest.n_tokens

    def _no_row(self) -> DataError:
        return DataError(f"Store {self._files.url}: the text gave not one row to store. Check the text source.")
