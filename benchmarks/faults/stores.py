"""Faults of a store: kills of its writer, lost files, flipped bits, a second writer.

    python -m benchmarks.faults.stores PATH PAUSE N_TOKENS [LIMIT_AFTER]

As a script it is the capture that is killed: it writes N_TOKENS rows to PATH, waits PAUSE seconds after each
batch, and may write no more than 1000 bytes a file after LIMIT_AFTER batches.
"""

import functools
import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.outcome import Outcome
from saejax.core.errors import BusyError, DataError
from saejax.store import StoreLayout, StoreReader, StoreWriter, verify
from saejax.store.files import seal

HOOKS = {"blocks.0.resid_pre": 6, "blocks.1.resid_pre": 4}
LAYOUT = StoreLayout(128, 16)
BATCH = 100
ZARR = "arrays/blocks.0.resid_pre/zarr.json"
ZARR_SHAPES: list[Any] = [[10**12, 6], [1000, 10**9], [1000], [2**62, 2**62], "x", [-1, 6]]
GARBAGE = [b"[" * 60000, b"null", b"\xff\xfe", b"{}"]
TERABYTES = 1 << 42
LIES: list[dict[str, Any]] = [
    {"n_tokens": 10**15},
    {"n_tokens": 0, "shards": []},
    {"shards": [{"rows": 1000, "sha256": {}}]},
    {"hook_points": {"../../x": 4}},
    {"hook_points": {"blocks.0.resid_pre": 10**12}},
    {"hook_points": 5},
    {"layout": {"shard_rows": 10**12, "chunk_rows": 10**12}},
    {"statistics": {}},
    {"identity": 3},
]
ROOT = Path(__file__).resolve().parents[2]


def opened(path: Path, n_tokens: int = 1000) -> StoreWriter:
    return StoreWriter.open(
        path, identity={"model": "tiny"}, hook_points=HOOKS, n_tokens=n_tokens, layout=LAYOUT, seed=1
    )


def capture(path: Path, n_tokens: int = 1000, pause: float = 0.0, limit_after: int | None = None) -> None:
    """The whole capture, resumable; `limit_after` batches later files may have no more than 1000 bytes."""
    with opened(path, n_tokens) as writer:
        index = (writer.resume or {"batch": 0})["batch"]
        while not writer.full:
            rows = np.arange(index * BATCH, (index + 1) * BATCH)
            rng = np.random.default_rng(index)
            activations = {name: rng.normal(size=(BATCH, d)).astype(np.float32) for name, d in HOOKS.items()}
            tokens = {"token_id": rows % 97, "document": rows // 50, "position": rows % 50}
            writer.append(activations, tokens, cursor={"batch": index}, counters={"seen": BATCH})
            index += 1
            if index == limit_after:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            time.sleep(pause)
        writer.finish()


def script(*arguments: object) -> subprocess.Popen[str]:
    """This file as a process; it prints "ready" when it begins to write."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.faults.stores", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def contents(path: Path) -> dict[str, bytes]:
    """{name: bytes} of all files but the lease."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def read_everything(path: Path) -> dict[str, np.ndarray]:
    reader = StoreReader.open(path)
    return reader.rows(0, reader.n_tokens, metadata=True)


def shard_of(name: str) -> tuple[str, int] | None:
    """(array, shard number) of a shard's file, None for the small files."""
    found = re.fullmatch(r"arrays/(.*)/c/(\d+)(/0)?", name)
    return (found[1], int(found[2])) if found else None


def named(path: Path, name: str) -> str:
    """What is said of the damage of file `name` by reading (of a commit: by `verify`); empty where it is not named.

    A shard must be named with its array, its number and its rows; all others by their array or file.
    """
    if name.startswith("commits/"):
        found = [problem for problem in verify(path) if f"Shard {int(Path(name).stem)}" in problem]
        return found[0] if found else ""
    try:
        read_everything(path)
    except DataError as error:
        said = str(error)
    else:
        return ""
    wanted = [str(path)]
    if place := shard_of(name):
        array, shard = place
        rows = LAYOUT.shard_rows * shard
        wanted += [f"{array!r}, shard {shard} ", f"rows {rows} to ", f"commits/{shard:06d}.json"]
    elif name != "manifest.json":
        wanted.append(repr(name.split("/")[1]))
    return said if all(part in said for part in wanted) else ""


def flip_bits(path: Path, tries: int, seed: int = 0) -> Outcome:
    """Flip one bit of a file, read, put it back: two of three in shards, the others in the small files."""
    started, files, rng = time.monotonic(), contents(path), np.random.default_rng(seed)
    shards = [name for name in sorted(files) if shard_of(name)]
    small = [name for name in sorted(files) if not shard_of(name)]
    said = []
    for index in range(tries):
        name = str(rng.choice(small if index % 3 == 2 else shards))
        damaged = bytearray(files[name])
        damaged[rng.integers(len(damaged))] ^= 1 << int(rng.integers(8))
        (path / name).write_bytes(damaged)
        said.append(named(path, name))
        (path / name).write_bytes(files[name])
    note = "two thirds in shards, the others in JSON"
    return _noticed("one flipped bit", path, said, time.monotonic() - started, note)


def lose_files(path: Path) -> Outcome:
    """Delete each file in its turn, read, put it back."""
    started, files, said = time.monotonic(), contents(path), []
    for name, content in files.items():
        (path / name).unlink()
        said.append(named(path, name))
        (path / name).write_bytes(content)
    return _noticed("one lost file", path, said, time.monotonic() - started, "every file once")


def _noticed(fault: str, path: Path, said: list[str], seconds: float, note: str) -> Outcome:
    held = sum(bool(text) for text in said)
    return Outcome(fault, len(said), held, seconds, said[0].replace(str(path), "STORE"), note)


def hostile_metadata() -> Iterator[tuple[str, Callable[[bytes], bytes] | int]]:
    """(file, what becomes of its bytes, or the length it is given) of metadata that lies or is none."""
    for shape in ZARR_SHAPES:
        yield ZARR, functools.partial(lying_zarr, shape=shape)
    for name in (ZARR, "manifest.json"):
        for content in GARBAGE:
            yield name, functools.partial(lambda raw, content: content, content=content)
        yield name, TERABYTES
    for lie in LIES:
        yield "manifest.json", functools.partial(lying_manifest, lie=lie)


def lying_zarr(raw: bytes, shape: Any) -> bytes:
    """zarr.json with another shape, and chunks of terabytes."""
    metadata = json.loads(raw) | {"shape": shape}
    metadata["codecs"][0]["configuration"]["chunk_shape"] = [10**9, 10**3]
    return json.dumps(metadata).encode()


def lying_manifest(raw: bytes, lie: dict[str, Any]) -> bytes:
    """The manifest with other values, and a seal that fits them."""
    honest = json.loads(raw)
    honest.pop("seal")
    return seal(honest | lie)


def hostile_files(path: Path) -> Outcome:
    """Open the store with each piece of hostile metadata."""
    files, started, said = contents(path), time.monotonic(), []
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, change in hostile_metadata():
        if isinstance(change, int):
            with (path / name).open("wb") as handle:
                handle.truncate(change)  # sparse
        else:
            (path / name).write_bytes(change(files[name]))
        try:
            StoreReader.open(path)
            said.append("")
        except DataError as error:
            said.append(str(error) if Path(name).name in str(error) or "does not fit" in str(error) else "")
        (path / name).write_bytes(files[name])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    said = said if grown < 64 else [""] * len(said)
    note = f"manifest.json and zarr.json that claim terabytes or are no JSON; {grown:.0f} MB of memory"
    return _noticed("hostile metadata of a store", path, said, time.monotonic() - started, note)


def kill_writer(folder: Path, tries: int, n_tokens: int = 12_000, seed: int = 0) -> Outcome:
    """kill -9 of the script at random moments of its writing, then once to the end; byte for byte as undisturbed."""
    capture(folder / "whole", n_tokens)
    whole = contents(folder / "whole")
    rng = np.random.default_rng(seed)
    started, kills, stores, same = time.monotonic(), 0, 0, True
    while kills < tries:
        path = folder / f"killed-{stores}"
        process = script(path, 0.01, n_tokens)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            kills += 1
        else:  # it was through
            stores, same = stores + 1, same and contents(path) == whole
    path = folder / f"killed-{stores}"
    capture(path, n_tokens)
    same = same and contents(path) == whole and verify(path) == []
    seconds = time.monotonic() - started
    note = f"{stores + 1} stores of {-(-n_tokens // LAYOUT.shard_rows)} shards finished"
    said = "identical to the byte" if same else "a store differs"
    return Outcome("kill -9 of a store's writer", kills, kills if same else 0, seconds, said, note)


def second_writer(path: Path, tries: int = 3) -> Outcome:
    """Open a store for writing while another process writes it."""
    process = script(path, 0.05, 100_000)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    while not (path / "manifest.json").is_file():
        assert process.poll() is None
        time.sleep(0.005)
    times, said, held = [], "", 0
    try:
        for _ in range(tries):
            started = time.monotonic()
            try:
                opened(path, 100_000).close()
            except BusyError as error:
                said, held = str(error), held + (f"pid {process.pid}" in str(error))
            times.append(time.monotonic() - started)
    finally:
        process.kill()
        process.communicate()
    said = said.replace(str(path), "STORE")
    held = held if max(times) < 1 else 0
    note = f"refused in at most {1000 * max(times):.1f} ms"
    return Outcome("a second writer of a store", tries, held, sum(times), said, note)


def main() -> int:
    path, pause, n_tokens, *limit_after = sys.argv[1:]
    print("ready", flush=True)
    started = time.monotonic()
    try:
        capture(Path(path), int(n_tokens), float(pause), *map(int, limit_after))
    except BusyError as error:
        print(error, time.monotonic() - started, sep="\n")
        return 3
    except DataError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
