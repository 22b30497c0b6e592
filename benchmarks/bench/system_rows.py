"""Rows of the section `system`, and the commands and workers that its parts share. The standard library alone."""

import dataclasses
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import activations
from benchmarks.bench.frame import Told
from benchmarks.bench.protocol import PYTHON_PATH, ROOT, Worker


@dataclasses.dataclass(frozen=True)
class Row:
    """Something to measure; `preset` says of which coder, where there are several."""

    name: str
    preset: str = ""
    quick: bool = True


def ours(told: Told) -> Worker:
    """saejax's process; what it compiles in one row it need not compile in the next round."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(told.folder / "compiled")}
    return Worker("saejax", [sys.executable, "-m", "benchmarks.bench.system_ours"], environment=kept)


def torch(told: Told) -> Worker | None:
    """torch's process, in the peers' environment or in this one; None where neither has it."""
    python = told.peers or (sys.executable if importlib.util.find_spec("torch") else None)
    return Worker("torch", [str(python), "-m", "benchmarks.bench.system_torch"]) if python else None


def timed(
    command: Sequence[str],
    environment: Mapping[str, str],
    codes: Sequence[int] = (0,),
    meanwhile: Callable[[int], Any] = lambda pid: None,
) -> dict[str, float]:
    """Seconds of a command by the clock, and of all its threads in user and in system; it ends with one of `codes`.

    `meanwhile(process id)` is called again and again, every 20 ms or so.

    Raises:
        RuntimeError: it ends otherwise; with its last line.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHON_PATH, **environment}, stdout=said, stderr=said
        )
        try:
            # wait4 alone says what a process used, and only once.
            while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
                meanwhile(process.pid)
                time.sleep(0.02)
            process.returncode = os.waitstatus_to_exitcode(ended[1])
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()
        real = time.perf_counter() - started
        if process.returncode not in codes:
            said.seek(0)
            last = ([line.strip() for line in said if line.strip()] or ["it said nothing"])[-1]
            raise RuntimeError(f"{' '.join(command[1:4])} ended with {process.returncode}: {last[:300]}")
    return {"real": real, "user": ended[2].ru_utime, "system": ended[2].ru_stime}


def of_caches(folder: Path, compiled: str) -> dict[str, str]:
    """The environment of a command that keeps its compiled programs in a folder of the benchmark's; "0" for none."""
    return {"JAX_COMPILATION_CACHE_DIR": "", "SAEJAX_COMPILED": compiled, "XDG_CACHE_HOME": str(folder / "cache")}


def imported_store(folder: Path, name: str, d_in: int, n: int, environment: Mapping[str, str]) -> None:
    """The store `name` in `folder`/stores: n activations of x, 4,096 held out; one that is there stays."""
    for split, count, seed in (("train", n, 0), ("heldout", 4096, 1)):
        store = folder / "stores" / name / split
        if not store.exists():
            x = activations.make(folder / f"{name}-{split}.npy", count, d_in, seed=seed)
            flat = folder / f"{name}-{split}-rows.npy"
            activations.flatten(x, flat)
            command = ["-m", "saejax", "store", "import", str(store), str(flat), "--hook_point=x"]
            timed([sys.executable, *command], environment)


def median(found: Sequence[float]) -> float:
    return statistics.median(found)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over the rounds of above / below: what else a machine does falls on both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def spread(found: Sequence[float], form: str) -> str:
    """median (least to most)"""
    return f"{median(found):{form}} ({min(found):{form}} to {max(found):{form}})"
