"""The section of train steps: everybody in turn on one row, and the floor in the same rounds.

No JAX here: every contestant is a process of its own, and only one of them works at a time.
"""

import atexit
import contextlib
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench import activations, training_page, training_result
from benchmarks.bench.frame import LeftOut, Result, Told
from benchmarks.bench.protocol import Worker, WorkerFailed, WorkerGone, free_bytes
from benchmarks.bench.rows import CPU_ROWS, GPU_ROWS, Row

NAME = "training"
TITLE = "Train steps"

page, figures = training_page.page, training_page.figures

# The same for everybody, and constant.
LR = 3e-3
# Numbers of an array for the bandwidth: 268 MB, which no cache holds.
_STREAM = 2**26


def rows(told: Told) -> list[Row]:
    return list(CPU_ROWS if told.backend == "cpu" else GPU_ROWS)


def run(row: Row, told: Told) -> Result:
    """Prepares everybody, then rounds: a turn for each contestant and each framework's product; FVE at the end."""
    beside = next((one for one in rows(told) if one.name == row.beside), None)
    check_memory(row, told, contestants=1 + (beside is not None) + (len(row.peers) if told.peers else 0))
    data, heldout = tokens(row, told.folder)
    turns = 1 + told.rounds * row.steps
    with contextlib.ExitStack() as stack:
        stack.callback(_end_row)
        there = _Contestants(row, data, turns)
        there.add("saejax", stack.enter_context(ours(told)), row)
        if beside:
            there.add(f"saejax {beside.name}", stack.enter_context(ours(told)), beside)
        for peer in row.peers if told.peers else ():
            there.add(peer, peer_worker(peer, told), row, peer=peer)
        floors = {name: stack.enter_context(worker) for name, worker in floor_workers(told)}
        floor = _Floor(row, floors)
        there.turn(1, kept=False)  # the first step warms caches up; its tokens count
        for number in range(told.rounds):
            there.turn(row.steps, first=number)
            floor.turn()
        cores = len(os.sched_getaffinity(0))
        result = {"about": row.to_json(), "cores": cores, "lr": LR, "tokens": turns * row.batch, "rounds": told.rounds}
        result |= {"contestants": there.measured(heldout), "floor": floor.measured(), "ceiling": activations.ceiling()}
        if row.parts:
            result["parts"] = there.workers["saejax"].ask("parts", calls=3 if told.quick else 7)["seconds"]
    for line in training_result.lines_of(result):
        print(f"  {line}", flush=True)
    return result


def check_memory(row: Row, told: Told, contestants: int) -> None:
    """Raises LeftOut where they would not fit together: they take turns, but all hold their state."""
    free, needed = free_bytes(), contestants * row.bytes_needed
    if told.backend == "cpu" and free is not None and needed > free:
        raise LeftOut(f"{contestants} contestants need about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")


def tokens(row: Row, folder: Path) -> tuple[Path, Path]:
    """The activations that all train on, at most 256 MB, and held-out ones."""
    n = max(2 * row.batch, 2**26 // (row.sites * row.d_in) // 2048 * 2048)
    held = max(4096, row.batch)
    made = [
        activations.make(folder / f"{kind}-{row.d_in}x{row.sites}-{count}.npy", count, row.d_in, row.sites, seed)
        for kind, count, seed in (("train", n, 0), ("heldout", held, 1))
    ]
    return made[0], made[1]


class _Contestants:
    """Those who train on a row, and what they said."""

    def __init__(self, row: Row, data: Path, steps: int):
        self.row, self.data, self.steps = row, data, steps
        self.workers: dict[str, Worker] = {}
        self.said: dict[str, dict[str, Any]] = {}

    def add(self, name: str, worker: Worker, row: Row, **told: Any) -> None:
        if not told:
            told = {"steps": self.steps}
        self.workers[name] = worker
        self.said[name] = {"seconds": [], "real": 0.0, "user": 0.0, "system": 0.0}
        with self._noted(name):
            self.said[name] |= worker.ask("prepare", row=row.to_json(), data=str(self.data), lr=LR, **told)

    def turn(self, steps: int, first: int = 0, kept: bool = True) -> None:
        """Each takes so many steps; who begins moves on from round to round."""
        names = [name for name in self.workers if "failed" not in self.said[name]]
        for name in names[first % len(names) :] + names[: first % len(names)]:
            with self._noted(name):
                answer = self.workers[name].ask("run", steps=steps)
                said = self.said[name]
                said |= {"peak": answer["peak"], "dead": answer["dead"]}
                if kept:
                    said["seconds"].append(answer["seconds"])
                    for key in ("real", "user", "system"):
                        said[key] += answer[key]

    def measured(self, heldout: Path) -> dict[str, dict[str, Any]]:
        """{contestant: what it said, its median and FVE}."""
        for name in (name for name, said in self.said.items() if "failed" not in said):
            with self._noted(name):
                found = self.workers[name].ask("fve", heldout=str(heldout))
                seconds = [second for turn in self.said[name]["seconds"] for second in turn]
                self.said[name] |= found | {"median": statistics.median(seconds)}
        return self.said

    @contextlib.contextmanager
    def _noted(self, name: str) -> Iterator[None]:
        """A peer that fails is noted, and the others go on; without ours there is nothing to compare."""
        try:
            yield
        except (WorkerFailed, WorkerGone) as why:
            if name == "saejax":
                raise
            self.said[name]["failed"] = str(why)
            print(f"  {why}", flush=True)
            if isinstance(why, WorkerGone):
                _peers.pop(name, None)


class _Floor:
    """The encoder's product in every framework, in the rounds; memory's bandwidth at the end."""

    def __init__(self, row: Row, workers: dict[str, Worker]):
        self.row, self.workers = row, workers
        self.seconds: dict[str, list[float]] = {name: [] for name in workers}
        for worker in workers.values():
            worker.ask("prepare", batch=row.batch, d_in=row.d_in, width=row.d_sae)

    def turn(self) -> None:
        for name, worker in self.workers.items():
            self.seconds[name] += worker.ask("product", calls=3)["seconds"]

    def measured(self) -> dict[str, Any]:
        bandwidth = max(
            worker.ask("bandwidth", numbers=_STREAM, calls=5)["bytes_per_second"] for worker in self.workers.values()
        )
        one = min(statistics.median(seconds) for seconds in self.seconds.values())
        return {
            "product_seconds": self.seconds,
            "bytes_per_second": bandwidth,
            "products": one * self.row.products * self.row.encoders,
            "adam": self.row.adam_bytes / bandwidth,
            "flops": self.row.flops,
            "bytes": self.row.adam_bytes,
        }


def environment(told: Told) -> dict[str, str]:
    """On an accelerator nobody takes all memory at once; where JAX has none, torch has none either."""
    return {"CUDA_VISIBLE_DEVICES": ""} if told.backend == "cpu" else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def ours(told: Told) -> Worker:
    return Worker("saejax", [sys.executable, "-m", "benchmarks.bench.ours"], environment=environment(told))


def new_peer(peer: str, told: Told) -> Worker:
    return Worker(peer, [str(told.peers), "benchmarks/peers/step_worker.py"], environment=environment(told))


_FLOOR = ("-m", "benchmarks.bench.floor")
_peers: dict[str, Worker] = {}


def peer_worker(peer: str, told: Told) -> Worker:
    """The peer's process, which stays for the next row: importing it takes half a minute."""
    if peer not in _peers:
        _peers[peer] = new_peer(peer, told)
        atexit.register(_peers[peer].close)
    return _peers[peer]


def _end_row() -> None:
    """The peers give the row's memory back."""
    for name, worker in list(_peers.items()):
        try:
            worker.ask("end_row")
        except (WorkerFailed, WorkerGone):
            _peers.pop(name).close()


def floor_workers(told: Told) -> list[tuple[str, Worker]]:
    """JAX's always, torch's where the peers are."""
    pythons = {"jax": sys.executable} | ({"torch": str(told.peers)} if told.peers else {})
    return [
        (name, Worker(f"floor ({name})", [python, *_FLOOR, f"--framework={name}"], environment=environment(told)))
        for name, python in pythons.items()
    ]
