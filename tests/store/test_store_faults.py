"""What may happen to a store: kills, full disks, flipped bits, lost files, hostile metadata; never zeros.

The store, the process that writes it and is killed, and the faults that the table of benchmarks.faults counts too are
those of benchmarks/faults/stores.py.
"""

import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.stores import (
    BATCH,
    GARBAGE,
    HOOKS,
    LIES,
    TERABYTES,
    ZARR,
    ZARR_SHAPES,
    capture,
    contents,
    flip_bits,
    hostile_files,
    kill_writer,
    lose_files,
    lying_manifest,
    lying_zarr,
    named,
    opened,
    read_everything,
    script,
    second_writer,
)
from saejax.core.errors import DataError
from saejax.store import StoreReader, StoreWriter, verify
from saejax.store import shard_writers as shard_writers_module


def assert_noticed(path, name):
    """Damage of file `name` is reported by reading (commits: by `verify`) with its place and a remedy."""
    message = named(path, name)
    assert message, name
    assert "run the command that made the store again" in message.replace("Run", "run"), message


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed store (name -> bytes) and a folder whose files the tests damage and put back."""
    path = tmp_path_factory.mktemp("faults") / "s"
    capture(path)
    return path, contents(path)


def test_300_random_bit_flips_are_all_noticed(whole):
    path, _ = whole
    flips = flip_bits(path, 300)
    assert (flips.tried, flips.held) == (300, 300)
    assert verify(path) == []


def test_every_lost_file_is_noticed(whole):
    path, files = whole
    lost = lose_files(path)
    assert lost.tried == lost.held == len(files)
    for name in files:
        (path / name).unlink()
        assert verify(path) != []
        (path / name).write_bytes(files[name])
    (path / "manifest.json").unlink()
    assert_no_store(path)
    (path / "manifest.json").write_bytes(files["manifest.json"])


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


@pytest.mark.parametrize("shape", ZARR_SHAPES)
def test_a_zarr_json_that_claims_terabytes_is_refused_before_allocating(whole, shape):
    path, files = whole
    (path / ZARR).write_bytes(lying_zarr(files[ZARR], shape))
    try:
        with pytest.raises(DataError, match=r"'blocks\.0\.resid_pre' does not fit the manifest \(codecs: .*shape"):
            StoreReader.open(path)
    finally:
        (path / ZARR).write_bytes(files[ZARR])


def test_all_hostile_metadata_is_refused_without_taking_memory(whole):
    hostile = hostile_files(whole[0])
    assert hostile.held == hostile.tried >= 20, hostile


@pytest.mark.parametrize("content", GARBAGE)
def test_metadata_that_is_no_metadata_is_refused(whole, content):
    path, files = whole
    for name in (ZARR, "manifest.json"):
        (path / name).write_bytes(content)
        with pytest.raises(DataError, match=re.escape(name if name == "manifest.json" else "zarr.json")):
            StoreReader.open(path)
        (path / name).write_bytes(files[name])


def test_absurdly_long_metadata_is_refused_without_reading_it(whole):
    path, files = whole
    for name in (ZARR, "manifest.json"):
        with open(path / name, "wb") as file:
            file.truncate(TERABYTES)  # sparse
        with pytest.raises(DataError, match="is longer than"):
            StoreReader.open(path)
        (path / name).write_bytes(files[name])


def test_a_well_sealed_manifest_with_lies_is_refused(whole):
    path, files = whole
    for lie in LIES:
        (path / "manifest.json").write_bytes(lying_manifest(files["manifest.json"], lie))
        with pytest.raises(DataError, match=r"manifest\.json contradicts itself"):
            StoreReader.open(path)
    later = {"format": {"name": "saejax-store", "version": 2}}
    (path / "manifest.json").write_bytes(lying_manifest(files["manifest.json"], later))
    with pytest.raises(DataError, match="this version of saejax reads"):
        StoreReader.open(path)
    (path / "manifest.json").write_bytes(files["manifest.json"])


def test_killed_processes_leave_the_same_bytes(tmp_path):
    killed = kill_writer(tmp_path, 6, 6000, seed=int.from_bytes(os.urandom(4)))
    assert killed.held == killed.tried == 6, killed


def test_a_full_disk_says_so_and_loses_nothing(tmp_path):
    path = tmp_path / "s"
    capture(tmp_path / "whole", 6000)
    process = script(path, 0.02, 6000, 20)
    output, _ = process.communicate()
    assert process.returncode == 1, output
    for part in ("could not be written", "disk is full", "bytes free at", str(path), "shard ", "run the same command"):
        assert part in output
    assert "Committed shards are intact" in output
    with pytest.raises(DataError, match="not complete"):
        StoreReader.open(path)
    with opened(path, 6000) as writer:
        assert writer.committed_rows >= 128
    capture(path, 6000)
    assert contents(path) == contents(tmp_path / "whole")


def test_a_background_error_reaches_the_caller_with_its_shard(tmp_path, monkeypatch):
    def failing(files, header, commit, original=shard_writers_module.write_commit):
        if commit.index == 2:
            raise DataError("no permission")
        original(files, header, commit)

    monkeypatch.setattr(shard_writers_module, "write_commit", failing)
    with pytest.raises(DataError, match="commit of shard 2: no permission"):
        capture(tmp_path / "s")
    monkeypatch.undo()
    with opened(tmp_path / "s") as writer:
        assert writer.committed_rows == 256


def test_at_most_two_shards_are_in_flight(tmp_path, monkeypatch):
    gate = threading.Event()

    def waiting(files, header, commit, original=shard_writers_module.write_commit):
        assert gate.wait(20)
        original(files, header, commit)

    monkeypatch.setattr(shard_writers_module, "write_commit", waiting)
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
        process = script(tmp_path / "s", 0, 6000)
        output, _ = process.communicate()
    assert process.returncode == 3, output
    ready, message, seconds = output.splitlines()
    assert ready == "ready" and f"pid {os.getpid()}" in message and float(seconds) < 1
    second = second_writer(tmp_path / "t")
    assert second.held == second.tried == 3, second


def test_a_path_that_is_no_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"file/s cannot be written: Not a directory\. Choose another folder"):
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
