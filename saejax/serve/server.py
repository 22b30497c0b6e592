"""The web server's process: uvicorn around the guarded application."""

import contextlib
import signal
import socket
from collections.abc import Iterator, Mapping

import uvicorn

from saejax.serve.application import application
from saejax.serve.connections import Patient
from saejax.serve.guard import Guard
from saejax.serve.site import Site

_LARGEST_MESSAGE = 1 << 16


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
