"""Lines for a terminal that describe a store: complete or not, whole or damaged."""

import os

from saejax.core.config import shortened
from saejax.store.commits import part_states
from saejax.store.files import StoreFiles
from saejax.store.manifest import Manifest, flatten
from saejax.store.norms import norm_lines
from saejax.store.reader import StoreReader, any_manifest, committed_rows
from saejax.store.space import bytes_on_disk, predicted_bytes

_LONGEST_LINE = 100


def describe(path: str | os.PathLike[str]) -> list[str]:
    """Lines about the store at `path`; reads its manifest, the names of its commits and its first rows.

    Rows and progress (of each part if there are several), bytes, layout, hook points with widths and statistics
    (of a complete store), counters, and every key of the identity: model, revision, text, split, hashes.

    Raises:
        DataError: no store there, or a damaged manifest.
    """
    files = StoreFiles(path)
    manifest = any_manifest(files)
    header = manifest.header
    lines = [f"{files.url}", f"  {_state(files, manifest)}"]
    lines += _parts(files, manifest)
    there = bytes_on_disk(files)
    lines.append(f"  bytes: {predicted_bytes(header):,} when complete" if there is None else f"  bytes: {there:,}")
    layout = header.layout
    lines.append(f"  layout: shards of {layout.shard_rows:,} rows, chunks of {layout.chunk_rows:,}, seed {header.seed}")
    lines.append(f"  numbers: {layout.dtype}{', one scale a row' * (layout.dtype == 'int8')}")
    for name, width in header.hook_points.items():
        lines.append(f"  hook point {name}: width {width}{_moments(manifest, name)}")
    if manifest.complete:
        lines += norm_lines(StoreReader.open(path))
    lines += [f"  {key}: {shortened(value, _LONGEST_LINE)}" for key, value in flatten(header.identity).items()]
    lines += [f"  counted {name}: {count:,}" for name, count in (manifest.counters or {}).items()]
    return lines


def _state(files: StoreFiles, manifest: Manifest) -> str:
    wanted = manifest.header.requested_tokens
    if manifest.complete:
        of = "" if manifest.n_tokens == wanted else f" (of {wanted:,} asked for: there were no more)"
        shards = sum(rows > 0 for rows, _ in manifest.shards)
        return f"complete: {manifest.n_tokens:,} rows in {shards:,} shards{of}"
    rows = committed_rows(files, manifest.header)
    return f"unfinished: {rows:,} of {wanted:,} rows ({rows / wanted:.1%}); the command that began it continues it"


def _parts(files: StoreFiles, manifest: Manifest) -> list[str]:
    """A line for each part of an unfinished store of several."""
    header = manifest.header
    if manifest.complete or header.parts == 1:
        return []
    return [
        f"  part {part} of {header.parts}: {state.rows:,} of {header.rows_of(part):,} rows{', done' * state.done}"
        for part, state in enumerate(part_states(files, header))
    ]


def _moments(manifest: Manifest, name: str) -> str:
    if manifest.statistics is None:
        return ""
    s = manifest.statistics[name]
    norm_of_mean = float((s.mean * s.mean).sum()) ** 0.5
    return (
        f", mean norm {s.mean_norm:.6g}, root mean square norm {s.mean_squared_norm**0.5:.6g}, "
        f"norm of the mean {norm_of_mean:.6g}, total variance {s.total_variance:.6g}, "
        f"mean over spread {s.mean_over_spread:.3g}"
    )
