"""MB/s of writing, reading in order and reading in shuffled batches, with checksums, on this machine.

    python -m benchmarks.store [--rows=200000 --d=768 --folder=/tmp]

The page cache is warm for the reads. Beside the store's write stands that of a plain memory-mapped file, flushed as
often as shards are committed.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from absl import app, flags

from saejax.store import Batches, StoreLayout, StoreReader, StoreWriter

_ROWS = flags.DEFINE_integer("rows", 200_000, "Activations.")
_D = flags.DEFINE_integer("d", 768, "Width.")
_BATCH = flags.DEFINE_integer("batch", 4096, "Rows in a shuffled batch.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often everything is measured.")
_FOLDER = flags.DEFINE_string("folder", None, "Where to write (default: the system's temporary folder).")


def main(_: list[str]) -> None:
    rows, d = _ROWS.value, _D.value
    x = np.random.default_rng(0).standard_normal((rows, d), np.float32).astype(ml_dtypes.bfloat16)
    tokens = {name: np.arange(rows, dtype=np.int32) for name in ("token_id", "document", "position")}
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.value))
    measures: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[..., int], *arguments: Any) -> None:
        started = time.perf_counter()
        size = work(*arguments)
        measures.setdefault(name, []).append(size / 1e6 / (time.perf_counter() - started))

    try:
        # Side by side, several times: what else the machine does falls on all alike.
        for number in range(_ROUNDS.value):
            path = folder / f"store{number}"
            measure("memmap, flushed every shard", _memmap, folder / "plain", x)
            measure("store: write, fsync, checksums", _write, path, x, tokens)
            reader = StoreReader.open(path)
            measure("store: read in order", lambda reader: reader.rows(0, rows)["h"].nbytes, reader)
            batches = Batches(reader, _BATCH.value, seed=number).iterate()
            next(batches)
            measure("store: shuffled batches", _read, batches, rows // _BATCH.value)
            shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)
    print(f"{rows:,} x {d} bf16, {x.nbytes / 1e6:,.0f} MB, batches of {_BATCH.value:,}")
    print(f"MB/s: median of {_ROUNDS.value} (range)")
    for name, rates in measures.items():
        print(f"{name:<34}{statistics.median(rates):8.0f}   ({min(rates):.0f} to {max(rates):.0f})")
    ratio = statistics.median(w / m for m, w in zip(*list(measures.values())[:2], strict=True))
    print(f"store write / memmap, median of the rounds: {ratio:.0%}")


def _memmap(path: Path, x: np.ndarray) -> int:
    """The same bytes in a plain memory-mapped file, made durable as often as the store's shards are."""
    plain = np.memmap(path, np.uint16, "w+", shape=x.shape)
    for start in range(0, len(x), StoreLayout().shard_rows):
        part = slice(start, start + StoreLayout().shard_rows)
        plain[part] = x[part].view(np.uint16)
        plain.flush()
    path.unlink()
    return x.nbytes


def _read(batches: Iterator[dict[str, np.ndarray]], count: int) -> int:
    return sum(next(batches)["h"].nbytes for _ in range(count))


def _write(path: Path, x: np.ndarray, tokens: dict[str, np.ndarray]) -> int:
    with StoreWriter.open(path, identity={}, hook_points={"h": x.shape[1]}, n_tokens=len(x)) as writer:
        for start in range(0, len(x), 8192):
            part = slice(start, start + 8192)
            writer.append({"h": x[part]}, {k: v[part] for k, v in tokens.items()}, cursor={"row": start})
        writer.finish()
    return x.nbytes


if __name__ == "__main__":
    app.run(main)
