"""Rows as they are written: nothing twice, nothing missing, whatever happens to writer, reader and file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn
from fastapi import FastAPI
from tiny import one_device
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from saejax.core.metrics import JsonlWriter
from saejax.jobs.job import chain
from saejax.serve import rows as rows_of
from saejax.serve.jobs.queue import Queue, new_id
from saejax.serve.live import Live
from saejax.serve.routes import live as routes
from saejax.serve.rows import Cursor, behind_step
from saejax.serve.site import Folders, Site

LOOK = 0.02
WRITER = """
    import random, sys
    from saejax.core.metrics import JsonlWriter
    seed, step = int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    writer = JsonlWriter(sys.argv[1])
    print("ready", flush=True)
    while True:
        step += 1
        writer.write(step, {"train/fve": draw.random(), "session": seed})
"""


class Served:
    """The sockets of a runs folder, on a port of this process."""

    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        self.states: dict[str, str] = {}
        site = Site(Folders(self.runs, folder / "stores"))
        self.queue = Queue(site.folders.runs, 1, one_device(), folder)
        self.live = Live(lambda name: self.states.get(name, "stopped"), LOOK)
        app = FastAPI()
        app.include_router(routes.router(site, self.live, self.queue))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, ws="websockets-sansio", log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    def __enter__(self) -> Served:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive() and not self.live._watched

    def socket(self, path: str, **query: int) -> Any:
        return connect(f"ws://127.0.0.1:{self.port}{path}?{urlencode(query)}", max_size=1 << 24)

    def run(self, name: str) -> Path:
        folder = self.runs / name
        folder.mkdir(parents=True)
        return folder / "metrics.jsonl"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("live")
    (folder / "runs").mkdir()
    with Served(folder) as one:
        yield one


def until(true: Callable[[], Any], why: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, why
        time.sleep(0.01)


def messages(socket: Any, seconds: float = 0.4) -> list[dict[str, Any]]:
    """All that comes until nothing has come for so long."""
    found = []
    with contextlib.suppress(TimeoutError):
        while True:
            found.append(json.loads(socket.recv(timeout=seconds)))
    return found


def rows(found: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for message in found for row in message.get("rows", [])]


def write(path: Path, *steps: int) -> None:
    writer = JsonlWriter(path)
    for step in steps:
        writer.write(step, {"x": 0.5})
    writer.close()


class Reader(threading.Thread):
    """A client that goes away at random moments and comes back with the last offset that it saw."""

    def __init__(self, served: Served, name: str, seed: int):
        super().__init__()
        self._served, self._name, self._draw = served, name, random.Random(seed)
        self.rows: list[dict[str, Any]] = []
        self.kinds: set[str] = set()
        self.at, self.ends, self.connections = 0, threading.Event(), 0

    def run(self) -> None:
        while not self.ends.is_set():
            self.connections += 1
            with (
                contextlib.suppress(ConnectionClosed),
                self._served.socket(f"/ws/runs/{self._name}", at=self.at) as one,
            ):
                stays = time.monotonic() + self._draw.random() * 0.4
                while time.monotonic() < stays:
                    with contextlib.suppress(TimeoutError):
                        message = json.loads(one.recv(timeout=0.1))
                        self.kinds.add(message["kind"])
                        self.rows += message.get("rows", [])
                        self.at = message.get("at", self.at)


@pytest.mark.parametrize("clients", [3])
def test_readers_that_come_and_go_see_each_row_of_a_writer_that_is_killed_once(served: Served, clients: int) -> None:
    path = served.run("killed")
    readers = [Reader(served, "killed", seed) for seed in range(clients)]
    for one in readers:
        one.start()
    draw, step = random.Random(5), 0
    for session in range(4):
        words = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(session), str(step)]
        with subprocess.Popen(words, env=one_device(), stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline()
            time.sleep(0.05 + draw.random() * 0.1)
            writer.kill()
        # What a death amid a write leaves, and the next writer cuts off.
        whole = path.read_bytes().rpartition(b"\n")[0] + b"\n"
        step = json.loads(whole.splitlines()[-1])["step"] - 10  # after a resume some steps are written again
        with path.open("r+b") as handle:
            handle.truncate(len(whole))
            handle.seek(len(whole))
            handle.write(b'{"step": 99999, "train/f')
        time.sleep(0.1)
    JsonlWriter(path).close()
    wanted = [json.loads(line) for line in path.read_bytes().splitlines()]
    size = path.stat().st_size
    until(lambda: all(one.at == size for one in readers), "a reader does not catch up")
    for one in readers:
        one.ends.set()
        one.join()
        assert one.rows == wanted
        assert one.connections > 2 and one.kinds == {"state", "rows"}
    assert len(wanted) > 1000


def test_a_step_an_offset_a_torn_line_and_a_new_file(served: Served) -> None:
    path = served.run("one")
    write(path, 1, 2, 3, 2, 3, 4)
    at = len(path.read_bytes().splitlines()[0]) + 1
    with served.socket("/ws/runs/one", step=3) as one:
        assert rows(messages(one)) == [4], "behind the last row of step 3 in the file"
    with served.socket("/ws/runs/one", step=77) as one:
        assert rows(messages(one)) == [1, 2, 3, 2, 3, 4], "which was not written yet"
    with served.socket("/ws/runs/one", at=at) as one:
        found = messages(one)
        assert rows(found) == [2, 3, 2, 3, 4]
        assert max(message.get("at", 0) for message in found) == path.stat().st_size
        with path.open("ab") as handle:
            handle.write(b'{"step": 5, ')
            handle.flush()
            assert not messages(one)
            handle.write(b'"x": NaN}\nno row\n[1]\n{"step": 6}\n')
        found = messages(one)
        assert [row for message in found for row in message["rows"]] == [{"step": 5, "x": None}, {"step": 6}]
        path.unlink()
        write(path, 1)
        found = messages(one)
        assert [message["kind"] for message in found] == ["reset", "rows"] and rows(found) == [1]
    with served.socket("/ws/runs/one", at=10_000) as one:
        found = messages(one)
        assert [m["kind"] for m in found if m["kind"] != "state"] == ["reset", "rows"] and rows(found) == [1]
    with served.socket("/ws/runs/one", at=5) as one:
        found = messages(one)
        assert [m["kind"] for m in found if m["kind"] != "state"] == ["reset", "rows"], "no line ends at byte 5"


def test_a_run_that_has_no_rows_yet_and_its_states(served: Served) -> None:
    path = served.run("waits")
    served.states["waits"] = "waiting"
    with served.socket("/ws/runs/waits") as one, served.socket("/ws/runs/waits") as other:
        assert messages(one) == [{"kind": "state", "state": "waiting"}] == messages(other)
        served.states["waits"] = "running"
        write(path, 1)
        found = messages(one)
        assert {"kind": "state", "state": "running"} in found and rows(found) == [1]
        assert len(served.live._watched) == 1, "one task looks for both"
    until(lambda: not served.live._watched, "nobody looks any more")


def test_a_slow_reader_is_let_go_and_costs_the_others_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SEND_SECONDS", 0.5)
    path = served.run("slow")
    line = json.dumps({"step": 1, "text": "a" * 1000}) + "\n"
    path.write_text(line * 30_000)
    slow = socket.create_connection(("127.0.0.1", served.port))
    with slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(
            b"GET /ws/runs/slow HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        until(lambda: served.live._watched, "it is not followed")
        with served.socket("/ws/runs/slow") as other:
            started = time.monotonic()
            assert len(rows(messages(other, 1))) == 30_000
            assert time.monotonic() - started < 15
        until(lambda: not served.live._watched, "the slow one is still followed", 15)


def test_sockets_of_what_is_not_there_say_so(served: Served) -> None:
    for path in ("/ws/runs/nowhere", "/ws/runs/..%2f..%2fetc", "/ws/jobs/none", "/ws/jobs/..%2fx"):
        with pytest.raises(Exception) as caught, served.socket(path) as one:
            one.recv(timeout=10)
        text = str(caught.value)
        assert "1008" in text or "403" in text or "404" in text, (path, text)


def test_a_job_s_log_and_rows_until_it_has_ended(served: Served) -> None:
    job = served.queue.write(served.queue.folder / new_id(), "train", "of-job", chain([["--version"]]))
    write(served.run("of-job"), 1, 2)
    with served.socket(f"/ws/jobs/{job.path.name}") as one:
        found = messages(one)
        assert found[0]["job"]["state"] == "queued" and rows(found) == [1, 2]
        served.queue.turn()
        found += _until_closed(one)
    states = [message["job"]["state"] for message in found if message["kind"] == "job"]
    assert states[0] == "queued" and states[-1] == "done"
    log = "".join(message["text"] for message in found if message["kind"] == "log")
    assert log == (job.path / "log.txt").read_text() and "saejax 0" in log
    assert found[-1]["kind"] == "job", "the end comes last"
    at = max(message.get("log", 0) for message in found)
    with served.socket(
        f"/ws/jobs/{job.path.name}", log=at - 5, at=(served.runs / "of-job/metrics.jsonl").stat().st_size
    ) as one:
        again = _until_closed(one)
    assert [message["kind"] for message in again] == ["log", "job"] and again[0]["text"] == log[-5:]


def _until_closed(one: Any) -> list[dict[str, Any]]:
    found = [json.loads(raw) for raw in one]
    assert one.close_code == 1000
    return found


# --- the file alone -----------------------------------------------------------------------------------------------


def test_pieces_are_bounded_and_long_lines_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_of, "PIECE", 100)
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "x": "a" * (i * 7 % 60)}) for i in range(200)]
    lines[50] = json.dumps({"step": 50, "x": "b" * 1000})
    path.write_text("\n".join(lines) + "\n" + '{"step": 200, "x": "' + "c" * 500)
    cursor, found, more = Cursor(path), [], True
    while more:
        at = cursor.at
        some, more, reset = cursor.next()
        assert not reset and (cursor.at - at <= 100 or not some)
        found += [row["step"] for row in some]
    assert found == [*range(50), *range(51, 200)]
    assert cursor.at == path.stat().st_size - len('{"step": 200, "x": "') - 500
    assert behind_step(path, 199) == cursor.at and behind_step(path, 200) == 0
    with path.open("a") as handle:
        handle.write('"}\n{"step": 201}\n')
    while not found or found[-1] != 201:
        found += [row["step"] for row in cursor.next()[0]]


def test_a_look_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saejax.serve.live._AFTER_MISTAKE", 0.01)
    calls = []

    def state_of(name: str) -> str:
        calls.append(name)
        if len(calls) < 3:
            raise OSError("stale handle") if len(calls) == 1 else ValueError("a mistake")
        return "running"

    async def first() -> dict[str, Any]:
        live = Live(state_of, 0.01)
        async with contextlib.aclosing(live.run("x", tmp_path)) as found:
            return await asyncio.wait_for(anext(found), 10)

    assert asyncio.run(first()) == {"kind": "state", "state": "running"}
