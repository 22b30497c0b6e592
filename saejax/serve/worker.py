"""One thread for all that uses JAX: programs are compiled and run one after the other, and a queue has an end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar

from saejax.serve.problems import Problem

Result = TypeVar("Result")


class Worker:
    """Runs what it is given in a thread of its own, in order.

    Args:
        waiting: how many pieces of work may wait for the one that runs.
        seconds: how long whoever asks waits, if `run` does not say.
    """

    def __init__(self, waiting: int = 16, seconds: float = 60.0):
        self._queue: queue.Queue[tuple[Future[Any], Callable[[], Any]] | None] = queue.Queue(waiting)
        self._seconds, self._lock = seconds, threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, work: Callable[[], Result], seconds: float | None = None) -> Result:
        """Run `work` and return its result; its errors are raised here. Within the worker's own work it runs at once.

        Raises:
            Problem: 503: too many wait already, or the worker is closed. 504: it takes longer than `seconds`; what has
                not begun by then is not begun any more.
        """
        if threading.current_thread() is self._thread:
            return work()
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise Problem(503, "The server is ending.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="saejax-worker", daemon=True)
                self._thread.start()
            try:
                self._queue.put_nowait((future, work))
            except queue.Full:
                raise Problem(
                    503, f"The server is busy: {self._queue.maxsize} requests to the model wait already. Ask again."
                ) from None
        limit = self._seconds if seconds is None else seconds
        try:
            return future.result(limit)
        except Late:
            if future.done():  # the work's own error is of this kind
                raise
            future.cancel()
            raise Problem(
                504, f"This took longer than {limit:g} s. Ask for less, or again when less is asked."
            ) from None

    def close(self) -> None:
        """Begin nothing more; what waits is cancelled."""
        with self._lock:
            self._closed = True
            while not self._queue.empty():
                item = self._queue.get_nowait()
                if item is not None:
                    item[0].cancel()
            self._queue.put_nowait(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # it belongs to whoever asked, and the thread goes on
                    future.set_exception(error)
            del future, work, item  # the result may be large
