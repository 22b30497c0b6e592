"""Check every byte of a store against its commits and its manifest."""

import hashlib
import os

import numpy as np

from saejax.core.errors import DataError
from saejax.store.commits import Commit, commit_key, read_commit, shard_remedy
from saejax.store.files import StoreFiles
from saejax.store.manifest import Manifest, read_manifest
from saejax.store.reader import StoreReader
from saejax.store.statistics import moments, zero_sums

_PIECE_BYTES = 32 << 20


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Problems of the store at `path`, one line each; an empty list means that all of it is good.

    Reads every row of every array and compares sha256 with the manifest, the manifest with the commits,
    and the statistics with the sums in the commits. Damage is reported, not raised.
    """
    try:
        files = StoreFiles(path)
        manifest = read_manifest(files)
        reader = StoreReader.open(path)
    except DataError as error:
        return [str(error)]
    assert manifest is not None  # StoreReader.open refuses a store without
    problems: list[str] = []
    commits: list[Commit] = []
    for shard in range(len(manifest.shards)):
        commits += _check_commit(files, manifest, shard, problems)
        _check_shard(files, reader, manifest, shard, problems)
    known = {commit_key(shard) for shard in range(len(manifest.shards))}
    for key in files.list("commits"):
        if f"commits/{key}" not in known:
            problems.append(f"{files.name('commits')}/{key} is no commit of this store. Delete it.")
    if len(commits) == len(manifest.shards):
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
        problems.append(f"Shard {shard}: {name} is missing. Run the same capture command again to rewrite the shard.")
        return []
    if (commit.rows, commit.sha256) != manifest.shards[shard]:
        problems.append(f"Shard {shard}: {name} and the manifest name different rows or checksums.")
    return [commit]


def _check_shard(files: StoreFiles, reader: StoreReader, manifest: Manifest, shard: int, problems: list[str]) -> None:
    rows, hashes = manifest.shards[shard]
    start = shard * reader.layout.shard_rows
    for name, expected in hashes.items():
        width = reader.hook_points.get(name, 2)  # metadata: 4 bytes, like two bfloat16
        step = max(1, _PIECE_BYTES // (2 * width * reader.layout.chunk_rows)) * reader.layout.chunk_rows
        digest = hashlib.sha256()
        try:
            for low in range(start, start + rows, step):
                values = reader.array_rows(name, low, min(start + rows, low + step))
                digest.update(np.ascontiguousarray(values).view(np.uint8).data)
        except DataError as error:
            problems.append(str(error))
            continue
        if digest.hexdigest() != expected:
            problems.append(
                f"Store {reader.url}: array {name!r}, shard {shard} (rows {start} to {start + rows}) has "
                f"sha256 {digest.hexdigest()}, the manifest says {expected}. {shard_remedy(files, shard)}"
            )


def _check_statistics(files: StoreFiles, manifest: Manifest, commits: list[Commit], problems: list[str]) -> None:
    for name, width in manifest.header.hook_points.items():
        total = zero_sums(width)
        for commit in commits:
            total = total + commit.sums[name]
        stored = (manifest.statistics or {})[name]
        if moments(total).to_json() != stored.to_json():
            problems.append(f"{files.url}: the statistics of {name!r} in the manifest do not fit the commits.")
