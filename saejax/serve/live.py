"""Messages of what happens, as it happens: rows of metrics, states, logs of jobs, for any number of readers.

One task looks at each thing that is watched, four times a second, however many watch it. Each reader has a place of its
own and reads what is behind it from the file: nothing is queued, so a slow reader costs neither memory nor the training
anything.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from saejax.core.errors import SaejaxError
from saejax.core.files import stamp
from saejax.jobs.job import ENDED
from saejax.runs import Run
from saejax.serve.jobs.queue import Queue, View
from saejax.serve.rows import Cursor, behind_step

_LOOK = 0.25  # seconds
# The state of a run is in several files and in a lease: it is asked for at every fourth look.
_STATES = 4
# Disks of a network may hold a look for long; requests have threads of their own.
_THREADS = 8
_AFTER_MISTAKE = 5.0

Message = dict[str, Any]


class Live:
    """All that is watched now.

    Args:
        state_of: the state of a run, by its name.
        look: seconds between two looks at a file.
    """

    def __init__(self, state_of: Callable[[str], str], look: float = _LOOK):
        self._state_of, self._look = state_of, look
        self._watched: dict[Hashable, _Watched] = {}
        self._threads: anyio.CapacityLimiter | None = None

    async def run(self, name: str, folder: Path, at: int = 0, step: int | None = None) -> AsyncIterator[Message]:
        """The messages about a run, without end: rows from `at` on, or behind those of a step; and its states.

        {"kind": "state", "state"}, {"kind": "rows", "rows", "at"}, {"kind": "reset"}: the file was begun anew.
        """
        path = Run(folder).metrics
        cursor = Cursor(path, at if step is None else await self._thread(behind_step, path, step))
        state = ""
        with self._watching(("run", name), lambda: stamp(path), lambda: self._state_of(name)) as watched:
            while True:
                seen = watched.seen
                if watched.state not in ("", state):
                    state = watched.state
                    yield {"kind": "state", "state": state}
                async for message in self._rows(cursor):
                    yield message
                await watched.other_than(seen)

    async def job(self, queue: Queue, name: str, at: int = 0, log: int = 0) -> AsyncIterator[Message]:
        """The messages about a job, until it has ended and all is said: as `run`, and its log and its state.

        {"kind": "job", "job"}, {"kind": "log", "text", "log"}.

        Raises:
            Problem: 404: there is no such job.
        """
        view = await self._thread(queue.view, name)
        cursor, job = Cursor(Run(queue.runs / view.name).metrics, at), queue.job(name)
        said: tuple[Any, ...] | None = None

        def look() -> Hashable:
            return stamp(cursor.path), job.signature(), _news(queue.view(name))

        with self._watching(("job", name), look) as watched:
            while True:
                seen = watched.seen
                view = await self._thread(queue.view, name)
                ended = view.state in ENDED
                if not ended and _news(view) != said:
                    said = _news(view)
                    yield {"kind": "job", "job": dataclasses.asdict(view)}
                async for message in self._rows(cursor):
                    yield message
                while True:
                    text, behind = await self._thread(job.log, log)
                    if behind == log:
                        break
                    log = behind
                    yield {"kind": "log", "text": text, "log": log}
                if ended:
                    yield {"kind": "job", "job": dataclasses.asdict(view)}
                    return
                await watched.other_than(seen)

    async def _rows(self, cursor: Cursor) -> AsyncIterator[Message]:
        more = True
        while more:
            rows, more, reset = await self._thread(cursor.next)
            if reset:
                yield {"kind": "reset"}
            if rows:
                yield {"kind": "rows", "rows": rows, "at": cursor.at}

    async def _thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(_THREADS)
        return await anyio.to_thread.run_sync(call, *arguments, limiter=self._threads)

    @contextlib.contextmanager
    def _watching(self, key: Hashable, *looks: Callable[[], Any]) -> Iterator["_Watched"]:
        watched = self._watched.get(key)
        if watched is None:
            watched = self._watched[key] = _Watched(*looks)
            watched.task = asyncio.create_task(self._looking(watched))
        watched.readers += 1
        try:
            yield watched
        finally:
            watched.readers -= 1
            if not watched.readers:
                del self._watched[key]
                assert watched.task is not None
                watched.task.cancel()

    async def _looking(self, watched: "_Watched") -> None:
        while True:
            try:
                watched.tell(await self._thread(watched.look))
            except (OSError, SaejaxError):  # a file that is being replaced; the next look finds it
                pass
            except Exception:  # a mistake of ours must not leave readers waiting for ever
                logging.getLogger(__name__).exception("A look at a run or a job failed")
                await asyncio.sleep(_AFTER_MISTAKE)
            await asyncio.sleep(self._look)


class _Watched:
    """Something that one task looks at, and those who wait for it to change."""

    def __init__(self, look: Callable[[], Hashable], state_of: Callable[[], str] | None = None):
        self._look, self._state_of, self._count = look, state_of, 0
        # As it was last seen; empty before.
        self.state = ""
        self.seen: Hashable = None
        self.readers = 0
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def look(self) -> Hashable:
        seen = self._look()
        if self._state_of is not None and self._count % _STATES == 0:
            with contextlib.suppress(OSError, SaejaxError):  # the run's folder is not there yet
                self.state = self._state_of()
        self._count += 1
        return seen, self.state

    def tell(self, seen: Hashable) -> None:
        if seen != self.seen:
            self.seen = seen
            self._changed.set()
            self._changed = asyncio.Event()

    async def other_than(self, seen: Hashable) -> None:
        while self.seen == seen:
            await self._changed.wait()


def _news(view: View) -> tuple[Any, ...]:
    """The part of a job that is worth a message; its seconds and its log have others."""
    return view.state, view.code, view.started, view.ended, view.pid, view.run
