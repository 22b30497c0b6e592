"""Guard: the machine's own user may ask, from the page or from a program, in requests of bounded size and time.

A server on 127.0.0.1 is reached by every page that the user's browser has open. So each request must name this server
as its host (a rebound name of another site does not), a request that changes something must come from the page itself
or from no page at all, and a body must be JSON, which no form of another site can send.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 1 << 20
BODY_SECONDS = 10.0
MOST_SOCKETS = 64
_SAFE = ("GET", "HEAD")
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

    def __init__(self, app: ASGIApp, names: tuple[str, ...] = (), token: str = "", everywhere: bool = False):
        self._app, self._token, self._everywhere = app, token, everywhere
        machine = (socket.gethostname().lower(),) if everywhere else ()
        self._names = frozenset({"localhost", *machine, *(name.lower() for name in names)})
        # Of all servers of one host, whatever their ports, a browser has one set of cookies: each token has its own.
        self._cookie = f"saejax_token_{hashlib.sha256(token.encode()).hexdigest()[:16]}"
        self._sockets = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        connection = HTTPConnection(scope)
        try:
            in_link = self._refuse(connection)
            if scope["type"] == "websocket":
                return await self._socket(scope, receive, send)
            if in_link:  # the token is kept in a cookie, and taken out of the address
                response = RedirectResponse("/", 303)
                response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
                return await response(scope, receive, send)
            receive = receive if scope["method"] in _SAFE else await _body(Request(scope, receive))
        except HTTPException as error:
            return await _answer(error, scope, receive, send)
        await self._app(scope, receive, _with_headers(send))

    def _refuse(self, connection: HTTPConnection) -> str:
        """The token of the printed link, if it is that; raises HTTPException where the request may not go on."""
        scope, headers = connection.scope, connection.headers
        host, site, origin = headers.get("host", ""), headers.get("sec-fetch-site", "none"), headers.get("origin")
        changes = scope["type"] == "websocket" or scope["method"] not in _SAFE
        if not self._is_ours(name := _hostname(host)):
            raise HTTPException(421, f"This server is not called {host[:80]!r}: --names={name[:80]} allows it.")
        if changes and origin is not None and _place_of(origin) != host.lower():
            raise HTTPException(403, f"A page of {origin[:80]!r} may not use this server.")
        if site not in ("same-origin", "none") and (changes or scope["path"].startswith(("/api", "/ws", "/files"))):
            raise HTTPException(403, "A page of another site may not use this server.")
        if not self._token:
            return ""
        in_link = "" if changes or scope["path"] != "/" else connection.query_params.get("token", "")
        in_header = headers.get("authorization", "").removeprefix("Bearer ").strip()
        shown = (in_header, connection.cookies.get(self._cookie, ""), in_link)
        if not any(hmac.compare_digest(token.encode(), self._token.encode()) for token in shown):
            raise HTTPException(401, "Open the link that the server printed: its token is missing or wrong here.")
        return in_link

    def _is_ours(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or self._everywhere or str(address) in self._names

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._sockets >= MOST_SOCKETS:
            raise HTTPException(503, "Too many connections are open; close some pages.")
        self._sockets += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._sockets -= 1


async def _body(request: Request) -> Receive:
    """The whole body, read within bounds; gives a `receive` that hands it on at once.

    Raises:
        HTTPException: too long, too slow, or no JSON.
    """
    long = HTTPException(413, f"The request is longer than {LARGEST_BODY:,} bytes.")
    length = request.headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()) or int(length[:20]) > LARGEST_BODY:
        raise long
    body = b""
    messages: list[Message] = []
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST_BODY:
                    raise long
        messages.append({"type": "http.request", "body": body, "more_body": False})
    except ClientDisconnect:
        messages.append({"type": "http.disconnect"})
    except TimeoutError:
        raise HTTPException(408, f"The request did not arrive within {BODY_SECONDS:g} seconds.") from None
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "Send JSON, with Content-Type: application/json.")

    async def receive() -> Message:
        return messages.pop() if messages else await request.receive()

    return receive


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


async def _answer(error: HTTPException, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        code = 1008 if error.status_code < 500 else 1013
        return await send({"type": "websocket.close", "code": code, "reason": error.detail[:120]})
    # What is left of the body is not read: the connection ends.
    response = JSONResponse({"error": error.detail}, error.status_code, {"connection": "close"})
    await response(scope, receive, _with_headers(send))


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
