"""An S3 server on loopback with a proxy in front of it that counts requests and fails as it is told to."""

import collections
import contextlib
import dataclasses
import http.client
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
KEY = "AKIDEXAMPLE"
NEEDED = "moto[s3] and flask (pip install -e '.[s3]') give the local S3 server"

# It ends with its standard input, so it never outlives the process that started it.
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler
WSGIRequestHandler.disable_nagle_algorithm = True
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_LONGEST_SILENCE = 300.0


@dataclasses.dataclass(frozen=True)
class Request:
    """What a client asked: `path` as in /bucket/key, `kind` as GET chunk, bytes each way."""

    method: str
    path: str
    sent: int
    received: int = 0

    @property
    def kind(self) -> str:
        """Method and sort of object: chunk (data of an array), metadata, lock or list."""
        plain, _, query = self.path.partition("?")
        if "list-type" in query:
            return f"{self.method} list"
        if re.search(r"/c/\d", plain):
            return f"{self.method} chunk"
        return f"{self.method} {'lock' if '/.lock' in plain else 'metadata'}"


@dataclasses.dataclass
class Answer:
    """How a request is met: forwarded after `wait` seconds unless refused, and answered unless `lost`."""

    wait: float = 0.0
    lost: bool = False
    silent: bool = False
    refused: tuple[int, str, str] | None = None
    change: Callable[[bytes], bytes] = lambda body: body


class ObjectStore:
    """A running server with one bucket.

    Attributes:
        endpoint: of the proxy.
        direct: of the server behind it, which never fails.
        rule: decides how each request is met.
        requests: all that were answered.
    """

    def __init__(self, direct: str) -> None:
        self.direct, self.endpoint = direct, ""
        self.rule: Callable[[Request], Answer] = lambda request: Answer()
        self.requests: list[Request] = []

    @property
    def environment(self) -> dict[str, str]:
        """What a user sets to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
        }

    def clear(self) -> None:
        """Forget requests and faults."""
        self.requests, self.rule = [], lambda request: Answer()

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """Kind of request -> how many, bytes sent, bytes received."""
        found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
        for request in list(self.requests):
            for i, value in enumerate((1, request.sent, request.received)):
                found[request.kind][i] += value
        return {kind: (n, sent, received) for kind, (n, sent, received) in sorted(found.items())}

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """A request to the server itself: (status, headers, body)."""
        connection = http.client.HTTPConnection(self.direct.removeprefix("http://"), timeout=30)
        with contextlib.closing(connection):
            scope = f"{KEY}/20260101/us-east-1/s3/aws4_request"
            connection.request(method, path, body, {"Authorization": f"AWS4-HMAC-SHA256 Credential={scope}"})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def contents(self, prefix: str) -> dict[str, bytes]:
        """Every object below a prefix but leases: name -> bytes."""
        listed = self.ask("GET", f"/{BUCKET}?list-type=2&max-keys=1000&prefix={prefix}/")[2].decode()
        keys = re.findall(r"<Key>([^<]+)</Key>", listed)
        names = {key: key.removeprefix(f"{prefix}/") for key in keys if "/.lock" not in key}
        return {name: self.ask("GET", f"/{BUCKET}/{key}")[2] for key, name in names.items()}


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """The server and its proxy, for the duration of the block."""
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, **quiet) as server:  # type: ignore
        try:
            # It was opened with a pipe.
            store = ObjectStore(f"http://127.0.0.1:{int(server.stdout.readline())}")  # type: ignore[union-attr]
            assert store.ask("PUT", f"/{BUCKET}")[0] == 200
            with _proxy(store):
                yield store
        finally:
            server.kill()


@contextlib.contextmanager
def reached(store: ObjectStore) -> Iterator[None]:
    """Its environment in this process, for the duration of the block."""
    before = {name: os.environ.get(name) for name in store.environment}
    os.environ.update(store.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _proxy(store: ObjectStore) -> Iterator[None]:
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body are two writes: the second would wait 40 ms for the other side's word about the first.
        disable_nagle_algorithm = True

        def _meet(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, len(body))
            answer = store.rule(request)
            if f"Credential={KEY}/" not in self.headers.get("Authorization", f"Credential={KEY}/"):
                what = "The AWS Access Key Id you provided does not exist in our records."
                answer = Answer(refused=(403, "InvalidAccessKeyId", what))
            if answer.silent:
                ended.wait(_LONGEST_SILENCE)
                self.close_connection = True
                return
            ended.wait(answer.wait)
            if answer.refused:
                status, code, message = answer.refused
                text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
                found = {"Content-Type": "application/xml"}
            else:
                status, found, text = self._forward(body)
                text = answer.change(text)
            if answer.lost:
                self.close_connection = True
                return
            store.requests.append(dataclasses.replace(request, received=len(text)))
            self.send_response(status)
            for name, value in found.items():
                if name.lower() not in ("content-length", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header(
                "Content-Length", found.get("Content-Length", "0") if self.command == "HEAD" else len(text)
            )
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(text)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _meet

        def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            # A connection of its own for each request: the server's own limits play no part.
            to = http.client.HTTPConnection(store.direct.removeprefix("http://"), timeout=60)
            with contextlib.closing(to):
                headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
                to.request(self.command, self.path, body, headers)
                answer = to.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: Any) -> None:
            """A client that left is no news."""

    with Server(("127.0.0.1", 0), Handler) as running:
        store.endpoint = f"http://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            running.shutdown()
            thread.join()
