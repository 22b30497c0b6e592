"""Who may ask the server, and what it does not let happen: each attack that docs/serve.md names, on a real process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tiny.served import RUN, Served, copied, served
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from saejax.serve.guard import Guard


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = copied(tmp_path_factory, "guarded")
    secret = folder / "secret"
    secret.mkdir()
    (secret / "config.json").write_text(json.dumps({"name": "stolen"}))
    (secret / "page.html").write_text("stolen")
    (folder / "runs" / "link").symlink_to(secret)
    (folder / "runs" / RUN / "out.html").symlink_to(secret / "page.html")
    with served(folder) as one:
        yield one


@pytest.fixture(scope="module")
def asks_for_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    folder = tmp_path_factory.mktemp("token")
    with served(folder, "--token") as one:
        address, _, token = one.url.partition("?token=")
        one.url = address
        yield one, token


def raw(server: Served, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """One request exactly as written: no client puts the path in order."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body or method in ("POST", "PUT"):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/../secret",
        "/api/runs/%2e%2e/secret",
        "/api/runs/tiny/..%2f..%2fsecret",
        "/api/runs/..%5csecret",
        "/api/runs//etc/passwd",
        "/api/runs/link",
        "/api/runs/.serve",
        "/api/runs/tiny%00",
        "/api/stores/../runs/tiny",
        "/files/tiny/out.html",
        "/files/link/page.html",
        "/files/tiny/config.json",
        "/files/../secret/page.html",
        "/static/../../pyproject.toml",
        "/static/..%2fserver.py",
    ],
)
def test_no_path_leads_outside(server: Served, path: str) -> None:
    status, body, _ = raw(server, "GET", path)
    assert status == 404, (status, body[:200])
    assert b"stolen" not in body


def test_a_rebound_name_is_refused(server: Served) -> None:
    """A page of evil.example, whose name was made to point here, reaches the server under that name."""
    port = urlsplit(server.url).port
    for host in (f"evil.example:{port}", "evil.example", "localhost.evil.example", "", "[", "192.168.0.7"):
        status, body, _ = raw(server, "GET", "/api/runs", Host=host)
        assert status == 421 or (not host and status == 400), (host, status, body)
    for host in (f"localhost:{port}", "127.0.0.1:9999", f"[::1]:{port}"):  # the port of an SSH tunnel is another
        assert raw(server, "GET", "/api/runs", Host=host)[0] == 200, host


def test_other_sites_can_neither_write_nor_read(server: Served) -> None:
    job = json.dumps({"command": "train", "experiment": "quickstart"}).encode()
    as_json = {"Content_Type": "application/json"}
    for headers in (
        as_json | {"Origin": "http://evil.example"},
        as_json | {"Origin": "null"},
        as_json | {"Origin": "http://127.0.0.1:1"},
        as_json | {"Sec_Fetch_Site": "cross-site"},
        as_json | {"Sec_Fetch_Site": "same-site"},
    ):
        assert raw(server, "POST", "/api/jobs", job, **headers)[0] == 403, headers
    # What a form of another site can send without asking first.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert raw(server, "POST", "/api/jobs", job, Content_Type=kind)[0] == 415, kind
    assert raw(server, "GET", "/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    assert "access-control-allow-origin" not in raw(server, "GET", "/api/runs", Origin="http://evil.example")[2]
    assert server.get("/api/jobs") == {"jobs": []}
    with pytest.raises(WebSocketException), _socket(server, f"/ws/runs/{RUN}", origin="http://evil.example") as one:
        one.recv(timeout=10)


HEADERS = ("host", "origin", "cookie", "authorization", "sec-fetch-site", "content-length", "content-type")
ODD = (
    *(
        "",
        "[",
        "http://[",
        "http://[::1",
        "http://a]b",
        "//",
        ":",
        "null",
        "\u00b2",
        "\u00e9" * 9,
        "a" * 9000,
        "%",
        "\x00",
    ),
    *("\x00", "saejax_token=\x7f", "=;=", 'a="', "Bearer \u00ff", "-1", "1e9", "9" * 9000, "http://127.0.0.1:99999999"),
)


def through(guard: Guard, kind: dict[str, str], headers: dict[str, str], query: str = "") -> list[Any]:
    """What the guard answers for an application that always answers 200."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {**kind, "path": "/", "query_string": query.encode(), "headers": raw_headers}
    asyncio.run(guard(scope, receive, send))
    return sent


async def answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize("method", ["GET", "PUT", "websocket"])
@pytest.mark.parametrize("header", HEADERS)
def test_an_odd_header_is_refused_or_passed_over(header: str, method: str) -> None:
    """Whatever a header says, it is no mistake of the server."""
    usual = {"host": "localhost", "authorization": "Bearer t", "content-type": "application/json"}
    kind = {"type": "websocket"} if method == "websocket" else {"type": "http", "method": method}
    for odd in ODD:
        sent = through(Guard(answers, token="t"), kind, usual | {header: odd})
        assert sent and all(message.get("status", 200) < 500 for message in sent), odd


def test_two_servers_of_one_host_keep_their_visitors() -> None:
    """A browser sends the cookies of a host to all its ports: the one of another server replaces none."""
    get, host = {"type": "http", "method": "GET"}, {"host": "localhost"}
    guards = {token: Guard(answers, token=token) for token in ("one", "other")}
    jar: dict[str, str] = {}
    for token, guard in guards.items():
        welcome = dict(through(guard, get, host, f"token={token}")[0]["headers"])
        name, _, value = welcome[b"set-cookie"].decode().partition(";")[0].partition("=")
        jar[name] = value
    for token, guard in guards.items():
        assert through(guard, get, host | {"cookie": "; ".join(f"{k}={v}" for k, v in jar.items())})[0]["status"] == 200
        others = {name: value for name, value in jar.items() if value != token}
        assert (
            through(guard, get, host | {"cookie": "; ".join(f"{k}={v}" for k, v in others.items())})[0]["status"] == 401
        )


def test_the_page_may_run_its_own_scripts_alone(server: Served) -> None:
    _, _, headers = raw(server, "GET", "/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    status, _, headers = raw(server, "GET", f"/files/{RUN}/report.html")
    assert status == 200
    # A page that a run has written gets no part in this origin.
    assert headers["content-security-policy"].startswith("sandbox allow-scripts")
    assert "allow-same-origin" not in headers["content-security-policy"]


def test_long_requests_are_refused(server: Served) -> None:
    prompt = json.dumps({"dictionary": RUN, "text": "a" * 1_000_000}).encode()
    status, body, _ = raw(server, "POST", "/api/encode", prompt, Content_Type="application/json")
    assert status == 413, body
    assert raw(server, "GET", "/api/runs/" + "a" * 70_000)[0] in (400, 404, 414)
    try:
        status = raw(server, "GET", "/api/runs", X="b" * 1_000_000)[0]
    except ConnectionError:  # closed while it was still sent
        status = 400
    assert status == 400


@pytest.mark.ci
def test_slow_requests_end(server: Served) -> None:
    """A head that comes a byte a second, and a body that does not come, both lose their connection in time."""
    place = urlsplit(server.url)
    head = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n"
    body = (
        b"POST /api/encode HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    )
    slow = [socket.create_connection((place.hostname, place.port)) for _ in range(40)]
    try:
        for i, one in enumerate(slow):
            one.sendall(body if i % 2 else head)
        started = time.monotonic()
        # Others are served meanwhile.
        assert server.get("/api/health")["ok"]
        assert time.monotonic() - started < 2
        for i, one in enumerate(slow):
            one.settimeout(20 - (time.monotonic() - started))
            answer = one.recv(4096) if i % 2 else _until_closed(one)
            assert b"408" in answer if i % 2 else answer == b""
    finally:
        for one in slow:
            one.close()


def _until_closed(one: socket.socket) -> bytes:
    try:
        return one.recv(4096)
    except ConnectionResetError:
        return b""


def test_five_hundred_sockets(server: Served) -> None:
    """So many sockets as are allowed stay open, the others are refused, and requests are answered all the while."""
    with contextlib.ExitStack() as held:
        with ThreadPoolExecutor(16) as pool:
            opened = sum(pool.map(lambda _: _opened(server, held), range(500)))
        assert 1 <= opened <= 64
        started = time.monotonic()
        assert server.get("/api/health")["ok"]
        assert time.monotonic() - started < 2
    deadline = time.monotonic() + 20
    while True:
        with contextlib.ExitStack() as again:
            if _opened(server, again):
                return
        assert time.monotonic() < deadline, "no socket is free after all were closed"
        time.sleep(0.1)


def _socket(server: Served, path: str, origin: Any = None) -> Any:
    return connect(server.url.rstrip("/").replace("http", "ws", 1) + path, open_timeout=20, origin=origin)


def _opened(server: Served, held: contextlib.ExitStack) -> bool:
    try:
        held.enter_context(_socket(server, f"/ws/runs/{RUN}"))
    except (WebSocketException, OSError, TimeoutError):
        return False
    return True


def test_the_token_opens_and_nothing_else_does(asks_for_token: tuple[Served, str]) -> None:
    server, token = asks_for_token
    assert len(token) >= 32
    assert raw(server, "GET", "/api/runs")[0] == 401
    assert raw(server, "GET", "/")[0] == 401
    assert raw(server, "GET", f"/?token={token[:-1]}")[0] == 401
    assert raw(server, "GET", "/api/runs", Authorization=f"Bearer {token}x")[0] == 401
    assert raw(server, "GET", "/api/runs", Authorization=f"Bearer {token}")[0] == 200
    status, _, headers = raw(server, "GET", f"/?token={token}")
    assert status == 303 and headers["location"] == "/"
    cookie = headers["set-cookie"]
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip() for part in cookie.lower().split(";")}
    assert raw(server, "GET", "/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
    path = server.folder / "runs" / ".serve" / "token"
    assert path.read_text() == token and path.stat().st_mode & 0o077 == 0
    with pytest.raises(WebSocketException), _socket(server, f"/ws/runs/{RUN}"):
        pass


def test_one_server_a_folder(server: Served, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="being written by another process"), served(server.folder):
        pass


def test_no_job_comes_from_a_file_that_was_not_listed(server: Served, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    for name in (str(evil), "../evil", os.path.relpath(evil, server.folder), "evil", "quickstart;x"):
        status, answer = server.ask("/api/jobs", {"command": "train", "experiment": name})
        assert status in (400, 404), (name, status, answer)
    assert not (tmp_path / "ran").exists()
