"""Stores in a bucket: how many requests a capture and a training make, and how long a training waits for its data.

    PYTHONPATH=tests python -m benchmarks.object_store [--output=benchmarks/object_store.md] [--quick] [--latency=100]

Requests are counted by the proxy of tests/tiny/object_store.py in front of a local S3 server (extra `s3`), which is far
slower than a real one: its seconds mean nothing and are not shown. Waiting is measured against `benchmarks.bucket`,
which answers every request after a chosen time.
"""

import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from tiny.object_store import object_store, reached

from benchmarks.waits import ROWS, TimedBatches, TimedCheckpoints, trained, write_store
from saejax.store import Batches, StoreLayout, StoreReader, StoreWriter

_OUTPUT = flags.DEFINE_string("output", "", "Write the tables to this file; else print them.")
_QUICK = flags.DEFINE_boolean("quick", False, "Fewer rows, steps and latencies.")
_LATENCY = flags.DEFINE_multi_integer("latency", [], "Print the waiting at these latencies alone, in ms.")

_LATENCIES, _AHEAD = (0, 20, 100), (1, 4)
_D_IN, _BATCH = 384, 2048
# (latents, k): a usual one for this machine, and one so small that it eats rows as an accelerator would.
_SIZES = ((1024, 32), (64, 8))
_MILLION = 1_000_000


def requests(rows: int, width: int = 128) -> list[str]:
    """Lines of a table: what `rows` activations of one hook point cost to capture, and to train on once."""
    layout = StoreLayout()
    lines = []
    with object_store() as server, reached(server):
        url = "s3://bucket/stores/counted"
        with StoreWriter.open(url, identity={}, hook_points={"h": width}, n_tokens=rows, layout=layout) as writer:
            rng = np.random.default_rng(0)
            for start in range(0, rows, 8192):
                ids = np.arange(start, start + 8192)
                tokens = dict.fromkeys(("token_id", "document", "position"), ids)
                writer.append({"h": rng.standard_normal((8192, width))}, tokens, cursor={"row": start})
            writer.finish()
        lines += _rows_of("capture", server.counts(), rows)
        server.clear()
        batches = Batches(StoreReader.open(url), _BATCH, seed=0)
        for _, _ in zip(range(rows // _BATCH), batches.iterate(), strict=False):
            pass
        lines += _rows_of("an epoch of training", server.counts(), rows)
    return lines


def _rows_of(stage: str, counts: dict[str, tuple[int, int, int]], rows: int) -> list[str]:
    million = _MILLION / rows
    return [
        f"| {stage} | {kind} | {n:,} | {n * million:,.0f} | {(sent + received) * million / 1e6:,.2f} MB |"
        for kind, (n, sent, received) in counts.items()
    ]


@contextlib.contextmanager
def bucket(folder: Path, latency: int) -> Iterator[None]:
    """The folder as s3://bucket/, for this process, with so many milliseconds a request."""
    command = [sys.executable, "-m", "benchmarks.bucket", str(folder), str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            os.environ.update(
                AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
                AWS_REGION="us-east-1",
                AWS_ACCESS_KEY_ID="any",
                AWS_SECRET_ACCESS_KEY="any",
            )
            yield
        finally:
            server.kill()


def read_rate(path: str, ahead: int) -> float:
    """Rows a second of two epochs' batches, with nothing done to them; without the first block."""
    batches = Batches(StoreReader.open(path), _BATCH, seed=0, ahead=ahead)
    steps = iter(batches.iterate())
    next(steps)
    started, count = time.perf_counter(), 2 * ROWS // _BATCH - 1
    for _, _ in zip(range(count), steps, strict=False):
        pass
    return count * _BATCH / (time.perf_counter() - started)


def waits(path: str, ahead: int, d_sae: int, k: int, steps: int) -> tuple[float, float]:
    """(rows a second, share of the time waited for data) of a training of a TopK coder."""
    with tempfile.TemporaryDirectory() as folder:
        batches = TimedBatches(StoreReader.open(path), _BATCH, seed=0, ahead=ahead)
        found = trained(batches, TimedCheckpoints(Path(folder)), d_sae, k, steps, steps)
    return (steps - 1) * _BATCH / found["seconds"], found["data"]


def reading(latencies: Sequence[int | None], quick: bool) -> list[str]:
    """Lines of a table: reading alone and a training's share of waiting, by latency (None: a disk) and blocks ahead."""
    lines, steps = [], 20 if quick else 48
    with tempfile.TemporaryDirectory() as folder:
        write_store(Path(folder) / "store", _D_IN)
        for latency in latencies:
            with bucket(Path(folder), latency) if latency is not None else contextlib.nullcontext():
                path = "s3://bucket/store" if latency is not None else f"{folder}/store"
                for ahead in _AHEAD:
                    alone = read_rate(path, ahead)
                    trainings = [waits(path, ahead, *size, steps) for size in _SIZES]
                    where = "disk" if latency is None else f"{latency} ms"
                    found = " | ".join(f"{rate:,.0f} | {share:.1%}" for rate, share in trainings)
                    lines.append(f"| {where} | {ahead} | {alone:,.0f} | {found} |")
                    print(lines[-1], flush=True)
    return lines


def main(_: list[str]) -> None:
    if _LATENCY.value:
        reading(_LATENCY.value, _QUICK.value)  # it prints each line
        return
    rows = 65_536 if _QUICK.value else 131_072
    text = "\n".join(
        [
            "# Stores in a bucket",
            "",
            f"`PYTHONPATH=tests python -m benchmarks.object_store`, {time.strftime('%Y-%m-%d')}; {os.cpu_count()} CPU "
            f"cores, {platform.system()}, Python {platform.python_version()}.",
            "",
            f"## Requests and bytes: {rows:,} activations of one hook point of width 128, shards of 32,768, "
            "chunks of 256",
            "",
            "| stage | request | seen | per 1M activations | bytes per 1M, both ways |",
            "|---|---|---|---|---|",
            *requests(rows),
            "",
            f"## Waiting: width {_D_IN}, batches of {_BATCH:,}, blocks of 16,384 rows ({16384 * _D_IN * 2 / 1e6:.1f} "
            "MB), TopK",
            "",
            "| latency of a request | train.blocks_ahead | read alone, rows/s "
            + "".join(f"| {d_sae:,} latents, rows/s | waited " for d_sae, _ in _SIZES)
            + "|",
            "|---" * (3 + 2 * len(_SIZES)) + "|",
            *reading((None, *_LATENCIES), _QUICK.value),
            "",
        ]
    )
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    app.run(main)
