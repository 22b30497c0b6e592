"""The live page under load: how long its answers take, and what a training beside it loses.

    python -m benchmarks.serve_load [--output=benchmarks/serve_load.md] [--features=100000] [--windows=24]

One training runs beside the server. By turns of --seconds nobody asks the server, and `--clients` readers of features
and `--sockets` pages that follow the training do: the pace of a turn is compared with that of the turn before it, so
that slow and fast minutes of the machine fall out. A reader asks for a random feature, waits for --pause seconds on
average as someone who reads does, and asks again. The readers are one process on the same cores, so the training pays
for them too. Their answers are timed from the first byte sent to the last byte received.
"""

import asyncio
import contextlib
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from saejax.core.metrics import last_rows
from saejax.reports.feature_table import write_features
from saejax.runs import Run
from saejax.serve.descriptions import whole_rows
from saejax.store import StoreLayout, StoreWriter

_OUTPUT = flags.DEFINE_string("output", "", "Write the table to this file; else print it.")
_FEATURES = flags.DEFINE_integer("features", 100_000, "Features of the run that is read.")
_WINDOWS = flags.DEFINE_integer("windows", 24, "Turns, half of them with readers.")
_SECONDS = flags.DEFINE_float("seconds", 12.0, "Of a turn.")
_CLIENTS = flags.DEFINE_integer("clients", 50, "Readers.")
_SOCKETS = flags.DEFINE_integer("sockets", 5, "Pages that follow the training.")
_PAUSE = flags.DEFINE_float("pause", 4.0, "Seconds that a reader waits on average.")

_D_IN, _BATCH, _PORT = 128, 2048, 8790
_STEPS = 1_000_000  # more than are taken: the training is told to end
_SETTLED = 5.0  # seconds: compilation and start are over


def made_up_features(path: Path, count: int, seed: int = 0) -> None:
    """A features.sqlite as reports write it, of `count` features with ten passages each and ten more by quantile."""
    rng = random.Random(seed)
    vocab = [f" word{i}" for i in range(2000)]

    def passage(most: float) -> dict[str, Any]:
        activations = [round(rng.random() * most, 3) if rng.random() < 0.2 else 0.0 for _ in range(24)]
        tokens = [rng.randrange(len(vocab)) for _ in range(24)]
        return {"document": f"doc{rng.randrange(999)}", "position": 7, "tokens": tokens, "activations": activations,
                "peak": 16}  # fmt: skip

    def feature(i: int) -> dict[str, Any]:
        most = round(rng.random() * 10 + 0.1, 3)
        logits = [[f" word{rng.randrange(2000)}", round(rng.random(), 3)] for _ in range(20)]
        histogram = {
            "edges": [round(most * j / 20, 4) for j in range(21)],
            "counts": [rng.randrange(99) for _ in range(20)],
        }
        parts = [{"low": j * most / 5, "high": (j + 1) * most / 5, "fraction": 0.001, "examples": [passage(most)] * 2}
                 for j in range(5)]  # fmt: skip
        return {"density": 10 ** rng.uniform(-5, -1), "max": most, "mean": most / 2, "histogram": histogram, "id": i,
                "top_logits": logits[:10], "bottom_logits": logits[10:],
                "examples": [passage(most) for _ in range(10)], "quantiles": parts}  # fmt: skip

    head = {"hook_point": "h", "model": "", "d_sae": count, "n_tokens": 1_000_000}
    write_features(path, {**head, "features": map(feature, range(count)), "vocab": vocab}, {})


def write_store(path: Path, rows: int) -> None:
    """Gaussian activations [rows, D_IN]: what a training reads does not matter here."""
    rng = np.random.default_rng(0)
    layout = StoreLayout()
    with StoreWriter.open(str(path), identity={"imported": {}}, hook_points={"h": _D_IN}, n_tokens=rows,
                          layout=layout) as writer:  # fmt: skip
        for start in range(0, rows, 8192):
            ids = np.arange(start, min(start + 8192, rows))
            tokens = dict.fromkeys(("token_id", "document", "position"), ids)
            writer.append({"h": rng.standard_normal((len(ids), _D_IN))}, tokens, cursor={"row": start})
        writer.finish()


def start_training(folder: Path, name: str) -> "subprocess.Popen[bytes]":
    """`saejax train` of a TopK coder, 128 -> 1,024."""
    flags_ = {
        "name": name, "store": "made", "lm.model": "", "coder.d_sae": 1024, "coder.k": 24, "hook_point": "h",
        "train.batch_size": _BATCH, "train.tokens": _BATCH * _STEPS, "train.validate_every": 0,
        "train.checkpoint_every": 10**7,
    }  # fmt: skip
    words = [f"--config.{key}={value}" for key, value in flags_.items()]
    command = [sys.executable, "-m", "saejax", "train", "--config=quickstart", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[int]:
    """`saejax serve` of a folder; gives its process id."""
    command = [sys.executable, "-m", "saejax", "serve", f"--port={_PORT}"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        if not re.search("http://", process.stdout.readline()):
            raise RuntimeError("the server did not start")
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


async def reader(number: int, count: int, took: list[float], end: asyncio.Event) -> None:
    """One person who looks at features: a connection that is opened again where the server has closed it."""
    rng = random.Random(number)
    await asyncio.sleep(rng.random() * _PAUSE.value)
    link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    while not end.is_set():
        started = time.perf_counter()
        if link is None:
            link = await asyncio.open_connection("127.0.0.1", _PORT)
        path = f"/api/feature/read?id={rng.randrange(count)}"
        link[1].write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        try:
            head = await link[0].readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            if not head.startswith(b"HTTP/1.1 200") or length is None:
                raise RuntimeError(head[:200].decode())
            await link[0].readexactly(int(length[1]))
        except asyncio.IncompleteReadError:
            link[1].close()
            link = None
            continue
        took.append(time.perf_counter() - started)
        await asyncio.sleep(rng.random() * 2 * _PAUSE.value)
    if link is not None:
        link[1].close()


async def follower(name: str, at: int, seen: list[int], end: asyncio.Event) -> None:
    """One page that shows the training's curves, and has those rows that lie before byte `at`."""
    from websockets.asyncio.client import connect

    async with connect(f"ws://127.0.0.1:{_PORT}/ws/runs/{name}?at={at}") as socket:
        while not end.is_set():
            with contextlib.suppress(TimeoutError):
                message = json.loads(await asyncio.wait_for(socket.recv(), 1))
                seen.append(len(message.get("rows", [])))


async def turns(training: "subprocess.Popen[bytes]", name: str, run: Path, pid: int) -> dict[str, Any]:
    """{with readers or not: tokens a second of each turn}, seconds of each answer, rows that pages saw, CPU shares."""
    found: dict[str, Any] = {"quiet": [], "asked": [], "took": [], "seen": [], "cpu quiet": [], "cpu asked": []}
    while not (run / "metrics.jsonl").is_file() and training.poll() is None:
        await asyncio.sleep(0.1)
    await asyncio.sleep(_SETTLED)
    for turn in range(_WINDOWS.value):
        asked, end = turn % 2 == 1, asyncio.Event()
        tasks = []
        if asked:
            tasks = [asyncio.create_task(reader(i, _FEATURES.value, found["took"], end)) for i in range(_CLIENTS.value)]
            at = whole_rows(run / "metrics.jsonl")
            tasks += [asyncio.create_task(follower(name, at, found["seen"], end)) for _ in range(_SOCKETS.value)]
        first, cpu, begun = last_rows(run / "metrics.jsonl"), cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(_SECONDS.value)
        last, took = last_rows(run / "metrics.jsonl"), time.monotonic() - begun
        case = "asked" if asked else "quiet"
        found[f"cpu {case}"].append((cpu_seconds(pid) - cpu) / took)
        found[case].append((last["tokens"] - first["tokens"]) / (last["time"] - first["time"]))
        end.set()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if training.poll() is not None:
            raise RuntimeError("the training has ended")
    return found


def measured(folder: Path) -> dict[str, Any]:
    """As `turns`, of one training beside one server."""
    with server(folder) as pid:
        training = start_training(folder, "training")
        try:
            return asyncio.run(turns(training, "training", folder / "runs" / "training", pid))
        finally:
            training.terminate()
            training.wait()


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def page(found: dict[str, Any]) -> str:
    """The figures as a table, with how they came about."""
    ratios = sorted(asked / quiet for quiet, asked in zip(found["quiet"], found["asked"], strict=True))
    took = sorted(found["took"])
    at = {share: 1000 * took[min(len(took) - 1, int(share * len(took)))] for share in (0.5, 0.9, 0.99)}
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    options = f"--features={_FEATURES.value} --windows={_WINDOWS.value} --seconds={_SECONDS.value:g}"
    lines = [
        "# The live page under load",
        "",
        f"`python -m benchmarks.serve_load {options} --pause={_PAUSE.value:g}`, {time.strftime('%Y-%m-%d')}, "
        f"{os.cpu_count()} CPU cores ({platform.machine()}), no accelerator, Python {platform.python_version()}. The "
        "readers are a process on the same cores.",
        "",
        f"| a training (TopK 128 -> 1,024, batches of 2,048), {len(ratios)} turns of each kind | tokens/s, median |",
        "|---|---|",
        f"| beside a server that nobody asks | {statistics.median(found['quiet']):,.0f} |",
        f"| beside {_CLIENTS.value} readers and {_SOCKETS.value} pages that follow it | "
        f"{statistics.median(found['asked']):,.0f} |",
        f"| a turn over the turn before it: median (middle half) | {statistics.median(ratios):.3f} ({low:.3f} to "
        f"{high:.3f}) |",
        "",
        "| an answer, one feature of the run's | ms |",
        "|---|---|",
        *(f"| {label} | {at[share]:.1f} |" for share, label in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))),
        f"| longest | {1000 * took[-1]:.1f} |",
        "",
        f"{len(took):,} answers; the pages saw {sum(found['seen']):,} rows of metrics. The server took "
        f"{statistics.median(found['cpu asked']):.1%} of one core while it was asked, and "
        f"{statistics.median(found['cpu quiet']):.1%} while it was not.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run = folder / "runs" / "read"
        run.mkdir(parents=True)
        (run / "config.json").write_text("{}")
        made_up_features(run / Run.features, _FEATURES.value)
        write_store(folder / "stores" / "made" / "train", 200_000)
        text = page(measured(folder))
    if _OUTPUT.value:
        Path(_OUTPUT.value).write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    app.run(main)
