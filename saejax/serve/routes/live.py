"""WebSockets: runs and jobs as they go on."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import anyio
from fastapi import APIRouter, Query, WebSocket
from starlette.websockets import WebSocketDisconnect

from saejax.core.errors import SaejaxError
from saejax.serve.jobs.queue import Queue
from saejax.serve.live import Live, Message
from saejax.serve.site import Site

SEND_SECONDS = 10.0
_CLOSE_SECONDS = 1.0
_DONE, _REFUSED, _LATER = 1000, 1008, 1013
_Offset = Annotated[int, Query(ge=0, le=1 << 62)]


def router(site: Site, live: Live, queue: Queue) -> APIRouter:
    """/ws/runs/{name} and /ws/jobs/{id}; what they send is said in `saejax.serve.live`."""
    routes = APIRouter(prefix="/ws")

    def followed(name: str) -> Path:
        """The run's folder, which may be still to come."""
        return site.folders.runs / name if queue.expects(name) else site.folders.run(name)

    @routes.websocket("/runs/{name:path}")
    async def run(socket: WebSocket, name: str, at: _Offset = 0, step: _Offset | None = None) -> None:
        try:
            folder = await anyio.to_thread.run_sync(followed, name)
        except SaejaxError as error:
            return await _refuse(socket, error)
        await _send(socket, live.run(name, folder, at, step))

    @routes.websocket("/jobs/{name}")
    async def job(socket: WebSocket, name: str, at: _Offset = 0, log: _Offset = 0) -> None:
        try:
            await anyio.to_thread.run_sync(queue.view, name)
        except SaejaxError as error:
            return await _refuse(socket, error)
        await _send(socket, live.job(queue, name, at, log))

    return routes


async def _refuse(socket: WebSocket, error: SaejaxError) -> None:
    """Say why, which a refused handshake cannot."""
    await socket.accept()
    await socket.close(_REFUSED, str(error)[:120])


async def _send(socket: WebSocket, messages: AsyncIterator[Message]) -> None:
    """Send until the messages end, the client goes, or it does not take one within SEND_SECONDS."""
    await socket.accept()
    code = _DONE
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_until_gone, socket, tasks.cancel_scope)
        try:
            # An async generator, which has an aclose; its type says only that it is iterated.
            async with contextlib.aclosing(messages):  # type: ignore[type-var]
                async for message in messages:
                    with anyio.fail_after(SEND_SECONDS):
                        await socket.send_text(json.dumps(message, ensure_ascii=False, separators=(",", ":")))
        except TimeoutError:
            code = _LATER
        except WebSocketDisconnect:
            tasks.cancel_scope.cancel()
            return
        except SaejaxError:  # what was followed is gone
            code = _REFUSED
        # To one that takes nothing the connection just ends.
        with anyio.move_on_after(_CLOSE_SECONDS), contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await socket.close(code)
        tasks.cancel_scope.cancel()


async def _until_gone(socket: WebSocket, scope: anyio.CancelScope) -> None:
    """Wait until the client goes; nothing that it sends is read."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass
    scope.cancel()
