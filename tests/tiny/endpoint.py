"""A stand-in for an OpenAI-compatible endpoint: a local server that plays explainer and judge by the prompts alone."""

import collections
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MARKED = re.compile(r"<<(.*?)>>", re.DOTALL)


class StandIn:
    """Answers POST {url}/chat/completions.

    Attributes:
        url: to give to a client; ends with /v1.
        requests: (path, headers, body) of everything that was asked.
        before: called with the handler and the body; True if it has answered itself.
    """

    def __init__(self, answer: Callable[[list[dict[str, str]]], str]):
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.before: Callable[[Any, Any], bool] = lambda handler, body: False
        self.url = ""

    @property
    def asked(self) -> list[str]:
        """What each request says besides the task."""
        return [material(body["messages"]) for _, _, body in self.requests]


@contextlib.contextmanager
def stand_in(answer: Callable[[list[dict[str, str]]], str] | None = None) -> Iterator[StandIn]:
    """A running server; without `answer` it plays honestly (`play`)."""
    server = StandIn(answer or play)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append((self.path, dict(self.headers), body))
            with contextlib.suppress(ConnectionError):
                if not server.before(self, body):
                    reply(self, completion(server.answer(body["messages"])))

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that left is no news."""

    with Server(("127.0.0.1", 0), Handler) as running:
        server.url = f"http://127.0.0.1:{running.server_address[1]}/v1"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            running.shutdown()
            thread.join()


def material(messages: list[dict[str, str]]) -> str:
    """What stands below the task."""
    (message,) = messages
    return message["content"].partition("\n\n---\n\n")[2]


def completion(text: Any) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": 7}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def reply(handler: BaseHTTPRequestHandler, body: bytes, code: int = 200, **headers: str) -> None:
    handler.send_response(code)
    usual = {"Content_Type": "application/json", "Content_Length": str(len(body))}
    for name, value in (usual | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def play(messages: list[dict[str, str]]) -> str:
    """Explains by the commonest marked text; judges a passage by whether it, or its marked part, holds that text."""
    content = material(messages)
    if not content.startswith("Explanation: "):
        ((commonest, _),) = collections.Counter(MARKED.findall(content)).most_common(1)
        return f"They share a token.\nExplanation: the token {json.dumps(commonest)}"
    explanation, _, rest = content.removeprefix("Explanation: ").partition("\n\n")
    wanted = json.loads(explanation.removeprefix("the token "))
    passages = re.split(r"^Passage \d+: ", rest.removesuffix("\n\nAnswer:"), flags=re.MULTILINE)[1:]
    marked = [MARKED.findall(passage) for passage in passages]
    fits = [
        all(wanted in part for part in parts) if parts else wanted in p
        for p, parts in zip(passages, marked, strict=True)
    ]
    return json.dumps([int(fit) for fit in fits])
