"""The hub, when it is not there: closed ports, servers that say nothing, half of an answer; and what is cached."""

import itertools
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from benchmarks.faults.hub import Answer, closed_port, server, silence
from saejax.core import hub
from saejax.core.errors import DataError
from saejax.lm import load_lm
from saejax.text import TextConfig, open_source

DEMO = Path(hub.__file__).parents[1] / "lm" / "demo"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def http(body: Any, status: str = "200 OK") -> bytes:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def trickle(connection: socket.socket, path: str) -> None:
    """Never silent for long, never done."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    for _ in range(600):
        time.sleep(0.1)
        connection.sendall(b"X-A: b\r\n")


def says(*answers: bytes) -> Answer:
    return lambda connection, path: [connection.sendall(answer) for answer in answers]


def known_then_silent(connection: socket.socket, path: str) -> None:
    """The repository is there, its files never come."""
    if "/tree/" in path:
        silence(connection, path)
    connection.sendall(http({"id": "o/n", "sha": COMMIT, "siblings": []}))


ENDPOINTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a closed port": (closed_port, "ConnectError"),
    "silence": (lambda: server(silence), "ReadTimeout"),
    "a byte now and then": (lambda: server(trickle), "TimeoutError: no answer within 2 s"),
    "the line cut": (lambda: server(says()), "RemoteProtocolError"),
    "no HTTP": (lambda: server(says(b"220 mail ready\r\n")), "RemoteProtocolError"),
    "no JSON": (lambda: server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")), "JSONDecodeError"),
    "no such repository": (
        lambda: server(says(http({"error": "?"}, "401 Unauthorized\r\nX-Error-Code: RepoNotFound"))),
        "RepositoryNotFoundError: 401",
    ),
    "a sick server": (lambda: server(says(http({}, "503 Service Unavailable"))), "HfHubHTTPError.*503"),
}


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Point the library at an endpoint, with an empty cache and short patience; conftest.py holds it offline."""
    close_session()
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.6)
    monkeypatch.setattr(hub, "DEADLINE_SECONDS", 2.0)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def at(endpoint: str) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)

    yield at
    close_session()


@pytest.mark.parametrize("kind", ENDPOINTS)
def test_a_model_that_cannot_be_had_is_named_with_a_remedy(kind: str, online: Callable[[str], None]) -> None:
    endpoint, reason = ENDPOINTS[kind]
    with endpoint() as url:
        online(url)
        started = time.monotonic()
        with pytest.raises(DataError, match=rf"model 'o/n' cannot be had .*{reason}.*not cached.* lm\.model"):
            load_lm("o/n")
        assert time.monotonic() - started < 5


def test_a_hub_that_falls_silent_after_its_first_answer_is_noticed(
    online: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the library's own tries
    with server(known_then_silent) as url:
        online(url)
        with pytest.raises(DataError, match=r"model 'o/n' cannot be had .*lm\.model"):
            load_lm("o/n")


@pytest.mark.parametrize("kind", ["a closed port", "silence"])
def test_a_dataset_that_cannot_be_had_is_named_with_a_remedy(
    kind: str, online: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", object())  # it is not even asked
    endpoint, reason = ENDPOINTS[kind]
    with endpoint() as url:
        online(url)
        with pytest.raises(DataError, match=rf"dataset 'o/d' cannot be had .*{reason}.*text\.source='files'"):
            open_source(TextConfig(source="hub", dataset="o/d"))


def cached_model(cache: Path, without: str = "") -> None:
    """The library's own layout of a whole repository: blobs, a commit's folder of links to them, and the branch."""
    root = cache / "models--o--n"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "snapshots" / COMMIT / ".gitattributes").touch()
    for number, name in enumerate(("config.json", "tokenizer.json", "model.safetensors")):
        if name != without:
            shutil.copy(DEMO / name, root / "blobs" / str(number))
            (root / "snapshots" / COMMIT / name).symlink_to(Path("../../blobs") / str(number))


@pytest.mark.parametrize("how", ["offline", "a closed port", "silence"])
def test_a_cached_model_is_read_without_the_hub(how: str, tmp_path: Path, online: Callable[[str], None]) -> None:
    cached_model(tmp_path / "cache")
    endpoint = closed_port if how == "offline" else ENDPOINTS[how][0]
    with endpoint() as url:
        if how != "offline":
            online(url)
        started = time.monotonic()
        lm = load_lm("o/n")
        assert time.monotonic() - started < 10
    assert lm.identity["model"] == "o/n"
    assert lm.identity["weights_sha256"] == load_lm("demo").identity["weights_sha256"]
    assert np.isfinite(np.asarray(lm.params["W_E"])).all()


@pytest.mark.parametrize("without", ["tokenizer.json", "model.safetensors"])
def test_half_a_cached_model_asks_the_hub_and_says_so(
    without: str, tmp_path: Path, online: Callable[[str], None]
) -> None:
    cached_model(tmp_path / "cache", without)
    with closed_port() as url:
        online(url)
        with pytest.raises(DataError, match=r"model 'o/n' cannot be had .*ConnectError"):
            load_lm("o/n")


def test_a_dataset_that_breaks_off_is_named_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def skip(self, n: int) -> Iterator[dict[str, str]]:
            yield from ({"text": f"text {i}"} for i in range(n, 5))
            raise ConnectionError("the line went dead")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: Broken()))
    rows = open_source(TextConfig(source="hub", dataset="o/d")).rows(2)
    assert [text for *_, text in itertools.islice(rows, 3)] == ["text 2", "text 3", "text 4"]
    with pytest.raises(DataError, match=r"'o/d:5' cannot be had .*line went dead.*same command continues"):
        next(rows)
