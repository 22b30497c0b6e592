"""Guard: the machine's own user may ask, from the page or from a program, in requests of bounded size and time.

A server on 127.0.0.1 is reached by every page that the user's browser has open. So each request must name this server
as its host (a rebound name of another site does not), a request that changes something must come from the page itself
or from no page at all, and a body must be JSON, which no form of another site can send.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGEST_BODY = 1 << 20
BODY_SECONDS = 10.0
MOST_SOCKETS = 64
_SAFE = ("GET", "HEAD")
# Of all servers of one host, whatever their ports, a browser has one set of cookies: each token has a name of its own.
_COOKIE = "saejax_token_{}"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}


class Guard:
    """An ASGI application around another, which refuses what should not reach it.

    Args:
        app: the application.
        names: hosts by which the server may be called besides this machine's own: localhost, 127.0.0.1, [::1], and
            where it listens on other addresses any address in digits and the machine's name.
        token: what must be shown; empty where none is needed.
        everywhere: it listens on more than this machine.
    """

    def __init__(self, app: App, names: tuple[str, ...] = (), token: str = "", everywhere: bool = False):
        self._app, self._token, self._everywhere = app, token, everywhere
        machine = (socket.gethostname().lower(),) if everywhere else ()
        self._names = frozenset({"localhost", *machine, *(name.lower() for name in names)})
        self._cookie = _COOKIE.format(hashlib.sha256(token.encode()).hexdigest()[:16])
        self._sockets = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if refused := self._refused(scope, headers):
            return await _refuse(scope, receive, send, *refused)
        if scope["type"] == "websocket":
            return await self._socket(scope, receive, send)
        if self._token and (at := _with_token(scope)) is not None:
            return await self._welcome(at, scope, receive, send)
        try:
            receive = await _body(receive, headers) if scope["method"] not in _SAFE else receive
        except _TooMuch as error:
            return await _refuse(scope, receive, send, error.status, error.text)
        await self._app(scope, receive, _with_headers(send))

    def _refused(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """(status, why), or None where the request may go on."""
        host = headers.get("host", "")
        if not self._is_ours(host):
            return 421, f"This server is not called {host[:80]!r}: --names={_hostname(host)[:80]} allows it."
        changes = scope["type"] == "websocket" or scope["method"] not in _SAFE
        origin = headers.get("origin")
        if changes and origin is not None and _place_of(origin) != host.lower():
            return 403, f"A page of {origin[:80]!r} may not use this server."
        site, api = headers.get("sec-fetch-site", "none"), scope["path"].startswith(("/api", "/ws", "/files"))
        if site not in ("same-origin", "none") and (changes or api):
            return 403, "A page of another site may not use this server."
        if self._token and not self._known(scope, headers):
            return 401, "Open the link that the server printed: its token is missing or wrong here."
        return None

    def _is_ours(self, host: str) -> bool:
        name = _hostname(host)
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or self._everywhere or str(address) in self._names

    def _known(self, scope: Scope, headers: Mapping[str, str]) -> bool:
        in_cookie = _cookie(headers.get("cookie", ""), self._cookie)
        shown = [headers.get("authorization", "").removeprefix("Bearer ").strip(), in_cookie]
        if in_link := _with_token(scope):
            shown.append(in_link[1])
        return any(hmac.compare_digest(token.encode(), self._token.encode()) for token in shown)

    async def _welcome(self, at: tuple[str, str], scope: Scope, receive: Receive, send: Send) -> None:
        """Keep the token of the printed link in a cookie, and take it out of the address."""
        cookie = f"{self._cookie}={quote(at[1])}; Path=/; HttpOnly; SameSite=Strict"
        headers = [(b"location", at[0].encode()), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._sockets >= MOST_SOCKETS:
            return await _refuse(scope, receive, send, 503, "Too many connections are open; close some pages.")
        self._sockets += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._sockets -= 1


class _TooMuch(Exception):
    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status, self.text = status, text


async def _body(receive: Receive, headers: Mapping[str, str]) -> Receive:
    """The whole body, read within bounds; gives a `receive` that hands it on at once.

    Raises:
        _TooMuch: too long, too slow, or no JSON.
    """
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > LARGEST_BODY:
        raise _TooMuch(413, f"The request is longer than {LARGEST_BODY:,} bytes.")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    parts, size, more = [], 0, True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return _again([message])
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                if size > LARGEST_BODY:
                    raise _TooMuch(413, f"The request is longer than {LARGEST_BODY:,} bytes.")
    except TimeoutError:
        raise _TooMuch(408, f"The request did not arrive within {BODY_SECONDS:g} seconds.") from None
    if kind != "application/json":
        raise _TooMuch(415, "Send JSON, with Content-Type: application/json.")
    return _again([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive)


def _again(messages: list[Message], after: Receive | None = None) -> Receive:
    left = list(messages)

    async def receive() -> Message:
        if left:
            return left.pop(0)
        return await after() if after else {"type": "http.disconnect"}

    return receive


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message["headers"]}
            more = [(k.encode(), v.encode()) for k, v in _HEADERS.items() if k.encode() not in there]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, text: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        return await send({"type": "websocket.close", "code": 1008 if status < 500 else 1013, "reason": text[:120]})
    body = json.dumps({"error": text}).encode()
    # What is left of the body is not read: the connection ends.
    headers = [
        (b"content-type", b"application/json"),
        (b"connection", b"close"),
        (b"content-length", b"%d" % len(body)),
    ]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _hostname(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _place_of(origin: str) -> str:
    """host:port of an Origin; empty where it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _cookie(text: str, name: str) -> str:
    try:
        morsel = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def _with_token(scope: Scope) -> tuple[str, str] | None:
    """(the address without it, the token) of the printed link; None for any other request."""
    if scope["type"] != "http" or scope["method"] not in _SAFE or scope["path"] != "/":
        return None
    query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    return ("/", query["token"]) if "token" in query else None
