"""Stores in a bucket: a local S3 server behind a proxy that loses answers, holds them back and refuses."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from tiny.object_store import BUCKET, KEY, NEEDED, Answer, object_store, reached

import saejax
from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.store import StoreLayout, StoreReader, StoreWriter, describe, merge, remote, remote_lease, verify
from saejax.store.files import StoreFiles
from saejax.store.remote_lease import RemoteLease

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors")), reason=NEEDED
)

ROWS, BATCH = 1200, 300
QUICK = {"max_retries": 3, "initial_delay": "20ms", "max_delay": "100ms"}


@pytest.fixture(scope="module")
def server():
    with object_store() as running, reached(running):
        yield running


@pytest.fixture(autouse=True)
def well(request, monkeypatch):
    """Each test starts with a server without faults, and with retries that are over soon."""
    request.getfixturevalue("server").clear()
    monkeypatch.setattr(remote, "_RETRIES", QUICK)


def url(name, bucket=BUCKET):
    return f"s3://{bucket}/stores/{name}"


def write(path, rows=ROWS, part=0, parts=1, seed=0):
    """Capture rows that are a function of the step alone; continues where a writer was."""
    layout = StoreLayout(shard_rows=512, chunk_rows=64)
    with StoreWriter.open(
        path, identity={"of": seed}, hook_points={"a": 8}, n_tokens=rows, layout=layout, part=part, parts=parts
    ) as writer:
        step = (writer.resume or {"step": 0})["step"]
        while not writer.full:
            values = np.random.default_rng([seed, part, step]).normal(size=(BATCH, 8))
            tokens = dict.fromkeys(("token_id", "document", "position"), np.arange(BATCH, dtype=np.int32))
            writer.append({"a": values}, tokens, cursor={"step": step})
            step += 1
        writer.finish()


def on_disk(path):
    """name -> bytes of a store on a disk, without leases."""
    files = [file for file in path.rglob("*") if file.is_file() and not file.name.startswith(".lock")]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The same store on a disk: name -> bytes."""
    path = tmp_path_factory.mktemp("disk") / "s"
    write(path)
    return on_disk(path)


@pytest.fixture(scope="module")
def whole(server):
    """A finished store in the bucket."""
    write(url("whole"))
    return url("whole")


def test_it_holds_the_bytes_of_a_store_on_a_disk_and_no_lease_stays(server, whole, plain):
    assert server.contents("stores/whole") == plain
    assert StoreFiles(whole).read(".lock") is None
    assert verify(whole) == []
    assert any("complete: 1,200 rows in 3 shards" in line for line in describe(whole))


def test_two_parts_written_apart_and_a_merge(server, tmp_path, whole):
    for part in (1, 0):
        write(url("parts"), part=part, parts=2)
        write(tmp_path / "parts", part=part, parts=2)
    assert server.contents("stores/parts") == on_disk(tmp_path / "parts")
    write(url("other"), rows=100, seed=1)
    with pytest.raises(DataError, match="same model"):
        merge(url("both"), [whole, url("other")])
    with pytest.raises(ConfigError, match="same store"):
        merge(url("both"), [whole, whole])
    write(url("shorter"), rows=600)
    assert merge(url("both"), [whole, url("shorter")]) == 1800
    assert verify(url("both")) == []


def test_lost_answers_are_harmless(server, plain):
    """Every third write is done and its answer dropped, so that it is sent again; also that of the lease."""
    lock, count = threading.Lock(), [0]

    def lose(request):
        with lock:
            count[0] += request.method == "PUT"
            return Answer(lost=request.method == "PUT" and count[0] % 3 == 1)

    server.rule = lose
    write(url("lost"))
    server.clear()
    assert count[0] > 20
    assert server.contents("stores/lost") == plain


@pytest.mark.ci
def test_a_writer_that_is_killed_is_continued_at_once_and_leaves_the_same_bytes(server, plain):
    """kill -9 while the second shard is on its way: the lease it leaves is known to be of a process that ended."""
    seen = threading.Event()

    def hold(request):
        if request.method == "PUT" and "commits/000001" in request.path:
            seen.set()
            return Answer(silent=True)
        return Answer()

    server.rule = hold
    code = "import test_object_store as t; t.write(t.url('killed'))"
    folders = os.pathsep.join([os.path.dirname(__file__), *(folder for folder in sys.path if folder)])
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": folders}) as writer:
        assert seen.wait(60)
        writer.send_signal(signal.SIGKILL)
    server.clear()
    assert json.loads(StoreFiles(url("killed")).read(".lock"))["pid"] == writer.pid
    started = time.monotonic()
    write(url("killed"))
    assert time.monotonic() - started < remote_lease.STALE_SECONDS / 2
    assert server.contents("stores/killed") == plain


def test_a_second_writer_is_refused_while_the_first_renews(server, monkeypatch, capfd):
    """Also from another machine, which has nothing but the object to go by."""
    files = StoreFiles(url("twice"))
    with RemoteLease(files), pytest.raises(BusyError, match=f"being written by another process .pid {os.getpid()}"):
        write(url("twice"))
    monkeypatch.setattr(remote_lease, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(remote_lease, "STALE_SECONDS", 5.0)
    with RemoteLease(files):
        monkeypatch.setattr(remote_lease, "_process", lambda: {"machine": "another"})
        with pytest.raises(BusyError, match="being written by another process"):
            write(url("twice"))
    assert "waiting up to 5 s" in capfd.readouterr().err


def test_a_stale_lease_of_another_machine_is_taken_over_and_its_holder_stops(server, monkeypatch):
    monkeypatch.setattr(remote_lease, "STALE_SECONDS", 0.3)
    files = StoreFiles(url("stale"))
    monkeypatch.setattr(remote_lease, "_process", lambda: {"machine": "elsewhere"})
    asleep = RemoteLease(files)  # a machine that is suspended: it holds the lease and renews nothing
    monkeypatch.setattr(asleep, "_renew_until_stopped", lambda: None)
    asleep._thread = threading.Thread(target=lambda: None)
    asleep.__enter__()
    monkeypatch.setattr(remote_lease, "_process", lambda: {"machine": "here"})
    with RemoteLease(files) as ours:
        monkeypatch.undo()
        monkeypatch.setattr(remote_lease, "RENEW_SECONDS", 0.01)
        RemoteLease._renew_until_stopped(asleep)  # it wakes up, and ends because the object is another's
        with pytest.raises(BusyError, match="taken over"):
            asleep.check()
        ours.check()
    assert files.read(".lock") is None


def test_a_server_that_makes_no_lease_ends_in_a_line(server):
    """Each look finds nothing, and each write finds something: as where conditions are not understood."""
    server.rule = lambda request: (
        Answer(refused=(412, "PreconditionFailed", "No.")) if request.kind == "HEAD lock" else Answer()
    )
    with pytest.raises(DataError, match=r"in 20 tries"):
        write(url("never"))


def test_a_writer_without_its_lease_commits_nothing_more(server, monkeypatch):
    monkeypatch.setattr(remote_lease, "RENEW_SECONDS", 0.01)
    files, rows = StoreFiles(url("thief")), {"a": np.ones((BATCH, 8))}
    tokens = {name: np.zeros(BATCH, np.int32) for name in ("token_id", "document", "position")}
    layout = StoreLayout(shard_rows=512, chunk_rows=64)
    with (
        pytest.raises(BusyError, match=r"taken over by another process .pid 7 on 'thief'"),
        StoreWriter.open(url("thief"), identity={}, hook_points={"a": 8}, n_tokens=ROWS, layout=layout) as writer,
    ):
        files.write(".lock", json.dumps({"token": "x", "pid": 7, "host": "thief"}).encode())
        time.sleep(0.5)
        for step in range(7):
            writer.append(rows, tokens, cursor={"step": step})
        writer.finish()
    assert files.list("commits") == []
    assert json.loads(files.read(".lock"))["host"] == "thief"  # what is another's stays


def test_late_answers_are_waited_for_and_silence_ends_in_a_line(server, whole):
    server.rule = lambda request: Answer(wait=0.2)
    assert StoreReader.open(whole).rows(0, 10)["a"].shape == (10, 8)
    limits = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"}  # read once a process: 30 s elsewhere
    server.rule = lambda request: Answer(silent=True)
    started = time.monotonic()
    code = (
        "from saejax.store import remote, StoreReader\n"
        f"remote._RETRIES = {QUICK | {'max_retries': 1}}\n"
        f"StoreReader.open({whole!r})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **limits},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - started < 30
    assert "Timeout was reached" in ended.stderr and "Check the network and AWS_ENDPOINT_URL" in ended.stderr


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [(403, "AccessDenied", "AWS_ACCESS_KEY_ID"), (400, "AuthorizationHeaderMalformed", "AWS_REGION")],
)
def test_refusals_are_one_line_each(server, whole, status, code, remedy):
    server.rule = lambda request: Answer(refused=(status, code, "No, and no again."))
    for what in (lambda: StoreReader.open(whole), lambda: write(url("refused"))):
        started = time.monotonic()
        with pytest.raises(DataError, match=code) as error:
            what()
        assert remedy in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500
        assert time.monotonic() - started < 10


def test_a_refusal_while_reading_blames_no_shard(server, whole):
    """The data is whole: nobody is told to delete it."""
    reader = StoreReader.open(whole)
    server.rule = lambda request: Answer(refused=(403, "AccessDenied", "No."))
    with pytest.raises(DataError, match="AccessDenied") as error:
        reader.rows(0, 100)
    assert "Delete" not in str(error.value)


def test_a_bucket_that_is_not_there(server):
    for what in (lambda: StoreReader.open(url("x", "nobucket")), lambda: write(url("x", "nobucket"))):
        with pytest.raises(DataError, match=r"NoSuchBucket.*Make the bucket"):
            what()
    with pytest.raises(DataError, match=r"no store at .*no manifest\.json"):
        StoreReader.open(url("nothing"))


def test_a_wrong_key_and_half_a_key(server, whole, monkeypatch):
    code = f"from saejax.store import StoreReader; StoreReader.open({whole!r})"
    wrong = {**os.environ, "AWS_ACCESS_KEY_ID": "AKIDWRONG"}  # a process has the keys that it began with
    ended = subprocess.run(
        [sys.executable, "-c", code], env=wrong, check=False, capture_output=True, text=True, timeout=60
    )
    assert "InvalidAccessKeyId" in ended.stderr and "Check AWS_ACCESS_KEY_ID" in ended.stderr
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="only AWS_ACCESS_KEY_ID is set"):
        StoreReader.open(whole)


ONE_OF_EACH = ("manifest.json", "commits/000001.json", "arrays/a/zarr.json", "arrays/a/c/1/0")


def damage(server, whole, names):
    """Each object with a flipped bit, and then lost: `verify` names it every time."""
    objects, rng = server.contents("stores/whole"), np.random.default_rng(0)
    for name in names:
        raw = bytearray(objects[name])
        raw[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
        server.ask("PUT", f"/{BUCKET}/stores/whole/{name}", bytes(raw))
        flipped = "\n".join(verify(whole))
        server.ask("DELETE", f"/{BUCKET}/stores/whole/{name}")
        lost = "\n".join(verify(whole))
        server.ask("PUT", f"/{BUCKET}/stores/whole/{name}", objects[name])
        array = name.split("/")[1:2]
        for found in (flipped, lost):
            assert name in found or (name.endswith("zarr.json") and f"array {array[0]!r}" in found), (name, found)
    assert verify(whole) == []


def test_flipped_bits_and_lost_objects_are_found_as_on_a_disk(server, whole):
    damage(server, whole, ONE_OF_EACH)


@pytest.mark.soak
def test_in_every_object_a_flipped_bit_and_its_loss_are_found(server, whole):
    damage(server, whole, sorted(server.contents("stores/whole")))


@pytest.mark.soak
def test_a_capture_by_two_processes_and_the_training_on_it_are_those_of_a_disk(server, tmp_path):
    """The commands as users run them: the same objects as files on a disk, and the same parameters to the bit."""

    def run(command, name, stores, *more):
        words = [
            "--config=quickstart:tiny",
            f"--config.name={name}",
            "--config.store=s",
            f"--config.stores_dir={stores}",
        ]
        line = [sys.executable, "-m", "saejax", command, *words, "--config.capture.parts=2", *more]
        return subprocess.Popen(line, cwd=tmp_path, env=os.environ, stdout=subprocess.DEVNULL)

    both = [run("capture", "far", f"s3://{BUCKET}/cli", f"--config.parallel.processes={i}/2") for i in range(2)]
    both.append(run("capture", "near", tmp_path / "cli"))
    assert [process.wait(300) for process in both] == [0, 0, 0]
    for split in ("train", "heldout"):
        assert server.contents(f"cli/s/{split}") == on_disk(tmp_path / "cli" / "s" / split)
    deep = run("train", "far", f"s3://{BUCKET}/cli", "--config.train.blocks_ahead=3")
    assert [process.wait(300) for process in (deep, run("train", "near", tmp_path / "cli"))] == [0, 0]
    far, near = (jax.tree.leaves(saejax.load(tmp_path / "runs" / name).params) for name in ("far", "near"))
    assert len(far) == len(near) > 0
    assert all(np.array_equal(one, two) for one, two in zip(far, near, strict=True))


def test_the_environment_decides_where_it_is(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        monkeypatch.delenv(name)
    assert remote.spec_of("s3://b/x/y") == {"driver": "s3", "bucket": "b", "path": "x/y/"}
    assert remote.spec_of("gs://b/x") == "gs://b/x/"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one/")
    assert remote.spec_of("s3://b")["path"] == ""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two")
    spec = remote.spec_of("s3://b/x")
    assert (spec["endpoint"], spec["aws_region"]) == ("http://two", "eu-west-1")
    assert remote.context_of("s3://b")["aws_credentials"] == {"type": "environment"}
    assert os.environ["AWS_ACCESS_KEY_ID"] == KEY
