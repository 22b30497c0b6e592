"""Connections that must not wait for ever: a request's head arrives in time, and only so many are open at once."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
MOST_OPEN = 900


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
