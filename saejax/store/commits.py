"""commits/000000.json ...: one small file for each shard whose data is durable; the truth for resuming."""

import base64
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.store.files import StoreFiles, seal, unseal
from saejax.store.layout import ArrayKind
from saejax.store.manifest import Header
from saejax.store.statistics import Sums


@dataclass(frozen=True)
class Commit:
    """One durable shard.

    Attributes:
        index: number of the shard.
        rows: rows in it; 0 if the part's text gave no row at all. Then its first commit says so.
        last: the stream of its part ends with it.
        cursor, skip: the batch holding the next row, and how many of its rows are committed already
            (None, 0 when `last`).
        counters: totals over the batches that lie wholly in this and earlier shards of the part.
        sha256: array name -> hash of the shard's row bytes as stored.
        sums: hook point -> sums of its rows.
    """

    index: int
    rows: int
    last: bool
    cursor: dict[str, Any] | None
    skip: int
    counters: dict[str, int]
    sha256: dict[str, str]
    sums: dict[str, Sums]


def commit_key(index: int) -> str:
    return f"commits/{index:06d}.json"


def write_commit(files: StoreFiles, header: Header, commit: Commit) -> None:
    """Write the commit atomically and durably; its shard must be durable before."""
    sums = {name: _sums_to_json(sums) for name, sums in commit.sums.items()}
    files.write(commit_key(commit.index), seal({"store": header.fingerprint, **vars(commit), "sums": sums}))


def read_commit(files: StoreFiles, header: Header, index: int) -> Commit | None:
    """The commit of shard `index`, or None when there is none.

    Raises:
        DataError: damaged, or of a store with another identity.
    """
    key = commit_key(index)
    raw = files.read(key)
    if raw is None:
        return None
    remedy = shard_remedy(files, index)
    value = unseal(raw, f"Shard {index}: {files.name(key)}", remedy)
    if value.get("store") != header.fingerprint:
        raise DataError(
            f"{files.name(key)} belongs to a store with another identity, hook points, layout, seed or "
            f"n_tokens than {files.url}. Choose another store path, or delete {files.name('commits')}."
        )
    # Only the first commit of a part may have no rows, and only in a store of several parts.
    fewest = 0 if header.parts > 1 and index < header.parts else 1
    try:
        rows, full = int(value["rows"]), header.layout.shard_rows
        if value["index"] != index or not fewest <= rows <= full or (rows < full and not value["last"]):
            raise ValueError(f"index {value['index']}, rows {rows}, last {value['last']}")
        return Commit(
            index=index,
            rows=rows,
            last=bool(value["last"]),
            cursor=value["cursor"],
            skip=int(value["skip"]),
            counters=dict(value["counters"]),
            sha256=dict(value["sha256"]),
            sums={name: _sums_from_json(value["sums"][name], d) for name, d in header.hook_points.items()},
        )
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{files.name(key)} contradicts itself ({error!r}). {remedy}") from None


def committed_prefix(files: StoreFiles, header: Header, kinds: tuple[ArrayKind, ...], part: int = 0) -> list[Commit]:
    """The commits of a part's shards, in order, up to the first that is missing or lacks one of its shard files.

    Raises:
        DataError: a commit file is damaged or belongs to another store.
    """
    present = set(files.list("commits"))
    stored = [(kind, set(files.list(kind.folder))) for kind in kinds]
    commits: list[Commit] = []
    index = part
    while f"{index:06d}.json" in present:
        whole = all(kind.shard_key(index) in keys for kind, keys in stored)
        if not whole and (header.parts == 1 or commits):
            break
        commit = read_commit(files, header, index)
        if commit is None or not (whole or commit.rows == 0):
            break
        commits.append(commit)
        if commit.last:
            break
        index += header.parts
    return commits


@dataclass(frozen=True)
class PartState:
    """The progress of a part by its commits: its rows, and whether it is done."""

    rows: int
    done: bool


def part_states(files: StoreFiles, header: Header) -> list[PartState]:
    """The progress of each part; reads the names of all commits and the last one of each part.

    Raises:
        DataError: a commit file that is read is damaged or belongs to another store.
    """
    present, states = set(files.list("commits")), []
    for part in range(header.parts):
        shards = header.shards_of(part)
        there = list(itertools.takewhile(lambda shard: f"{shard:06d}.json" in present, shards))
        last = read_commit(files, header, there[-1]) if there else None
        if last is None:
            states.append(PartState(0, len(shards) == 0))
        else:
            states.append(PartState((len(there) - 1) * header.layout.shard_rows + last.rows, last.last))
    return states


def shard_remedy(files: StoreFiles, shard: int) -> str:
    return (
        f"Delete {files.name(commit_key(shard))} and run the command that made the store again: "
        "it rewrites this shard and those after it."
    )


def _sums_to_json(sums: Sums) -> dict[str, Any]:
    numbers = dict(vars(sums))
    total = base64.b64encode(np.ascontiguousarray(numbers.pop("total"), "<f8").tobytes()).decode()
    return numbers | {"total_float64_base64": total}


def _sums_from_json(value: dict[str, Any], width: int) -> Sums:
    total = np.frombuffer(base64.b64decode(value["total_float64_base64"]), "<f8")
    if total.shape != (width,):
        raise ValueError(f"sum of width {total.shape}, the hook point has {width}")
    return Sums(int(value["count"]), total, float(value["squared_norms"]), float(value["norms"]))
