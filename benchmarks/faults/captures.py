"""Faults of a capture, each met by `python -m launch.capture` in a process of its own, on the demo model."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors.numpy

from benchmarks.faults.hub import closed_port, server, silence
from benchmarks.faults.outcome import Outcome
from benchmarks.faults.stores import ROOT, contents
from saejax.store import StoreReader, verify

DEMO = ROOT / "saejax" / "lm" / "demo"
POISONED = 300  # a token whose embedding is NaN
SMALL = (
    "--config.capture.tokens=16000",
    "--config.capture.heldout_tokens=1500",
    "--config.capture.shard_rows=256",
    "--config.capture.batch_rows=8",
    "--config.name=faults",
    "--config.store=s",
)
LONG = "--config.capture.tokens=400000"


class Lab:
    """A folder to make captures in, whose programs are compiled once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[str, bytes] = {}
        self.seconds = 0.0

    def start(self, name: str, *overrides: str, **environment: str) -> subprocess.Popen[str]:
        """A capture into the store `name` of this folder."""
        folders = [f"--config.runs_dir={self.folder / 'runs'}", f"--config.stores_dir={self.folder / name}"]
        command = [sys.executable, "-m", "launch.capture", "--config=configs/quickstart.py:tiny"]
        settings = {
            "XLA_FLAGS": "",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self.folder / "compiled")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return subprocess.Popen(
            [*command, *SMALL, *folders, *overrides],
            cwd=ROOT,
            env=os.environ | settings | environment,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def store(self, name: str) -> Path:
        """Where the capture `name` puts its two splits."""
        return self.folder / name / "s"

    def commits(self, name: str) -> int:
        """Shards of both splits that are committed."""
        return len(list(self.store(name).glob("*/commits/*.json")))

    def whole(self) -> dict[str, bytes]:
        """The undisturbed store; `seconds` says how long it takes, compiling included."""
        if not self._whole:
            started = time.monotonic()
            code, said = finish(self.start("whole"))
            assert code == 0, said
            self.seconds = time.monotonic() - started
            self._whole = contents(self.store("whole"))
        return self._whole

    def wait_for(self, name: str, commits: int, process: subprocess.Popen[str]) -> None:
        while self.commits(name) < commits:
            assert process.poll() is None, finish(process)
            time.sleep(0.005)


def finish(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    """(exit code, what it said of an error) of a process; killed after `seconds`."""
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    # Progress lines stand before the error, on the same line after a carriage return.
    error = re.search(r"(?:^|[\r\n])(?:error: )(.*)", said, re.S)
    return process.returncode, (error[1].strip() if error else said.strip())


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def kills(lab: Lab, tries: int, seed: int = 0) -> Outcome:
    """kill -9, by turns up to 50 ms after a commit that is drawn and at a moment drawn evenly from start to end.

    A new store whenever one got through before its kill.
    """
    whole, rng = lab.whole(), random.Random(seed)
    started, done, stores, same = time.monotonic(), 0, 0, True
    before = within = 0
    while done < tries:
        name = f"killed-{stores}"
        committed, process = lab.commits(name), lab.start(name)
        if done % 2 == 0:
            wanted = committed + rng.randrange(1, 16)
            while process.poll() is None and lab.commits(name) < wanted:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05))
        else:
            time.sleep(rng.uniform(0, lab.seconds))
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            done += 1
            before += lab.commits(name) == committed
            within += lab.commits(name) > committed
        else:
            assert process.returncode == 0
            stores, same = stores + 1, same and contents(lab.store(name)) == whole
    code, said = finish(lab.start(f"killed-{stores}"))
    assert code == 0, said
    same = same and contents(lab.store(f"killed-{stores}")) == whole
    seconds = time.monotonic() - started
    shards = sum("/commits/" in name for name in whole)
    note = (
        f"{before} before the session's first commit, {within} after one; {stores + 1} stores of {shards} shards "
        f"finished, {done + stores + 1} sessions"
    )
    said = "every byte as in an undisturbed store" if same else "a store differs"
    return Outcome("kill -9 of launch.capture at random moments", done, done if same else 0, seconds, said, note)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 32 MB at `folder` while the block lasts; False, and no disk, where this user may not mount one."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", folder], capture_output=True, check=False
    )
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


def _fill(path: Path) -> None:
    """Write to `path` until nothing goes on the disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as handle:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    handle.write(bytes(size))


def full_disk(lab: Lab, mount: bool = True) -> Outcome:
    """The disk is filled once three shards are committed, and emptied before the same command runs again.

    Not to `mount` a small disk, or no right to: no file may grow beyond 1,000 bytes, which the process meets alike.
    """
    whole, started = lab.whole(), time.monotonic()
    with small_disk(lab.folder / "full") if mount else contextlib.nullcontext(False) as mounted:
        with ended(lab.start("full")) as process:
            lab.wait_for("full", 3, process)
            if mounted:
                _fill(lab.folder / "full" / "filler")
            else:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            code, said = finish(process)
        there = contents(lab.store("full"))
        committed = [name for name in there if "/commits/" in name]
        held = code == 1 and "disk is full" in said and "run the same command" in said and len(committed) >= 3
        held = held and all(there[name] == whole[name] for name in committed) and len(there) < len(whole)
        (lab.folder / "full" / "filler").unlink(missing_ok=True)
        code, _ = finish(lab.start("full"))
        held = held and code == 0 and contents(lab.store("full")) == whole
    kind = "a disk of 32 MB filled" if mounted else "files limited to 1,000 bytes"
    note = f"{kind} after {len(committed)} commits; with room the same command finishes, identical"
    said = said.replace(str(lab.folder), "")
    return Outcome("disk full during launch.capture", 1, int(held), time.monotonic() - started, said, note)


def no_room(lab: Lab) -> Outcome:
    """A store that no disk holds is refused before it is begun."""
    started = time.monotonic()
    code, said = finish(lab.start("room", "--config.capture.tokens=1000000000000"))
    held = code == 1 and "bytes more on disk" in said and contents(lab.store("room")) == {}
    said = said.replace(str(lab.folder), "")
    return Outcome("a capture larger than the disk", 1, int(held), time.monotonic() - started, said)


def second_capture(lab: Lab) -> Outcome:
    """The same command while it runs."""
    with ended(lab.start("two", LONG)) as first:
        lab.wait_for("two", 1, first)
        started = time.monotonic()
        code, said = finish(lab.start("two", LONG))
        seconds = time.monotonic() - started
        held = code == 1 and f"pid {first.pid}" in said and first.poll() is None
    said = said.replace(str(lab.folder), "")
    return Outcome("a second launch.capture of one store", 1, int(held), seconds, said, "the first goes on")


def poisoned_model(folder: Path) -> Path:
    """The demo model with one token's embedding NaN."""
    shutil.copytree(DEMO, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["transformer.wte.weight"][POISONED] = np.nan
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def not_finite(lab: Lab) -> Outcome:
    """NaN in the activations: refused, or dropped and counted, as the configuration says."""
    started = time.monotonic()
    model = f"--config.lm.model={poisoned_model(lab.folder / 'poisoned')}"
    few = "--config.capture.tokens=4000"
    code, said = finish(lab.start("abort", model, few))
    held = code == 1 and "NaN or infinity" in said and "capture.non_finite=drop" in said
    stored = dropped = 0
    code, error = finish(lab.start("drop", model, few, "--config.capture.non_finite=drop"))
    assert code == 0, error
    for split in ("train", "heldout"):
        reader = StoreReader.open(lab.store("drop") / split)
        rows = reader.rows(0, reader.n_tokens, metadata=True)
        hook = next(iter(reader.hook_points))
        finite = np.isfinite(rows[hook].astype(np.float32)).all() and not (rows["token_id"] == POISONED).any()
        held = held and bool(finite) and verify(lab.store("drop") / split) == []
        stored, dropped = stored + reader.n_tokens, dropped + reader.counters["dropped_non_finite"]
    held = held and dropped > 0
    note = f"abort: refused; drop: {dropped:,} counted and left out, {stored:,} stored, all finite"
    return Outcome("NaN in activations", 2, 2 * held, time.monotonic() - started, said, note)


def no_hub(lab: Lab, kind: str) -> Outcome:
    """A model that is not cached, from a hub whose port is closed or that takes the question and says nothing."""
    endpoint = closed_port if kind == "closed" else lambda: server(silence)
    with endpoint() as url:
        started = time.monotonic()
        environment = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(lab.folder / "empty-cache")}
        code, said = finish(lab.start(f"hub-{kind}", "--config.lm.model=some-owner/some-model", **environment))
        seconds = time.monotonic() - started
    held = code == 1 and "some-owner/some-model" in said and "lm.model" in said and seconds < 30
    what = "the hub's port is closed" if kind == "closed" else "the hub takes the question and never answers"
    return Outcome(f"{what}, model not cached", 1, int(held), seconds, said)
