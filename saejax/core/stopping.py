"""Signals that end a command wherever it is, and that no finalizer can swallow.

Python calls the handler of a signal between two bytecodes of the main thread, and these may be the bytecodes of a
`__del__`, of a callback of the garbage collection or of a weak reference, or of code that catches everything. What is
raised there is lost. So the handler raises, and a timer looks until the exception has left the command: where it is no
longer on its way, it is raised again. Where what is raised would break a lock, the handler leaves it to the timer:
`threading.Condition`, which pools, futures, events and queues are made of, takes and gives back its lock in Python.
"""

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LOOK_SECONDS = 0.1
_TAKE_OR_GIVE_BACK = frozenset(
    getattr(threading.Condition, name).__code__
    for name in ("__enter__", "__exit__", "_release_save", "_acquire_restore")
)
# Where a signal ends a `while` at its jump back, Python 3.13 passes by the blocks of that frame, and what these hold in
# a loop stays taken (python/cpython#130279).
_HOLD_IN_A_LOOP = frozenset(
    of.__code__ for of in (threading.Semaphore.acquire, queue.Queue.get, queue.Queue.put, queue.Queue.join)
)


class Stopped(KeyboardInterrupt):
    """A signal ends the command. Libraries treat it as Ctrl-C, which they let through where they catch everything.

    Attributes:
        number: of the signal.
        answered: to be called once the signal has had its effect; it is not raised again.
    """

    def __init__(self, number: int, answered: Callable[[], None]) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.answered = number, answered


class Stopping:
    """Context manager: within it a signal raises `Stopped` in the main thread, again and again until it has left.

    It is raised again only where it is not being handled, so blocks that put things away run to their end. A second
    Ctrl-C does not wait for them. SIGALRM and its timer are taken, from the signal on.

    Attributes:
        number: of the first signal that came; None before one.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._old: dict[int, Any] = {}
        self._tells = False  # another's hook reports what a finalizer raised

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            # A shell starts what it runs in the background with Ctrl-C ignored.
            wanted = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._old = {number: signal.signal(number, self._told) for number in wanted}
            self._old[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._look)
            self._hook, sys.unraisablehook = sys.unraisablehook, self._lost
        return self

    def __exit__(self, *_: object) -> None:
        if self._old:
            self.answered()
            sys.unraisablehook = self._hook
            while self._old:
                signal.signal(*self._old.popitem())

    def answered(self) -> None:
        """The signal has had its effect, and is not raised again."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.number = None

    def _told(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number is not None, self.number or number
        signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
        # A scheduler tells a process more than once; a user who presses Ctrl-C twice does not want to wait.
        if self._may_raise(frame) and (not again or number == signal.SIGINT or not _on_its_way()):
            raise Stopped(number, self.answered)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None and self._may_raise(frame) and not _on_its_way():
            raise Stopped(self.number, self.answered)

    def _may_raise(self, frame: FrameType | None) -> bool:
        return not self._tells and not _at_a_lock(frame)

    def _lost(self, unraisable: Any) -> None:
        """Report what was lost, but for a `Stopped`: it is raised again, once the report is whole."""
        self._tells = not isinstance(unraisable.exc_value, Stopped)
        try:
            if self._tells:
                self._hook(unraisable)
        finally:
            self._tells = False


@contextlib.contextmanager
def until_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the block, and nothing more."""
    try:
        yield
    except KeyboardInterrupt as error:
        if isinstance(error, Stopped):
            if error.number != signal.SIGINT:
                raise
            error.answered()


def _at_a_lock(frame: FrameType | None) -> bool:
    """True where what is raised leaves a condition's lock taken by nobody, or given back twice: all who need it wait
    for ever, or a RuntimeError takes the place of the signal.

    A condition that waits has given its lock back, and takes it again whatever comes once `gotit` is set.
    """
    if frame is None:
        return False
    if frame.f_code is threading.Condition.wait.__code__:
        return "gotit" not in frame.f_locals
    return frame.f_code in _TAKE_OR_GIVE_BACK | _HOLD_IN_A_LOOP


def _on_its_way() -> bool:
    """True while the main thread handles a `Stopped`: in the blocks that it passes, and what these call."""
    error, seen = sys.exception(), set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, Stopped):
            return True
        seen.add(id(error))
        error = error.__context__
    return False
