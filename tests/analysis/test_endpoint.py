"""The client of OpenAI-compatible endpoints against a local stand-in: honest, busy, broken and hostile."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tiny.endpoint import StandIn, completion, reply, stand_in

from saejax.analysis.endpoint import Endpoint, EndpointError, EndpointRefusal
from saejax.core.errors import ConfigError

KEY = "sk-secret-0123456789"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("no_proxy", "*")
    with stand_in(lambda messages: "fine") as running:
        yield running


def ask(server: StandIn, url: str = "", **how: Any) -> str:
    return Endpoint(url or server.url, "m", KEY, **{"wait": 0.01, "timeout": 5.0} | how)(HELLO)


def refused(server: StandIn, **how: Any) -> str:
    """The one-line message of the error; the key is not in it."""
    with pytest.raises(EndpointError) as caught:
        ask(server, **how)
    text = str(caught.value)
    assert KEY not in text and len(text) < 400 and text.isprintable()
    assert caught.value.__cause__ is None
    return text


def once(code: int, body: bytes = b"{}", **headers: str) -> Callable[[Any, Any], bool]:
    """Answers the first request so."""
    left = [True]

    def before(handler: Any, _: Any) -> bool:
        if left:
            left.clear()
            reply(handler, body, code, **headers)
            return True
        return False

    return before


def always(code: int, body: bytes = b"{}", **headers: str) -> Callable[[Any, Any], bool]:
    return lambda handler, _: reply(handler, body, code, **headers) is None


def test_a_request_says_what_the_interface_asks_for_and_usage_is_counted(server: StandIn) -> None:
    endpoint = Endpoint(server.url, "m", KEY, max_tokens=77)
    assert endpoint(HELLO) == endpoint(HELLO) == "fine"
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == f"Bearer {KEY}"
    assert body == {"model": "m", "messages": HELLO, "max_tokens": 77, "temperature": 0}
    assert vars(endpoint.usage) == {"requests": 2, "prompt_tokens": 200, "completion_tokens": 14}
    assert Endpoint(f"{server.url}/chat/completions/", "m")(HELLO) == "fine"
    assert "Authorization" not in server.requests[-1][1]


@pytest.mark.parametrize("code", [429, 500, 503, 529])
def test_a_busy_endpoint_is_asked_again(server: StandIn, code: int) -> None:
    server.before = once(code)
    assert ask(server) == "fine" and len(server.requests) == 2
    server.before = always(code, b'{"error": {"message": "come later"}}')
    said = refused(server, retries=2)
    assert f"answered with {code}: come later (3 attempts)" in said and len(server.requests) == 5


def test_retry_after_is_heeded_and_a_stop_ends_the_waiting(server: StandIn) -> None:
    server.before = once(429, Retry_After="0.5")
    started = time.monotonic()
    assert ask(server) == "fine" and time.monotonic() - started >= 0.5
    server.before = always(429, Retry_After="1e9")
    endpoint = Endpoint(server.url, "m", retries=1)
    threading.Timer(0.2, endpoint.stopped.set).start()
    started = time.monotonic()
    with pytest.raises(EndpointError):
        endpoint(HELLO)
    assert time.monotonic() - started < 5


def test_a_model_that_wants_other_names_is_asked_by_them(server: StandIn) -> None:
    def picky(handler: Any, body: Any) -> bool:
        wrong = "max_tokens" in body or "temperature" in body
        if wrong:
            use = "Use 'max_completion_tokens'." if "max_tokens" in body else "temperature is not supported."
            reply(handler, json.dumps({"error": {"message": use}}).encode(), 400)
        return wrong

    server.before = picky
    endpoint = Endpoint(server.url, "m")
    assert endpoint(HELLO) == endpoint(HELLO) == "fine"
    assert [sorted(body.keys() - {"model", "messages"}) for _, _, body in server.requests] == [
        ["max_tokens", "temperature"],
        ["max_completion_tokens", "temperature"],
        ["max_completion_tokens"],
        ["max_completion_tokens"],
    ]


@pytest.mark.parametrize("code", [401, 403, 404])
def test_what_every_request_would_get_is_a_refusal_and_not_tried_again(server: StandIn, code: int) -> None:
    server.before = always(code, json.dumps({"error": {"message": f"bad key {KEY}\x1b[2J\nbye"}}).encode())
    with pytest.raises(EndpointRefusal, match=rf"{code}: bad key \[key\]\[2J bye"):
        ask(server)
    assert len(server.requests) == 1


BROKEN = {
    "html": (b"<html><body>Welcome</body></html>", "not JSON: '<html><body>Welcome"),
    "nothing": (b"", "not JSON"),
    "binary": (b"\xff\xfe\x00", "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "a list": (b"[]", "without choices"),
    "no choices": (b'{"choices": []}', "without choices"),
    "choices of another type": (b'{"choices": {"0": 1}}', "without choices"),
    "no message": (b'{"choices": [{"message": null}]}', "without choices"),
    "a number": (completion(7), "a content that is a int"),
    "null": (completion(None), "an empty text"),
    "white space": (completion(" \n "), "an empty text"),
    "cut off": (b'{"choices": [{"message": {"content": ""}, "finish_reason": "length"}]}', "allow more"),
    "10 MB": (completion("x" * 10_000_000), "more than 4,194,304 bytes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_answer_is_one_clear_line(server: StandIn, name: str) -> None:
    body, said = BROKEN[name]
    server.before = always(200, body)
    assert said in refused(server)


@pytest.mark.parametrize(
    "usage", [None, [], {"prompt_tokens": "many"}, {"prompt_tokens": -5}, {"prompt_tokens": 10**30}]
)
def test_an_odd_usage_counts_nothing(server: StandIn, usage: Any) -> None:
    server.before = always(200, json.dumps(json.loads(completion("fine")) | {"usage": usage}).encode())
    endpoint = Endpoint(server.url, "m")
    assert endpoint(HELLO) == "fine" and endpoint.usage.prompt_tokens == 0


def test_an_endless_body_is_left(server: StandIn) -> None:
    def endless(piece: bytes, pause: float) -> Callable[[Any, Any], bool]:
        def before(handler: Any, _: Any) -> bool:
            handler.send_response(200)
            handler.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    handler.wfile.write(piece)
                    handler.wfile.flush()
                    time.sleep(pause)
            return True

        return before

    server.before = endless(b" " * 65536, 0.0)
    assert "more than 4,194,304 bytes" in refused(server)
    server.before = endless(b" ", 0.05)
    started = time.monotonic()
    assert "did not end its answer within 0.4 s" in refused(server, timeout=0.4, retries=0)
    assert time.monotonic() - started < 5


def test_a_silent_a_broken_off_and_an_absent_server(server: StandIn) -> None:
    server.before = lambda handler, _: time.sleep(1.0) is None
    assert "did not answer within 0.3 s" in refused(server, timeout=0.3, retries=0)
    server.before = lambda handler, _: reply(handler, b'{"choi', Content_Length="500") is None
    assert "broke off" in refused(server, retries=0)
    started = time.monotonic()
    with pytest.raises(EndpointRefusal, match=r"cannot be reached: .*refused"):
        Endpoint("http://127.0.0.1:9/v1", "m")(HELLO)
    assert time.monotonic() - started < 5, "an address that never answered is not tried again"


def test_a_redirect_is_not_followed_and_the_key_stays(server: StandIn) -> None:
    with stand_in(lambda messages: "stolen") as other:
        for code in (301, 302, 303, 307, 308):
            server.before = always(code, b"", Location=f"{other.url}/chat/completions")
            assert "redirects to another address" in refused(server)
        assert other.requests == []


def test_a_server_that_sends_the_key_back_does_not_get_it_written(server: StandIn) -> None:
    server.answer = lambda messages: f"Explanation: {KEY}"
    assert ask(server) == "Explanation: [key]"
    server.before = always(200, completion("?").replace(b'"?"', b'"\\u0073k-secret-0123456789"'))
    assert ask(server) == "[key]"
    server.before = always(500, KEY.encode())
    assert "[key]" in refused(server, retries=0)


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8000", "ftp://a/v1", "file:///etc/passwd", "http://", "http://a:b/v1", "http://a/v1\nX: y",
     "http://user:pass@a/v1", "https://a/v1?api-key=s", "https://a/v1#s"],
)  # fmt: skip
def test_addresses_that_cannot_be_used_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url") as caught:
        Endpoint(url, "m")
    assert "pass" not in str(caught.value).replace("a password", "")


def test_a_key_with_a_line_break_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Endpoint("http://a/v1", "m", "sk-x\r\nHost: evil")
    assert "sk-x" not in str(caught.value)
