"""What is on disk when a writer opens a store: compared with what it wants, tidied, and where it goes on."""

from dataclasses import dataclass
from typing import Any

from saejax.core.errors import DataError
from saejax.store.commits import Commit, commit_key, committed_prefix
from saejax.store.completing import complete_if_all_done
from saejax.store.files import StoreFiles
from saejax.store.layout import shard_of, write_zarr_json
from saejax.store.manifest import MANIFEST, Header, Manifest, differences, read_manifest
from saejax.store.space import check_space


@dataclass(frozen=True)
class Found:
    """One part of a store as its writer finds it.

    Attributes:
        commits: of its durable shards, in order.
        done: all its rows are in them.
        manifest: of the complete store; None while a part is missing.
        missing: the parts that were not finished, where this one was.
    """

    commits: list[Commit]
    done: bool
    manifest: Manifest | None = None
    missing: tuple[int, ...] = ()

    @property
    def counters(self) -> dict[str, int]:
        """What the capture has counted so far: in the whole store once it is complete, in this part before."""
        if self.manifest is not None:
            return dict(self.manifest.counters or {})
        return _counters(self.commits)

    @property
    def resume(self) -> tuple[dict[str, Any], int] | None:
        """The cursor of the batch that holds the next row, and how many of its rows are committed."""
        if self.done or not self.commits:
            return None
        last = self.commits[-1]
        assert last.cursor is not None
        return last.cursor, last.skip


def take_up(files: StoreFiles, header: Header, part: int) -> Found:
    """Find a part, complete the store if that is all it lacks, or make it ready for the rows that are missing.

    The caller holds the part's lease. What is not committed is deleted.

    Raises:
        DataError: the store was made for something else, is damaged, or the disk has no room for it.
    """
    manifest = read_manifest(files)
    if manifest is not None and (found := differences(manifest.header.to_json(), header.to_json())):
        raise DataError(
            f"The store {files.url} was made for something else:\n  " + "\n  ".join(found) + "\n"
            "Choose another store path, restore these settings, or delete the store."
        )
    files.clear_stale_locks(lambda key: _is_of(header, part, key))
    kinds = header.arrays
    commits = committed_prefix(files, header, kinds, part)
    if manifest is not None and manifest.complete and _has_all_of(manifest, part, commits):
        for kind in kinds:
            write_zarr_json(files, kind, manifest.array_rows, header.layout)
        return Found(commits, True, manifest)
    if commits[-1].last if commits else header.rows_of(part) == 0:
        return Found(commits, True, *complete_if_all_done(files, header, commits, _counters(commits)))
    check_space(files, header)
    if manifest is None or manifest.complete:
        files.write(MANIFEST, Manifest(header).to_bytes())
    _drop_uncommitted(files, header, part, [commit.index for commit in commits])
    return Found(commits, False)


def _counters(commits: list[Commit]) -> dict[str, int]:
    return dict(commits[-1].counters) if commits else {}


def _is_of(header: Header, part: int, key: str) -> bool:
    """Whether a file is this part's alone; of several parts, each has its own shards."""
    shard = shard_of(key)
    return header.parts == 1 or (shard is not None and shard % header.parts == part)


def _has_all_of(manifest: Manifest, part: int, commits: list[Commit]) -> bool:
    """Whether the commits of this part are those that the manifest names."""
    wanted = [shard for shard in manifest.committed if shard % manifest.header.parts == part]
    return wanted == [commit.index for commit in commits]


def _drop_uncommitted(files: StoreFiles, header: Header, part: int, done: list[int]) -> None:
    keep = {commit_key(shard) for shard in done}
    folders = ["commits"]
    for kind in header.arrays:
        folders.append(kind.folder)
        keep.update(f"{kind.folder}/{key}" for key in ("zarr.json", *map(kind.shard_key, done)))
    for folder in folders:
        found = [f"{folder}/{key}" for key in files.list(folder)]
        files.delete([key for key in found if key not in keep and _is_of(header, part, key)])
