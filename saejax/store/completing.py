"""The end of a store: once all its parts are done, its arrays are cut to what there is and its manifest says so."""

import itertools

from saejax.core.errors import DataError
from saejax.store.commits import Commit, committed_prefix, part_states
from saejax.store.files import StoreFiles
from saejax.store.layout import write_zarr_json
from saejax.store.manifest import MANIFEST, Header, Manifest
from saejax.store.statistics import Sums, moments, zero_sums


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
        return _complete(files, header, commits, counters), ()
    states = part_states(files, header)
    if missing := tuple(part for part, state in enumerate(states) if not state.done):
        return None, missing
    kinds = header.arrays
    of_parts = [committed_prefix(files, header, kinds, part) for part in range(header.parts)]
    whole = [sum(commit.rows for commit in found) for found in of_parts]
    if missing := tuple(part for part, rows in enumerate(whole) if rows < states[part].rows):
        return None, missing  # a shard's file was lost: that part is to be written again
    totals: dict[str, int] = {}
    for found in filter(None, of_parts):
        for name, count in found[-1].counters.items():
            totals[name] = totals.get(name, 0) + count
    every = sorted(itertools.chain.from_iterable(of_parts), key=lambda commit: commit.index)
    return _complete(files, header, every, totals), ()


def _complete(files: StoreFiles, header: Header, commits: list[Commit], counters: dict[str, int]) -> Manifest:
    there = {commit.index: commit for commit in commits if commit.rows}
    if not there:
        raise no_row(files)
    sums: dict[str, Sums] = {name: zero_sums(width) for name, width in header.hook_points.items()}
    for commit in commits:
        sums = {name: total + commit.sums[name] for name, total in sums.items()}
    manifest = Manifest(
        header,
        True,
        sum(commit.rows for commit in commits),
        tuple((there[i].rows, there[i].sha256) if i in there else (0, {}) for i in range(max(there) + 1)),
        {name: moments(total) for name, total in sums.items()},
        dict(counters),
    )
    for kind in header.arrays:
        write_zarr_json(files, kind, manifest.array_rows, header.layout)
    files.write(MANIFEST, manifest.to_bytes())
    return manifest


def no_row(files: StoreFiles) -> DataError:
    """The error of a store whose text gave nothing."""
    return DataError(f"Store {files.url}: the text gave not one row to store. Check the text source.")
