"""The client against a real server: a training over REST, its rows and its log, also through the server's death."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tiny.served import Served, served

from saejax.core.errors import BusyError, ConfigError, DataError
from saejax.core.metrics import read_metrics
from saejax.serve import client as clients
from saejax.serve.client import Client
from saejax.serve.jobs.queue import Queue
from saejax.serve.problems import Problem


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("client")
    draw = np.random.default_rng(0)
    codes = (draw.random((4096, 32)) < 0.1) * draw.exponential(2.0, (4096, 32))
    x = (codes @ draw.normal(size=(32, 16))).astype(np.float32)
    (folder / "data").mkdir()
    np.save(folder / "data" / "x.npy", x)
    np.save(folder / "data" / "held.npy", x[:512])
    try:
        yield folder
    finally:
        # A job outlives its server, and so a test that fails.
        queue = Queue(folder / "runs")
        for view in queue.views():
            with contextlib.suppress(Problem):
                queue.cancel(view.id)


def test_a_training_from_files_to_its_rows(folder: Path) -> None:
    with served(folder, "--data=data") as server:
        client = Client(server.url)
        with pytest.raises(ConfigError, match="lies below none of the folders"):
            client.train(layer_idx=2, activation_data_path="/etc/passwd")
        with pytest.raises(ConfigError, match="epochs: Extra inputs"):
            client.train(layer_idx=2, activation_data_path="data/x.npy", epochs=3)
        job = client.train(
            layer_idx=2,
            activation_data_path="data/x.npy",
            heldout_data_path="data/held.npy",
            latent_dim=64,
            batch_size=128,
            max_epochs=2,
            sparsity=4,
            name="mine",
            config={"train.log_every": 2, "train.monitor": False},
        )
        assert job["state"] in ("queued", "starting", "running") and job["name"] == "mine"
        with pytest.raises(BusyError, match="mine"):
            client.train(layer_idx=2, activation_data_path="data/x.npy", name="mine", batch_size=128)
        found = list(client.follow_job(job["id"]))
        assert found[-1]["job"]["state"] == "done", found[-1]
        log = "".join(message["text"] for message in found if message["kind"] == "log")
        assert "4,096 rows of 1 files" in log and "train: 64 steps" in log
        assert client.job(job["id"])["run"] == "mine" and client.wait(job["id"])["code"] == 0
        rows = [row for message in found for row in message.get("rows", [])]
        assert rows == [json.loads(line) for line in (server.runs / "mine" / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == 64 and any("val/fve" in row for row in rows)
        assert "mine" in [run["name"] for run in client.runs()]
        assert client.run("mine")["run"]["steps"] == 64
        assert [one["id"] for one in client.jobs()] == [job["id"]]
        with pytest.raises(DataError, match="There is no job"):
            client.cancel("none")
        with pytest.raises(BusyError, match="has ended"):
            client.cancel(job["id"])
        with pytest.raises(DataError, match="no run"):
            next(client.follow_run("nowhere"))
        assert b"PREALLOCATE" not in (server.runs / ".serve" / "jobs" / job["id"] / "log.txt").read_bytes()


@pytest.mark.soak
def test_a_server_that_is_killed_loses_no_job_and_no_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed by one client through the death of the server and the start of the next one at the same address."""
    monkeypatch.setattr(clients, "_AGAIN", 0.1)
    seen: list[dict[str, Any]] = []
    connected, enough = threading.Event(), threading.Event()

    def follow(client: Client) -> None:
        for row in client.follow_run("kept"):
            seen.append(row)
            connected.set()
            if enough.is_set() and row["step"] >= last:
                return

    last = 1 << 60
    with served(folder, "--data=data") as server:
        client = Client(server.url)
        job = client.train(
            layer_idx=2,
            activation_data_path="data/x.npy",
            latent_dim=64,
            batch_size=128,
            max_epochs=1e5,
            sparsity=4,
            name="kept",
            config={"train.log_every": 1, "train.checkpoint_every": 100_000, "train.monitor": False},
        )
        next(client.follow_run("kept"))
        reader = threading.Thread(target=follow, args=(client,))
        reader.start()
        assert connected.wait(60)
        server.process.kill()
        server.process.wait()
    with served(folder, "--data=data", f"--port={_port(server)}") as server:
        client = Client(server.url)
        view = client.job(job["id"])
        assert view["state"] == "running"
        assert client.cancel(job["id"])["state"] in ("running", "stopped")
        stopped = client.wait(job["id"], 60)
        assert (stopped["state"], stopped["code"]) == ("stopped", 75)
        last = read_metrics(server.runs / "kept" / "metrics.jsonl")[-1]["step"]
        resumed = client.resume(job["id"])
        assert resumed["state"] in ("queued", "starting", "running")
        last += 1
        enough.set()
        reader.join(60)
        assert not reader.is_alive(), "the reader sees no row of the second attempt"
        client.cancel(job["id"])
        client.wait(job["id"], 60)
        written = [json.loads(line) for line in (server.runs / "kept" / "metrics.jsonl").read_text().splitlines()]
        assert seen == written[: len(seen)]


def _port(server: Served) -> int:
    return int(server.url.rstrip("/").rpartition(":")[2])


# --- addresses and errors, against a server that only remembers ----------------------------------------------------


class _Remembers(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str, Any, str]]] = []
    answer: ClassVar[tuple[int, bytes]] = (200, b"{}")

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("Authorization", "")
        self.asked.append((self.command, self.path, json.loads(body) if body else None, token))
        self.send_response(self.answer[0])
        self.end_headers()
        self.wfile.write(self.answer[1])

    do_GET = do_POST = do_PUT = _any

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def remembering() -> Iterator[tuple[Client, type[_Remembers]]]:
    kind = type("Own", (_Remembers,), {"asked": []})
    with http.server.HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Client(f"http://127.0.0.1:{server.server_port}/", "secret"), kind
        server.shutdown()
        thread.join()


def test_what_is_asked_where(remembering: tuple[Client, type[_Remembers]]) -> None:
    client, server = remembering
    client.features("sweep/a b", q="x&y", limit=5)
    client.feature("@gemma", 12)
    client.encode("mine", "text", count=3)
    client.steer("mine", [1, "2:3"], "Once", operation="add", scale=4.0)
    client.note("mine", 7, "label")
    client.start("pipeline", experiment="quickstart", config={"train.lr": 1e-3})
    client.train(fast=True, layer_idx=1, activation_data_path="x")
    assert [one[:3] for one in server.asked] == [
        ("GET", "/api/features/sweep/a%20b?q=x%26y&limit=5", None),
        ("GET", "/api/feature/%40gemma?id=12", None),
        ("POST", "/api/encode", {"dictionary": "mine", "text": "text", "count": 3}),
        (
            "POST",
            "/api/steer",
            {"dictionary": "mine", "features": [1, "2:3"], "prompt": "Once", "operation": "add", "scale": 4.0},
        ),
        ("PUT", "/api/notes/mine", {"id": 7, "label": "label", "note": ""}),
        ("POST", "/api/jobs", {"command": "pipeline", "experiment": "quickstart", "config": {"train.lr": 1e-3}}),
        ("POST", "/api/sae/train-fast", {"layer_idx": 1, "activation_data_path": "x"}),
    ]
    assert {one[3] for one in server.asked} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ((400, b'{"error": "k is wrong"}'), ConfigError, "k is wrong"),
        ((409, b'{"error": "is busy"}'), BusyError, "is busy"),
        ((404, b'{"error": "is none"}'), DataError, "is none"),
        ((500, b"<html>"), DataError, "answered 500"),
        ((200, b"<html>"), DataError, "does not answer"),
    ],
)
def test_errors_say_what_the_server_says(
    remembering: tuple[Client, type[_Remembers]], answer: tuple[int, bytes], kind: type[Exception], said: str
) -> None:
    client, server = remembering
    server.answer = answer
    with pytest.raises(kind, match=said):
        client.run("x")


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(DataError, match="does not answer"):
        Client("http://127.0.0.1:9").runs()


def test_nothing_is_followed_where_no_server_ever_was() -> None:
    """A server that goes away is waited for; a wrong address is not."""
    for messages in (Client("http://127.0.0.1:9").follow_run("x"), Client("http://127.0.0.1:9").follow_job("x")):
        with pytest.raises(DataError, match="does not answer"):
            next(messages)
