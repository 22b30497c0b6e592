"""MB/s of writing, reading in order and reading in shuffled batches, with checksums, on this machine.

    python -m benchmarks.store [--rows=200000 --d=768 --folder=/tmp]

The page cache is warm for the reads. A plain file write with fsync of the same bytes stands beside.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from absl import app, flags

from saejax.store import Batches, StoreReader, StoreWriter

_ROWS = flags.DEFINE_integer("rows", 200_000, "Activations.")
_D = flags.DEFINE_integer("d", 768, "Width.")
_BATCH = flags.DEFINE_integer("batch", 4096, "Rows in a shuffled batch.")
_FOLDER = flags.DEFINE_string("folder", None, "Where to write (default: the system's temporary folder).")


def main(_: list[str]) -> None:
    rows, d = _ROWS.value, _D.value
    x = np.random.default_rng(0).standard_normal((rows, d), np.float32).astype(ml_dtypes.bfloat16)
    tokens = {name: np.arange(rows, dtype=np.int32) for name in ("token_id", "document", "position")}
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.value))
    megabytes = x.nbytes / 1e6

    def report(name: str, started: float, size: float = megabytes) -> None:
        print(f"{name:<44} {size / (time.perf_counter() - started):8.0f} MB/s", flush=True)

    print(f"{rows:,} x {d} bf16, {megabytes:,.0f} MB")
    try:
        started = time.perf_counter()
        with (folder / "plain").open("wb") as file:
            file.write(x.view(np.uint16).tobytes())
            file.flush()
            os.fsync(file.fileno())
        report("plain file, fsync", started)
        started = time.perf_counter()
        path = folder / "store"
        with StoreWriter.open(path, identity={}, hook_points={"h": d}, n_tokens=rows) as writer:
            for start in range(0, rows, 8192):
                part = slice(start, start + 8192)
                writer.append({"h": x[part]}, {k: v[part] for k, v in tokens.items()}, cursor={"row": start})
            writer.finish()
        report("store: write, fsync, checksums", started)
        reader = StoreReader.open(path)
        started = time.perf_counter()
        reader.rows(0, rows)
        report("store: read in order", started)
        batches = Batches(reader, _BATCH.value, seed=0).iterate()
        next(batches)
        steps = max(1, rows // _BATCH.value)
        started = time.perf_counter()
        for _ in range(steps):
            next(batches)
        report("store: shuffled batches", started, steps * _BATCH.value * d * 2 / 1e6)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    app.run(main)
