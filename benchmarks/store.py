"""MB/s of writing, reading in order and reading in shuffled batches, with checksums, on this machine.

    python -m benchmarks.store [--rows=131072 --d=768 --folder=/tmp]

The page cache is warm for the reads. Beside the store stands a plain memory-mapped file without checksums: written and
flushed as often as shards are committed, and read in the same shuffled order by the same chunks and blocks. Rates of
int8 count the bfloat16 bytes that come out, so that they compare with the others: twice what is on disk.
"""

import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from absl import app, flags

from saejax.core.host import keep_memory
from saejax.store import Batches, EpochOrder, StoreLayout, StoreReader, StoreWriter

_ROWS = flags.DEFINE_integer("rows", 131_072, "Activations.")
_D = flags.DEFINE_integer("d", 768, "Width.")
_BATCH = flags.DEFINE_integer("batch", 4096, "Rows in a shuffled batch.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "How often everything is measured.")
_FOLDER = flags.DEFINE_string("folder", None, "Where to write (default: the system's temporary folder).")

_BLOCK_CHUNKS = 64
_METADATA = ("token_id", "document", "position")


def rates(rows: int, d: int, batch: int, rounds: int, folder: str | None = None) -> dict[str, list[float]]:
    """{what: MB of bfloat16 a second in each round}: side by side, what else the machine does falls on all alike."""
    x = np.random.default_rng(0).standard_normal((rows, d), np.float32).astype(ml_dtypes.bfloat16)
    found: dict[str, list[float]] = {}
    place = Path(tempfile.mkdtemp(dir=folder))

    @contextlib.contextmanager
    def timed(name: str, size: int = x.nbytes) -> Iterator[None]:
        started = time.perf_counter()
        yield
        found.setdefault(name, []).append(size / 1e6 / (time.perf_counter() - started))

    try:
        for number in range(rounds):
            with timed("memmap: write, flush"):
                plain = _memmap(place / "plain", x)
            for dtype in ("bfloat16", "int8"):
                with timed(f"{dtype}: write, fsync, checksums"):
                    _write(place / dtype, x, dtype)
            for name in ("bfloat16", "int8"):
                reader = StoreReader.open(place / name)
                with timed(f"{name}: read in order"):
                    reader.rows(0, rows)
                batches = Batches(reader, batch, seed=number, block_chunks=_BLOCK_CHUNKS).iterate()
                with timed(f"{name}: shuffled batches", rows // batch * batch * d * 2):
                    for _ in range(rows // batch):
                        next(batches)
                batches.close()
            with timed("memmap: shuffled blocks"):
                _shuffle(plain, number)
            shutil.rmtree(place)
            place.mkdir()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return found


def main(_: list[str]) -> None:
    keep_memory()
    rows, d = _ROWS.value, _D.value
    found = rates(rows, d, _BATCH.value, _ROUNDS.value, _FOLDER.value)
    print(f"{rows:,} x {d} bf16, {rows * d * 2 / 1e6:,.0f} MB, batches of {_BATCH.value:,}")
    print(f"MB/s: median of {_ROUNDS.value} (range)")
    for name, each in found.items():
        print(f"{name:<36}{statistics.median(each):8.0f}   ({min(each):.0f} to {max(each):.0f})")
    for store, plain in (
        ("bfloat16: write, fsync, checksums", "memmap: write, flush"),
        ("bfloat16: shuffled batches", "memmap: shuffled blocks"),
    ):
        ratio = statistics.median(a / b for a, b in zip(found[store], found[plain], strict=True))
        print(f"{store} / {plain}, median of the rounds: {ratio:.0%}")


def _memmap(path: Path, x: np.ndarray) -> np.ndarray:
    """The same bytes in a plain memory-mapped file, made durable as often as the store's shards are."""
    plain = np.memmap(path, np.uint16, "w+", shape=x.shape)
    for start in range(0, len(x), StoreLayout().shard_rows):
        part = slice(start, start + StoreLayout().shard_rows)
        plain[part] = x[part].view(np.uint16)
        plain.flush()
    return np.memmap(path, np.uint16, "r", shape=x.shape)


def _shuffle(plain: np.ndarray, seed: int) -> None:
    """One epoch of the map in the order of the store's: chunks at random, rows shuffled within each block of them."""
    order = EpochOrder(len(plain), StoreLayout().chunk_rows, _BLOCK_CHUNKS, seed)
    for number in range(order.blocks):
        to, size = np.argsort(order.rows((0, number))), order.chunk_rows
        block = np.empty((len(to), plain.shape[1]), plain.dtype)
        for i, chunk in enumerate(order.chunks((0, number))):
            piece = plain[chunk * size : (chunk + 1) * size]
            block[to[i * size : i * size + len(piece)]] = piece


def _write(path: Path, x: np.ndarray, dtype: str) -> None:
    layout = StoreLayout(dtype=dtype)
    tokens = {name: np.arange(len(x), dtype=np.int32) for name in _METADATA}
    with StoreWriter.open(path, identity={}, hook_points={"h": x.shape[1]}, n_tokens=len(x), layout=layout) as writer:
        for start in range(0, len(x), 8192):
            part = slice(start, start + 8192)
            writer.append({"h": x[part]}, {k: v[part] for k, v in tokens.items()}, cursor={"row": start})
        writer.finish()


if __name__ == "__main__":
    app.run(main)
