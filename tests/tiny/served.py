"""A real `saejax serve` in a process of its own, beside a small finished run which all test processes share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saejax.app.stages import run_pipeline
from saejax.app.workspace import Workspace
from saejax.core.errors import BusyError
from saejax.core.lease import lease
from tiny import one_device, tiny_experiment

RUN = "tiny"


@dataclasses.dataclass
class Served:
    """A server that answers, and the folder it was started in (runs/ and stores/ below it)."""

    url: str
    folder: Path
    process: subprocess.Popen[str]

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def ask(self, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, Any]:
        """(status, the JSON or text of the answer)."""
        data = None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if data is not None else {}
        request = urllib.request.Request(
            self.url.rstrip("/") + path, data, given | headers, method=method or ("GET" if data is None else "POST")
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _content(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _content(error)

    def get(self, path: str) -> Any:
        """The JSON of an address that answers."""
        status, content = self.ask(path)
        assert status == 200, (path, status, content)
        return content


def _content(answer: Any) -> Any:
    raw = answer.read()
    is_json = "json" in (answer.headers.get("Content-Type") or "")
    return json.loads(raw) if is_json and raw else raw.decode(errors="replace")


def finished_run(factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/tiny, evaluated and with its report, and its stores. Made once; nobody writes into it."""
    base = factory.getbasetemp()
    # Of several workers each has a folder below the session's.
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "finished-run"
    for _ in range(1200):
        try:
            with lease(shared):
                if not (shared / "done").is_file():
                    run_pipeline(Workspace(dataclasses.replace(tiny_experiment(shared), name=RUN)))
                    (shared / "done").touch()
                return shared
        except BusyError:
            time.sleep(0.25)
    raise TimeoutError("another worker did not finish the run")


def copied(factory: pytest.TempPathFactory, name: str = "served") -> Path:
    """A copy of the finished run's folder to write into."""
    folder = factory.mktemp(name)
    made = finished_run(factory)
    for part in ("runs", "stores"):
        shutil.copytree(made / part, folder / part)
    for name in ("config.json", "provenance.json"):
        path = folder / "runs" / RUN / name
        path.write_text(path.read_text().replace(str(made), str(folder)))
    return folder


@contextlib.contextmanager
def served(folder: Path, *flags: str, **environment: str) -> Iterator[Served]:
    """The server of a folder, on a free port; it is told to end at the end of the block, and must."""
    command = [sys.executable, "-m", "saejax", "serve", f"--port={_free_port()}", *flags]
    with (folder / "serve.log").open("a") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=one_device() | environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, (line, (folder / "serve.log").read_text())
        yield _answering(Served(found[0], folder, process))
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _answering(served: Served) -> Served:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            status, _ = served.ask("/api/health")
            if status in (200, 401):
                return served
        assert served.process.poll() is None and time.monotonic() < deadline, "the server does not answer"
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
