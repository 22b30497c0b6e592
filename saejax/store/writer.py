"""Write a store: rows come in stream order and go to disk as whole, permuted, committed shards.

A run killed at any moment and finished later leaves the same bytes as one that was never disturbed:
shards are a pure function of the rows and the seed, and only a shard's commit file makes it count.
"""

import os
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

from saejax.core.errors import ConfigError, DataError
from saejax.core.lease import lease
from saejax.store.commits import Commit, write_commit
from saejax.store.files import StoreFiles
from saejax.store.layout import METADATA_NAMES, StoreLayout, arrays_of, check_hook_points
from saejax.store.manifest import Header, Manifest, check_parts, plain_json
from saejax.store.remote_lease import RemoteLease
from saejax.store.resuming import complete_if_all_done, is_done, no_row, resume_part
from saejax.store.shard import Shard, as_bf16_rows, as_int32_rows
from saejax.store.shard_writers import ShardWriters
from saejax.store.statistics import zero_sums


class StoreWriter:
    """The single writer of a store, or of a part of one; make it with `open`, use it as a context manager.

        with StoreWriter.open(path, ...) as writer:
            cursor = writer.resume or start
            while not writer.full:
                ... compute the batch at cursor ...
                writer.append(activations, tokens, cursor=cursor, counters=counted)
            writer.finish()

    Leaving the block without `finish` waits for the shards in flight and leaves a store to be resumed.

    Of a store of P parts, part p is the shards p, p + P, p + 2P... Each part has its own writer, in whatever process,
    its own rows and its own cursors; what is on disk in the end does not depend on which process wrote it, or when.
    Whoever finds that all parts are done writes the manifest.

    Attributes:
        resume: the cursor of the batch that must come first, because it has the first row that is not committed; None
            at the start of a store and for a complete one.
        to_skip: rows at the front of the batches to come that are committed already, and are dropped by `append`.
        done: all rows of this part are committed. The store is complete, when all its parts are.
        missing: the parts that were not finished when this one was found or became so.
        rows: of this part that were accepted, those committed before included.
        counters: totals of the counters given to `append`, over all runs of this capture; of this part.
    """

    def __init__(
        self,
        files: StoreFiles,
        header: Header,
        part: int,
        writers: ShardWriters,
        manifest: Manifest | None,
        missing: tuple[int, ...],
    ) -> None:
        self._files, self._header, self._part, self._writers = files, header, part, writers
        self._manifest, self.missing = manifest, missing
        commits = writers.commits
        self.done = is_done(header, part, commits)
        self.rows = self.committed_rows
        self._next_shard = part + header.parts * len(commits)
        self._shard: Shard | None = None
        counted = manifest.counters if manifest is not None else commits[-1].counters if commits else None
        self.counters: dict[str, int] = dict(counted or {})
        under_way = commits[-1] if commits and not self.done else None
        self.resume, self.to_skip = (under_way.cursor, under_way.skip) if under_way else (None, 0)
        self._awaited = self.resume  # until it has come
        self._held = ExitStack()

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
            part, parts: which part is written, and how many there are.

        Raises:
            ConfigError: an argument that cannot be.
            DataError: the store there has another identity, hook points, layout, seed or n_tokens (each
                difference is listed), or is damaged, or the disk has no room for all of it.
            BusyError: another process is writing it, or this part of it.
        """
        layout = layout or StoreLayout()
        check_hook_points(hook_points, layout)
        if isinstance(n_tokens, bool) or not isinstance(n_tokens, int) or n_tokens < 1:
            raise ConfigError(f"n_tokens={n_tokens!r}: give an integer >= 1.")
        if not 0 <= part < check_parts(parts):
            raise ConfigError(f"There is no part {part} of {parts}; parts are numbered from 0.")
        header = Header(plain_json(identity, "identity"), dict(hook_points), n_tokens, layout, int(seed), parts)
        files = StoreFiles(path)
        leased = None if parts == 1 else part
        with ExitStack() as stack:
            still_ours = None
            if files.local is None:
                still_ours = stack.enter_context(RemoteLease(files, leased)).check
            else:
                stack.enter_context(lease(files.local, leased))
            commits, manifest, missing = resume_part(files, header, part)
            writer = cls(files, header, part, ShardWriters(files, header, commits, still_ours), manifest, missing)
            if not writer.done:
                writer._writers.open_arrays(n_tokens)
                writer._held = stack.pop_all()  # the lease; a finished part needs none
        return writer

    @property
    def complete(self) -> bool:
        """The store is finished; there is nothing left to append."""
        return self._manifest is not None

    @property
    def committed_rows(self) -> int:
        """Rows of this part that survive a kill."""
        return sum(commit.rows for commit in self._writers.commits)

    @property
    def store_rows(self) -> int:
        """Rows of the store, once it is complete; 0 before."""
        return self._manifest.n_tokens if self._manifest is not None else 0

    @property
    def rows_wanted(self) -> int:
        """Rows that this part takes: n_tokens of a store of one part."""
        return self._header.rows_of(self._part)

    @property
    def full(self) -> bool:
        """`rows_wanted` rows are accepted: stop appending and call `finish`."""
        return self.done or self.rows >= self.rows_wanted

    def append(
        self,
        activations: dict[str, np.ndarray],
        tokens: dict[str, np.ndarray],
        *,
        cursor: dict[str, Any],
        counters: dict[str, int] | None = None,
    ) -> None:
        """Add rows in stream order, but for the first `to_skip`; blocks while two shards are being written.

        Args:
            activations: hook point -> [n, d], any float dtype, stored as bfloat16.
            tokens: token_id, document, position -> integers [n].
            cursor: JSON dict from which the caller can compute this very batch again.
            counters: increments that belong to this whole batch (give them again when it is resumed).

        Raises:
            DataError: wrong names or shapes, a non-finite value (nothing of the batch is stored), a first
                batch that is not the one of `resume`, or a failed write of an earlier shard.
        """
        self._writers.check()
        if self.full:
            return
        rows = self._checked(activations, tokens)
        n = len(rows[METADATA_NAMES[0]])
        cursor = plain_json(cursor, "cursor")
        if self._awaited not in (None, cursor):
            raise DataError(
                f"Store {self._files.url} continues at cursor {self._awaited}, but the first batch given "
                f"has cursor {cursor}. Start from writer.resume."
            )
        self._awaited = None
        taken = min(self.to_skip, n)
        self.to_skip -= taken
        if taken < n:
            self._send_if_full(cursor, taken)  # filled by an earlier batch: the next row is this one's
        while taken < n and not self.full:
            if self._shard is None:
                self._shard = self._new_shard()
            count = self._shard.fill(rows, taken)
            taken, self.rows = taken + count, self.rows + count
            if taken < n:
                self._send_if_full(cursor, taken)
        for name, increment in (counters or {}).items():
            self.counters[name] = self.counters.get(name, 0) + int(increment)

    def finish(self) -> None:
        """Commit what is buffered; if all parts are done, cut the arrays to what there is and write the manifest.

        Raises:
            DataError: a shard could not be written, or there is not one row in the store.
        """
        self._writers.check()
        if self.done:
            return
        alone = self._header.parts == 1  # else other parts may be being written: the arrays are cut when all are done
        if self.rows == 0 and alone:
            raise no_row(self._files)
        if self.rows < self._header.requested_tokens and alone:
            self._writers.wait()  # no write may run while the arrays change their shape
            self._writers.open_arrays(self.rows)
        if self._shard is not None:
            self._send(self._shard, last=True, cursor=None, skip=0)
        self._writers.wait()
        if not self._writers.commits:  # of a part of several that its text gave nothing is said, too
            none = {name: zero_sums(width) for name, width in self._header.hook_points.items()}
            commit = Commit(self._part, 0, True, None, 0, dict(self.counters), sha256={}, sums=none)
            write_commit(self._files, self._header, commit)
            self._writers.commits.append(commit)
        self.done = True
        self._manifest, self.missing = complete_if_all_done(
            self._files, self._header, self._writers.commits, self.counters
        )
        self.close()

    def close(self) -> None:
        """Wait for the shards in flight, stop the threads, release the lease. Raises no shard's failure."""
        self._writers.close()
        self._shard = None
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _checked(self, activations: dict[str, np.ndarray], tokens: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        wanted, names = set(self._header.hook_points), set(activations)
        if wanted != names or set(tokens) != set(METADATA_NAMES):
            raise DataError(
                f"append: the store has hook points {sorted(wanted)} and tokens {sorted(METADATA_NAMES)}, "
                f"got {sorted(names)} and {sorted(tokens)}."
            )
        n = len(tokens[METADATA_NAMES[0]])
        rows = {name: as_bf16_rows(name, activations[name], n, d) for name, d in self._header.hook_points.items()}
        return rows | {name: as_int32_rows(name, tokens[name], n) for name in METADATA_NAMES}

    def _new_shard(self) -> Shard:
        header = self._header
        left = header.requested_tokens - self._next_shard * header.layout.shard_rows
        kinds = arrays_of(header.hook_points)
        return Shard(kinds, header.seed, self._next_shard, header.layout.shard_rows, left)

    def _send_if_full(self, cursor: dict[str, Any], skip: int) -> None:
        """Send a full shard off now that its next row's batch is known; the store's last waits for finish."""
        if self._shard is not None and self._shard.is_full and not self.full:
            self._send(self._shard, last=False, cursor=cursor, skip=skip)

    def _send(self, shard: Shard, *, last: bool, cursor: dict[str, Any] | None, skip: int) -> None:
        commit = Commit(shard.index, shard.filled, last, cursor, skip, dict(self.counters), sha256={}, sums={})
        self._writers.send(shard, commit)
        self._shard, self._next_shard = None, self._next_shard + self._header.parts
