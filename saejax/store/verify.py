"""Check every byte of a store against its commits and its manifest."""

import hashlib
import os
from collections.abc import Callable

import numpy as np

from saejax.core.errors import DataError
from saejax.store.commits import Commit, commit_key, read_commit, shard_remedy
from saejax.store.files import StoreFiles
from saejax.store.manifest import Manifest
from saejax.store.reader import ArrayReader, complete_manifest
from saejax.store.statistics import moments, zero_sums

_PIECE_BYTES = 32 << 20


def verify(path: str | os.PathLike[str], advance: Callable[[int], None] = lambda rows: None) -> list[str]:
    """Problems of the store at `path`, one line each; an empty list means that all of it is good.

    Reads every row of every array and compares sha256 with the manifest, the manifest with the commits,
    and the statistics with the sums in the commits. Damage is reported, not raised, and damage of one file does not
    hide that of another; without a readable manifest there is nothing to compare with.

    Args:
        path: local folder or URL.
        advance: told the rows of each shard once it is checked.
    """
    try:
        files = StoreFiles(path)
        manifest = complete_manifest(files)
    except DataError as error:
        return [str(error)]
    problems: list[str] = []
    arrays: dict[str, ArrayReader] = {}
    for kind in manifest.header.arrays:
        try:
            arrays[kind.name] = ArrayReader(files, kind, manifest.array_rows, manifest.header.layout)
        except DataError as error:
            problems.append(str(error))
    commits: list[Commit] = []
    for shard, (rows, _) in manifest.committed.items():
        commits += _check_commit(files, manifest, shard, problems)
        if rows:
            _check_shard(files, arrays, manifest, shard, problems)
        advance(rows)
    known = {commit_key(shard) for shard in manifest.committed}
    for key in files.list("commits"):
        if f"commits/{key}" not in known:
            problems.append(f"{files.name('commits')}/{key} is no commit of this store. Delete it.")
    if len(commits) == len(known):
        _check_statistics(files, manifest, commits, problems)
    return problems


def _check_commit(files: StoreFiles, manifest: Manifest, shard: int, problems: list[str]) -> list[Commit]:
    name = files.name(commit_key(shard))
    try:
        commit = read_commit(files, manifest.header, shard)
    except DataError as error:
        problems.append(str(error))
        return []
    if commit is None:
        problems.append(
            f"Shard {shard}: {name} is missing. Run the command that made the store again to rewrite the shard."
        )
        return []
    if (commit.rows, commit.sha256) != manifest.committed[shard]:
        problems.append(f"Shard {shard}: {name} and the manifest name different rows or checksums.")
    return [commit]


def _check_shard(
    files: StoreFiles, arrays: dict[str, ArrayReader], manifest: Manifest, shard: int, problems: list[str]
) -> None:
    rows, hashes = manifest.shards[shard]
    layout = manifest.header.layout
    start = shard * layout.shard_rows
    for kind in manifest.header.arrays:
        if kind.name not in arrays:
            continue
        chunk_bytes = layout.chunk_rows * (kind.width or 1) * kind.dtype.itemsize
        step = max(1, _PIECE_BYTES // chunk_bytes) * layout.chunk_rows
        digest = hashlib.sha256()
        try:
            for low in range(start, start + rows, step):
                values = arrays[kind.name].rows(low, min(start + rows, low + step))
                digest.update(np.ascontiguousarray(values).view(np.uint8).data)
        except DataError as error:
            problems.append(str(error))
            continue
        if digest.hexdigest() != hashes.get(kind.name):
            problems.append(
                f"Store {files.url}: array {kind.name!r}, shard {shard} (file {kind.folder}/{kind.shard_key(shard)}, "
                f"rows {start} to {start + rows}) has sha256 {digest.hexdigest()}, the manifest says "
                f"{hashes.get(kind.name)}. {shard_remedy(files, shard)}"
            )


def _check_statistics(files: StoreFiles, manifest: Manifest, commits: list[Commit], problems: list[str]) -> None:
    for name, width in manifest.header.hook_points.items():
        total = sum((commit.sums[name] for commit in commits), zero_sums(width))
        if moments(total).to_json() != (manifest.statistics or {})[name].to_json():
            problems.append(f"{files.url}: the statistics of {name!r} in the manifest do not fit the commits.")
