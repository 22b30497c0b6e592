"""Opening a store to write: what is on disk compared with what is wanted, and the manifest once all parts are done."""

import itertools
from collections import Counter

from saejax.core.errors import DataError
from saejax.store.commits import Commit, commit_key, committed_prefix, part_states
from saejax.store.files import StoreFiles
from saejax.store.layout import shard_of, write_zarr_json
from saejax.store.manifest import MANIFEST, Header, Manifest, header_differences, read_manifest
from saejax.store.space import check_space
from saejax.store.statistics import moments, zero_sums


def resume_part(files: StoreFiles, header: Header, part: int) -> tuple[list[Commit], Manifest | None, tuple[int, ...]]:
    """Read a part, complete the store if that is all it lacks, or make it ready for the rows that are missing.

    The caller holds the part's lease. What is not committed is deleted.

    Returns:
        The commits of the part's durable shards, in order; the manifest, where the store is complete; where this part
        is done, the parts that are not.

    Raises:
        DataError: the store was made for something else, is damaged, or the disk has no room for it.
    """
    manifest = read_manifest(files)
    if manifest is not None and (differing := header_differences(manifest.header.to_json(), header.to_json())):
        raise DataError(
            f"The store {files.url} was made for something else:\n  " + "\n  ".join(differing) + "\n"
            "Choose another store path, restore these settings, or delete the store."
        )
    files.clear_stale_locks(lambda key: _is_of(header, part, key))
    kinds = header.arrays
    commits = committed_prefix(files, header, kinds, part)
    named = [shard for shard in manifest.committed if shard % header.parts == part] if manifest is not None else []
    if manifest is not None and manifest.complete and named == [commit.index for commit in commits]:
        for kind in kinds:
            write_zarr_json(files, kind, manifest.array_rows, header.layout)
        return commits, manifest, ()
    if is_done(header, part, commits):
        counters = commits[-1].counters if commits else {}
        return commits, *complete_if_all_done(files, header, commits, counters)
    check_space(files, header)
    if manifest is None or manifest.complete:
        files.write(MANIFEST, Manifest(header).to_bytes())
    _drop_uncommitted(files, header, part, [commit.index for commit in commits])
    return commits, None, ()


def is_done(header: Header, part: int, commits: list[Commit]) -> bool:
    """All rows of the part are in its commits, as many as its text gave."""
    return commits[-1].last if commits else header.rows_of(part) == 0


def _is_of(header: Header, part: int, key: str) -> bool:
    """True for a file of this part alone; of several parts, each has its own shards."""
    shard = shard_of(key)
    return header.parts == 1 or (shard is not None and shard % header.parts == part)


def _drop_uncommitted(files: StoreFiles, header: Header, part: int, done: list[int]) -> None:
    keep = {commit_key(shard) for shard in done}
    folders = ["commits"]
    for kind in header.arrays:
        folders.append(kind.folder)
        keep.update(f"{kind.folder}/{key}" for key in ("zarr.json", *map(kind.shard_key, done)))
    for folder in folders:
        present = [f"{folder}/{key}" for key in files.list(folder)]
        files.delete([key for key in present if key not in keep and _is_of(header, part, key)])


def complete_if_all_done(
    files: StoreFiles, header: Header, commits: list[Commit], counters: dict[str, int]
) -> tuple[Manifest | None, tuple[int, ...]]:
    """Write the complete manifest unless a part is missing; returns it, or None and the missing parts.

    Several processes may do it at a time: what they write is the same, and a file is replaced in one go.

    Args:
        commits, counters: of the caller's part, which is done; of several parts all are read from disk.

    Raises:
        DataError: a commit is damaged, or there is not one row in the store.
    """
    if header.parts == 1:
        return _write_complete(files, header, commits, counters), ()
    states = part_states(files, header)
    if missing := tuple(part for part, state in enumerate(states) if not state.done):
        return None, missing
    kinds = header.arrays
    of_parts = [committed_prefix(files, header, kinds, part) for part in range(header.parts)]
    whole = [sum(commit.rows for commit in commits) for commits in of_parts]
    if missing := tuple(part for part, rows in enumerate(whole) if rows < states[part].rows):
        return None, missing  # a shard's file was lost: that part is to be written again
    totals: Counter[str] = Counter()
    for part_commits in filter(None, of_parts):
        totals.update(part_commits[-1].counters)
    every = sorted(itertools.chain.from_iterable(of_parts), key=lambda commit: commit.index)
    return _write_complete(files, header, every, totals), ()


def _write_complete(files: StoreFiles, header: Header, commits: list[Commit], counters: dict[str, int]) -> Manifest:
    there = {commit.index: commit for commit in commits if commit.rows}
    if not there:
        raise no_row(files)
    statistics = {
        name: moments(sum((commit.sums[name] for commit in commits), zero_sums(width)))
        for name, width in header.hook_points.items()
    }
    manifest = Manifest(
        header,
        True,
        sum(commit.rows for commit in commits),
        tuple((there[i].rows, there[i].sha256) if i in there else (0, {}) for i in range(max(there) + 1)),
        statistics,
        dict(counters),
    )
    for kind in header.arrays:
        write_zarr_json(files, kind, manifest.array_rows, header.layout)
    files.write(MANIFEST, manifest.to_bytes())
    return manifest


def no_row(files: StoreFiles) -> DataError:
    """The error of a store whose text gave nothing."""
    return DataError(f"Store {files.url}: the text gave not one row to store. Check the text source.")
