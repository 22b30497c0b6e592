"""The web server's process: uvicorn around the guarded application, with connections that do not wait for ever."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from saejax.serve.application import application
from saejax.serve.guard import Guard
from saejax.serve.site import Site

HEAD_SECONDS = 10.0
MOST_OPEN = 900
_LARGEST_MESSAGE = 1 << 16


class Patient(H11Protocol):
    """uvicorn's HTTP/1.1, which closes a connection whose next request does not arrive whole within HEAD_SECONDS.

    Without it a client that sends a byte a second (slow loris) holds its connection for ever. An idle connection
    between two requests has uvicorn's own, shorter limit.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_OPEN:
            transport.abort()
            return
        self._late = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = self.conn.their_state is h11.IDLE
        if not waiting:
            self._arrived()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class Server(uvicorn.Server):
    """Ends by SIGUSR1 too, as every command does: it answers what was asked, and then the signal goes on."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            before = signal.signal(signal.SIGUSR1, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGUSR1, before)


def serve(
    site: Site,
    listener: socket.socket,
    names: tuple[str, ...],
    token: str,
    everywhere: bool,
    environment: Mapping[str, str],
) -> None:
    """Answer on `listener` until SIGINT, SIGTERM or SIGUSR1 comes, which then goes on to whoever called.

    Args:
        names, token, everywhere: of `Guard`.
        environment: that of the jobs.
    """
    guarded = Guard(application(site, environment), names, token, everywhere)
    config = uvicorn.Config(
        guarded,
        http=Patient,
        ws="websockets-sansio",
        ws_max_size=_LARGEST_MESSAGE,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=_LARGEST_MESSAGE,
    )
    Server(config).run(sockets=[listener])
