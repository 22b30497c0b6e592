"""Checkpoints under damage, kill -9 and failing disks: found, named, survived."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from saejax.checkpoints import Checkpoints, integrity
from saejax.core.errors import DataError


def items_of(value: int) -> dict[str, Any]:
    """Every element of every leaf is `value`: a mixture of two saves cannot hide."""
    params = {"w": jnp.full((64, 8), float(value)), "b": jnp.full((8,), float(value))}
    return {"params": params, "stats": {"n": jnp.full((), value, jnp.int32)}}


def assert_all_are(items: Any, value: int) -> None:
    for leaf in (*items["params"].values(), items["stats"]["n"]):
        assert (np.asarray(leaf) == value).all()


@pytest.fixture
def two(tmp_path: Path) -> Checkpoints:
    """Good checkpoints 1 and 2."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, items_of(1), {"step": 1})
        rng = np.random.default_rng(0)  # Incompressible, so that array bytes outweigh the JSON.
        big = {"x": jnp.asarray(rng.standard_normal(4000), jnp.float32)}
        checkpoints.save(2, {**items_of(2), "big": big}, {"step": 2})
    return checkpoints


def files_of(checkpoints: Checkpoints) -> list[Path]:
    return sorted(p for p in (checkpoints.directory / "000000002").rglob("*") if p.is_file())


def assert_falls_back(checkpoints: Checkpoints, bad: Path) -> None:
    with pytest.warns(UserWarning, match="falling back to step 1") as caught:
        step, items, meta = checkpoints.restore_latest(items_of(0)) or pytest.fail("nothing")
    assert bad.name in str(caught[0].message) and "checkpoint 2 is not usable" in str(caught[0].message)
    assert (step, meta) == (1, {"step": 1})
    assert_all_are(items, 1)


def test_every_deleted_file_is_found(two: Checkpoints, tmp_path: Path) -> None:
    files = files_of(two)
    assert len(files) > 20
    for number, path in enumerate(files):
        aside = path.rename(tmp_path / "aside")
        problems = two.verify(2)
        assert len(problems) == 1 and path.name in problems[0]
        if "big" not in path.parts and number % 4 == 0:  # Not asked for, so its damage is passed over.
            assert_falls_back(two, path)
        aside.rename(path)
    assert two.verify(2) == []


def test_forty_random_bit_flips_are_found(two: Checkpoints) -> None:
    rng = random.Random(1)
    files = files_of(two)
    sizes = [path.stat().st_size for path in files]
    assert sum(n for p, n in zip(files, sizes, strict=True) if p.suffix != ".json") > 16_000
    for _ in range(40):
        path = rng.choices(files, sizes)[0]
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        problems = two.verify(2)
        assert len(problems) == 1 and str(path) in problems[0]
        with pytest.raises(DataError, match=path.name):
            two.restore_numpy(2, ("params", "stats", "big"))
        path.write_bytes(good)
    assert two.verify(2) == []


def test_every_bit_of_the_manifest_counts(two: Checkpoints) -> None:
    path = two.directory / "000000001" / integrity.INTEGRITY
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        assert two.verify(1), f"byte {position}"
    path.write_bytes(good[: len(good) // 2])
    assert "damaged" in two.verify(1)[0]
    path.write_bytes(b"[" * 100_000)
    assert "damaged" in two.verify(1)[0]


def test_truncated_flipped_and_swapped_files_fall_back(two: Checkpoints) -> None:
    path = next(p for p in files_of(two) if p.parent.name == "d" and "params" in p.parts)
    good = path.read_bytes()
    for bad, said in ((good[:-1], "bytes instead of"), (good[:-1] + bytes([good[-1] ^ 1]), "sha256 mismatch")):
        path.write_bytes(bad)
        assert said in two.verify(2)[0]
        assert_falls_back(two, path)


def test_damage_in_an_item_that_is_not_asked_for_does_not_matter(two: Checkpoints) -> None:
    (two.directory / "000000002" / "big" / "_METADATA").unlink()
    assert two.verify(2) and not two.verify(2, ("params",))
    got, _ = two.restore(2, items_of(0))
    assert_all_are(got, 2)


def test_unexpected_files_count_where_orbax_reads(two: Checkpoints) -> None:
    folder = two.directory / "000000002"
    (folder / "notes.txt").write_text("the good one")
    (folder / "params" / ".DS_Store").write_text("")
    assert two.verify(2) == []
    (folder / "params" / "d" / "stray").write_text("")
    assert "stray is unexpected" in two.verify(2)[0]


def test_no_good_one_left_is_an_error_not_a_fresh_start(two: Checkpoints) -> None:
    for step in (1, 2):
        (two.directory / f"{step:09d}" / "meta" / "metadata").unlink()
    with pytest.warns(UserWarning), pytest.raises(DataError, match=r"none of the checkpoints .* is good"):
        two.restore_latest(items_of(0))


def test_leftovers_of_a_kill_are_ignored_and_removed_when_in_the_way(two: Checkpoints) -> None:
    folder = two.directory
    shutil.copytree(folder / "000000002", folder / "000000003")
    (folder / "000000003" / integrity.INTEGRITY).unlink()
    shutil.copytree(folder / "000000001", folder / "000000003.orbax-checkpoint-tmp")
    shutil.copytree(folder / "000000001", folder / "000000000.removed")
    assert two.steps() == [1, 2]
    with pytest.warns(UserWarning, match="checkpoint 3 .*no integrity.json; falling back to step 2"):
        assert (two.restore_latest(items_of(0)) or [None])[0] == 2
    with two:
        two.save(3, items_of(3), {})
    assert_all_are(two.restore(3, items_of(0))[0], 3)
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "000000001", "000000002", "000000003"]


# Failing disks


def test_failure_in_the_background_is_raised_once_and_the_last_good_one_stays(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "write_integrity", full)
        two.save(3, items_of(3), {})
        with pytest.raises(DataError, match=r"checkpoint 3 .*the disk is full; the last good one, step 2"):
            two.wait()
    two.wait()
    assert two.steps() == [1, 2] and not (two.directory / "000000003").exists()
    with two:
        two.save(3, items_of(3), {})
    assert_all_are(two.restore(3, items_of(0))[0], 3)


def test_an_unwaited_failure_comes_out_of_the_next_save(
    two: Checkpoints, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("ABORTED: input/output error")

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", broken)
    two.save(3, items_of(3), {})
    with pytest.raises(DataError, match=r"checkpoint 3 could not be written .*input/output error"):
        two.save(4, items_of(4), {})
    assert two.steps() == [1, 2]
    assert capfd.readouterr().err == ""


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/checkpoints cannot be written: Not a directory\. Choose another folder"):
        Checkpoints(tmp_path / "file" / "checkpoints").save(1, items_of(1), {})


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


# Writes that Orbax had begun may end after the loop that awaited them is closed: now and then TensorStore then
# complains from a thread of its own.
@pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_fills_up(tiny_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    saved = {}
    checkpoints = Checkpoints(tiny_disk / "checkpoints", keep_last=9)
    with pytest.raises(DataError, match="the disk is full; the last good one, step"), checkpoints:
        for step in range(9):
            saved[step] = rng.standard_normal(50_000).astype(np.float32)
            checkpoints.save(step, {"params": {"x": jnp.asarray(saved[step])}}, {})
    steps = checkpoints.steps()
    assert len(steps) >= 2
    for step in steps:
        np.testing.assert_array_equal(checkpoints.restore_numpy(step)[0]["params"]["x"], saved[step])
    assert len(list((tiny_disk / "checkpoints").glob("0*"))) == len(steps), "half-written files stay on it"
    assert capfd.readouterr().err == ""


# kill -9. One process imports JAX; each "go" forks a writer that resumes and saves until it is killed.

WRITER = """
import os, sys
import jax.numpy as jnp
from saejax.checkpoints import Checkpoints
from tests.checkpoints.test_checkpoint_faults import items_of

def write():
    checkpoints = Checkpoints(sys.argv[1], keep_last=2)
    found = checkpoints.restore_latest(items_of(0))
    step = found[0] if found else 0
    while True:
        step += 1
        checkpoints.save(step, items_of(step), {"step": step})
        print("returned", step, flush=True)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        write()
    print("pid", pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WRITER, str(tmp_path / "checkpoints")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_kill_nine_at_random_moments(nursery: subprocess.Popen[str], tmp_path: Path) -> None:
    assert nursery.stdin is not None and nursery.stdout is not None
    rng = random.Random()
    reached = 0
    for _ in range(6):
        nursery.stdin.write("go\n")
        nursery.stdin.flush()
        pid = int(nursery.stdout.readline().split()[1])
        lines = [nursery.stdout.readline()]
        time.sleep(rng.random() * 0.5)
        os.kill(pid, signal.SIGKILL)
        while lines[-1] != "dead\n":
            assert lines[-1], "the writer ended by itself"
            lines.append(nursery.stdout.readline())
        returned = int(lines[-2].split()[1])

        checkpoints = Checkpoints(tmp_path / "checkpoints")
        assert [checkpoints.verify(step) for step in checkpoints.steps()] == [[]] * len(checkpoints.steps())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # An unfinished step is what a kill leaves.
            found = checkpoints.restore_latest(items_of(0))
        if found is None:
            assert returned == 1
            continue
        step, items, meta = found
        # save(n) returns after n - 1 is durable; a kill may come between finishing a step and printing.
        assert returned - 1 <= step <= returned + 1
        assert step >= reached and meta == {"step": step}
        assert_all_are(items, step)
        reached = step
    assert reached > 0
