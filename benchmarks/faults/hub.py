"""Hubs that are not there: a closed port, and a server that answers as badly as it is told to."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

Answer = Callable[[socket.socket, str], Any]


def silence(connection: socket.socket, path: str) -> None:
    """Take the question and never answer, as a network that swallows packets."""
    threading.Event().wait(120)


@contextlib.contextmanager
def server(answer: Answer) -> Iterator[str]:
    """An endpoint whose every connection is handled by `answer` (connection, path asked for)."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def handle(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                question = connection.recv(65536).decode(errors="replace")
                answer(connection, question.split(" ")[1] if " " in question else "")

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=handle, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def closed_port() -> Iterator[str]:
    """An endpoint where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    yield f"http://127.0.0.1:{port}"
