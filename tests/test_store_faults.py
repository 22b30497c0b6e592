"""What may happen to a store: kills, full disks, flipped bits, lost files, hostile metadata; never zeros.

Run as a script it is the capture that the tests kill: `test_store_faults.py PATH PAUSE [LIMIT_AFTER]`.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import saejax
from saejax.core.errors import BusyError, DataError
from saejax.store import StoreLayout, StoreReader, StoreWriter, verify
from saejax.store import writer as writer_module
from saejax.store.files import seal

HOOKS = {"blocks.0.resid_pre": 6, "blocks.1.resid_pre": 4}
LAYOUT = StoreLayout(128, 16)
BATCH = 100


def opened(path, n_tokens=1000):
    return StoreWriter.open(
        path, identity={"model": "tiny"}, hook_points=HOOKS, n_tokens=n_tokens, layout=LAYOUT, seed=1
    )


def capture(path, n_tokens=1000, pause=0.0, limit_after=None):
    """The whole capture, resumable; `limit_after` batches later files may have no more than 1000 bytes."""
    with opened(path, n_tokens) as writer:
        cursor, skip = writer.resume or ({"batch": 0}, 0)
        index = cursor["batch"]
        while not writer.full:
            rows = np.arange(index * BATCH, (index + 1) * BATCH)
            rng = np.random.default_rng(index)
            activations = {name: rng.normal(size=(BATCH, d)).astype(np.float32)[skip:] for name, d in HOOKS.items()}
            tokens = {"token_id": rows % 97, "document": rows // 50, "position": rows % 50}
            tokens = {name: values[skip:] for name, values in tokens.items()}
            writer.append(activations, tokens, cursor={"batch": index}, counters={"seen": BATCH})
            index, skip = index + 1, 0
            if index == limit_after:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            time.sleep(pause)
        writer.finish()


def script(*arguments):
    """Start this file as a process."""
    environment = os.environ | {"PYTHONPATH": str(Path(saejax.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def contents(path):
    files = (file for file in path.rglob("*") if file.is_file() and file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def read_everything(path):
    reader = StoreReader.open(path)
    return reader.rows(0, reader.n_tokens, metadata=True)


def shard_of(name):
    """(array, shard number) of a shard's file, None for the small files."""
    found = re.fullmatch(r"arrays/(.*)/c/(\d+)(/0)?", name)
    return found and (found[1], int(found[2]))


def assert_noticed(path, name):
    """Damage of file `name` is reported by reading (commits: by `verify`) with its place and a remedy."""
    if name.startswith("commits/"):
        problems = verify(path)
        assert any(f"Shard {int(Path(name).stem)}" in problem for problem in problems), name
        return
    with pytest.raises(DataError) as caught:
        read_everything(path)
    message = str(caught.value)
    assert str(path) in message and "run the command that made the store again" in message.replace("Run", "run")
    if shard_of(name):
        array, shard = shard_of(name)
        assert f"{array!r}, shard {shard} " in message and f"rows {shard * 128} to " in message
        assert f"commits/{shard:06d}.json" in message
    elif name != "manifest.json":
        assert repr(name.split("/")[1]) in message


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed store (name -> bytes) and a folder whose files the tests damage and put back."""
    path = tmp_path_factory.mktemp("faults") / "s"
    capture(path)
    return path, contents(path)


def test_random_bit_flips_are_all_noticed(whole):
    path, files = whole
    rng = np.random.default_rng(0)
    data = [name for name in sorted(files) if shard_of(name)]
    small = [name for name in sorted(files) if not shard_of(name)]
    for name in [*rng.choice(data, 60), *rng.choice(small, 30)]:
        damaged = bytearray(files[name])
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        (path / name).write_bytes(damaged)
        assert_noticed(path, str(name))
        (path / name).write_bytes(files[name])
    assert verify(path) == []


def test_every_lost_file_is_noticed(whole):
    path, files = whole
    for name in files:
        (path / name).unlink()
        assert_noticed(path, name) if name != "manifest.json" else assert_no_store(path)
        assert verify(path) != []
        (path / name).write_bytes(files[name])


def assert_no_store(path):
    with pytest.raises(DataError, match="no store at"):
        StoreReader.open(path)


def test_every_cut_or_lengthened_file_is_noticed(whole):
    path, files = whole
    for number, (name, content) in enumerate(sorted(files.items())):
        cases = (b"", content[: len(content) // 2], content[:-1], content + b"\0")
        for damaged in (cases[number % 4], cases[(number + 1) % 4]):
            (path / name).write_bytes(damaged)
            assert_noticed(path, name)
        (path / name).write_bytes(content)


@pytest.mark.parametrize("shard", [0, 3, 7])
def test_the_remedy_for_a_damaged_shard_heals_the_store(tmp_path, whole, shard):
    path = tmp_path / "s"
    capture(path)
    target = path / "arrays" / "blocks.1.resid_pre" / "c" / str(shard) / "0"
    damaged = bytearray(target.read_bytes())
    damaged[10] ^= 4
    target.write_bytes(damaged)
    with pytest.raises(DataError) as caught:
        read_everything(path)
    Path(re.search(r"Delete (\S+\.json)", str(caught.value))[1]).unlink()
    with opened(path) as writer:
        assert not writer.complete and writer.committed_rows == shard * 128
    assert not (path / "commits" / "000007.json").exists()  # what comes after the hole does not count
    with pytest.raises(DataError, match="not complete"):
        StoreReader.open(path)
    capture(path)
    assert contents(path) == whole[1]


@pytest.mark.parametrize("name", ["manifest.json", "arrays/document/zarr.json", "arrays/token_id/c/2"])
def test_deleting_a_file_and_capturing_again_heals_the_store(tmp_path, whole, name):
    capture(tmp_path / "s")
    (tmp_path / "s" / name).unlink()
    capture(tmp_path / "s")
    assert contents(tmp_path / "s") == whole[1]


def test_commits_of_another_store_are_not_adopted(tmp_path, whole):
    capture(tmp_path / "s")
    (tmp_path / "s" / "manifest.json").unlink()
    with pytest.raises(DataError, match="belongs to a store with another identity"):
        StoreWriter.open(tmp_path / "s", identity={"model": "big"}, hook_points=HOOKS, n_tokens=1000)


@pytest.mark.parametrize("shape", [[10**12, 6], [1000, 10**9], [1000], [2**62, 2**62], "x", [-1, 6]])
def test_a_zarr_json_that_claims_terabytes_is_refused_before_allocating(whole, shape):
    path, files = whole
    name = "arrays/blocks.0.resid_pre/zarr.json"
    metadata = json.loads(files[name]) | {"shape": shape}
    metadata["codecs"][0]["configuration"]["chunk_shape"] = [10**9, 10**3]
    (path / name).write_text(json.dumps(metadata))
    try:
        with pytest.raises(DataError, match=r"'blocks\.0\.resid_pre' does not fit the manifest \(codecs: .*shape"):
            StoreReader.open(path)
    finally:
        (path / name).write_bytes(files[name])


@pytest.mark.parametrize("content", [b"[" * 60000, b"null", b"\xff\xfe", b"{}"])
def test_metadata_that_is_no_metadata_is_refused(whole, content):
    path, files = whole
    for name in ("arrays/blocks.0.resid_pre/zarr.json", "manifest.json"):
        (path / name).write_bytes(content)
        with pytest.raises(DataError, match=re.escape(name if name == "manifest.json" else "zarr.json")):
            StoreReader.open(path)
        (path / name).write_bytes(files[name])


def test_absurdly_long_metadata_is_refused_without_reading_it(whole):
    path, files = whole
    for name in ("arrays/blocks.0.resid_pre/zarr.json", "manifest.json"):
        with open(path / name, "wb") as file:
            file.truncate(1 << 42)  # sparse
        with pytest.raises(DataError, match="is longer than"):
            StoreReader.open(path)
        (path / name).write_bytes(files[name])


def test_a_well_sealed_manifest_with_lies_is_refused(whole):
    path, files = whole
    honest = json.loads(files["manifest.json"])
    honest.pop("seal")
    lies = [
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
    for lie in lies:
        (path / "manifest.json").write_bytes(seal(honest | lie))
        with pytest.raises(DataError, match=r"manifest\.json contradicts itself"):
            StoreReader.open(path)
    (path / "manifest.json").write_bytes(seal(honest | {"format": {"name": "saejax-store", "version": 2}}))
    with pytest.raises(DataError, match="this version of saejax reads"):
        StoreReader.open(path)
    (path / "manifest.json").write_bytes(files["manifest.json"])


def test_killed_processes_leave_the_same_bytes(tmp_path):
    n_tokens, path = 6000, tmp_path / "s"
    capture(tmp_path / "whole", n_tokens)
    rng = np.random.default_rng(int.from_bytes(os.urandom(4)))
    killed = 0
    for _ in range(6):
        process = script(path, 0.01)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 4  # the capture takes about a second: most kills must have met it running
    process = script(path, 0)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert contents(path) == contents(tmp_path / "whole")
    assert verify(path) == []


def test_a_full_disk_says_so_and_loses_nothing(tmp_path):
    path = tmp_path / "s"
    capture(tmp_path / "whole", 6000)
    process = script(path, 0.02, 20)
    output, _ = process.communicate()
    assert process.returncode == 1, output
    for part in (
        "could not be written",
        "disk is full",
        "bytes free at",
        str(path),
        "shard ",
        "run the same command",
    ):
        assert part in output
    assert "Committed shards are intact" in output
    with pytest.raises(DataError, match="not complete"):
        StoreReader.open(path)
    with opened(path, 6000) as writer:
        assert writer.committed_rows >= 128
    capture(path, 6000)
    assert contents(path) == contents(tmp_path / "whole")


def test_a_background_error_reaches_the_caller_with_its_shard(tmp_path, monkeypatch):
    def failing(files, header, commit, original=writer_module.write_commit):
        if commit.index == 2:
            raise DataError("no permission")
        original(files, header, commit)

    monkeypatch.setattr(writer_module, "write_commit", failing)
    with pytest.raises(DataError, match="commit of shard 2: no permission"):
        capture(tmp_path / "s")
    monkeypatch.undo()
    with opened(tmp_path / "s") as writer:
        assert writer.committed_rows == 256


def test_at_most_two_shards_are_in_flight(tmp_path, monkeypatch):
    gate = threading.Event()

    def waiting(files, header, commit, original=writer_module.write_commit):
        assert gate.wait(20)
        original(files, header, commit)

    monkeypatch.setattr(writer_module, "write_commit", waiting)
    with opened(tmp_path / "s") as writer:
        zeros = {key: np.zeros(BATCH, np.int32) for key in ("token_id", "document", "position")}
        ones = {name: np.ones((BATCH, d), np.float32) for name, d in HOOKS.items()}

        def feed():
            for index in range(10):
                writer.append(ones, zeros, cursor={"batch": index})

        feeder = threading.Thread(target=feed)
        feeder.start()
        time.sleep(0.5)
        assert feeder.is_alive() and writer.rows <= 3 * 128
        gate.set()
        feeder.join()
        writer.finish()
    assert verify(tmp_path / "s") == []


def test_another_process_is_refused_within_a_second(tmp_path):
    with opened(tmp_path / "s", 6000):
        process = script(tmp_path / "s", 0)
        output, _ = process.communicate()
    assert process.returncode == 3, output
    ready, message, seconds = output.splitlines()
    assert ready == "ready" and f"pid {os.getpid()}" in message and float(seconds) < 1


def test_a_path_that_is_no_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="could not be written"):
        capture(tmp_path / "file" / "s")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error(tmp_path):
    capture(tmp_path / "s")
    (tmp_path / "s" / "commits" / "000005.json").unlink()
    (tmp_path / "s" / "commits").chmod(0o500)
    try:
        with pytest.raises(DataError, match="ermission"):
            capture(tmp_path / "s")
    finally:
        (tmp_path / "s" / "commits").chmod(0o700)


def main():
    path, pause, *limit_after = sys.argv[1:]
    print("ready", flush=True)
    start = time.monotonic()
    try:
        capture(path, 6000, float(pause), *map(int, limit_after))
    except BusyError as error:
        print(error, time.monotonic() - start, sep="\n")
        return 3
    except DataError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
