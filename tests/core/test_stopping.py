"""Signals end a command wherever Python delivers them: what is raised in a finalizer is lost, and is raised again."""

import contextlib
import gc
import itertools
import os
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from tiny.covering import rest_in
from tiny.signalled import Late, late

from saejax.core import stopping
from saejax.core.stopping import SIGNALS, Stopped, Stopping, until_ctrl_c


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_LOOK_SECONDS", 0.01)


def works_on(piece: Callable[[], object] = lambda: time.sleep(0.001)) -> None:
    """What a command does after the signal was lost: far longer than it may take to end it.

    In a frame of its own: Python 3.13 passes by the blocks of a frame whose `while` a signal ends at the jump back
    (python/cpython#130279).
    """
    end = time.monotonic() + 20
    while time.monotonic() < end:
        piece()
    raise AssertionError("the signal was swallowed")


def in_a_finalizer(number: int) -> None:
    late(number)


def in_the_callback_of_a_collection(number: int) -> None:
    def callback(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), number)
        time.sleep(0)

    gc.callbacks.append(callback)
    gc.collect()


def in_a_cycle_that_is_collected(number: int) -> None:
    one = Late(number)
    one.itself = one
    del one
    gc.collect()


def in_the_callback_of_a_weak_reference(number: int) -> None:
    one = Late(0)
    kept = weakref.ref(one, lambda _: (os.kill(os.getpid(), number), time.sleep(0)))
    del one
    assert kept() is None


def in_code_that_catches_everything(number: int) -> None:
    for _ in range(3):
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
            time.sleep(0.05)


LOSERS = (
    in_a_finalizer,
    in_the_callback_of_a_collection,
    in_a_cycle_that_is_collected,
    in_the_callback_of_a_weak_reference,
    in_code_that_catches_everything,
)


@pytest.mark.parametrize(
    ("number", "lost"), rest_in("ci", itertools.product(SIGNALS, LOSERS), [(signal.SIGTERM, lost) for lost in LOSERS])
)
def test_a_signal_that_is_swallowed_gets_out(number: signal.Signals, lost: Callable[[int], None]) -> None:
    before = [signal.getsignal(one) for one in (*SIGNALS, signal.SIGALRM)]
    with pytest.raises(Stopped) as caught, Stopping() as asked:
        lost(number)
        assert asked.number == number, "it came there"
        works_on()
    assert caught.value.number == number
    assert [signal.getsignal(one) for one in (*SIGNALS, signal.SIGALRM)] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_nothing_is_raised_where_things_are_put_away() -> None:
    """The timer looks many times, a scheduler tells twice, and each block on the way runs to its end."""
    done = []

    @contextlib.contextmanager
    def putting_away() -> Iterator[None]:
        try:
            yield
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(10):
                time.sleep(0.01)
                with contextlib.suppress(OSError):
                    raise OSError
                try:
                    raise ValueError
                except ValueError:
                    time.sleep(0.01)
            done.append(1)

    with pytest.raises(Stopped), Stopping(), putting_away(), putting_away():
        os.kill(os.getpid(), signal.SIGTERM)
        works_on()
    assert done == [1, 1]


def test_a_second_ctrl_c_does_not_wait() -> None:
    with pytest.raises(Stopped), Stopping():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            works_on()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            works_on()


def test_ctrl_c_may_be_the_end_of_a_block_alone() -> None:
    with Stopping():
        with until_ctrl_c():
            late(signal.SIGINT)
            works_on()
        time.sleep(0.1)
        with pytest.raises(Stopped), until_ctrl_c():
            late(signal.SIGTERM)
            works_on()


def test_without_a_signal_nothing_of_it_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("a finalizer's own")

    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.unraisablehook", seen.append)
        with Stopping():
            Broken()
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert len(seen) == 1


@pytest.mark.parametrize("signalled_before", [False, True])
def test_the_hook_that_reports_a_finalizer_runs_to_its_end(signalled_before: bool) -> None:
    """Hooks catch everything, as pytest's does, and then report the signal in place of what they were to report."""

    class Broken:
        def __del__(self) -> None:
            if signalled_before:
                late(signal.SIGINT)
            raise ValueError("a finalizer's own")

    said: list[str] = []

    def hook(unraisable: Any) -> None:
        try:
            if not signalled_before:
                os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 0.1  # the timer looks ten times
            while time.monotonic() < end:
                time.sleep(0.001)
            said.append(str(unraisable.exc_value))
        except BaseException as error:
            said.append(f"lost to {error!r}")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("sys.unraisablehook", hook)
        with Stopping():
            Broken()
            works_on()
    assert said == ["a finalizer's own"]


def of_semaphore() -> tuple[Callable[[], object], Any]:
    one: Any = threading.Semaphore(0)
    return lambda: one.acquire(timeout=0), one._cond


def of_event() -> tuple[Callable[[], object], Any]:
    one: Any = threading.Event()
    return lambda: (one.set(), one.clear(), one.wait(0)), one._cond


def of_queue() -> tuple[Callable[[], object], Any]:
    one: Any = queue.Queue()
    return lambda: (one.put(1), one.get()), one.not_empty


def of_waiting_queue() -> tuple[Callable[[], object], Any]:
    one: Any = queue.Queue()

    def use() -> None:
        with contextlib.suppress(queue.Empty):
            one.get(timeout=1e-6)

    return use, one.not_empty


def of_future() -> tuple[Callable[[], object], Any]:
    one: Any = Future()
    one.set_result(1)
    return lambda: one.result(0), one._condition


@pytest.mark.parametrize("kind", [of_semaphore, of_event, of_queue, of_waiting_queue, of_future])
def test_a_signal_leaves_no_lock_behind(kind: Callable[[], tuple[Callable[[], object], Any]]) -> None:
    """The thread of a pool waited for ever for a semaphore's lock, which a signal had left taken."""
    main = threading.main_thread().ident
    assert main is not None
    rng = np.random.default_rng(0)

    def send(seconds: float) -> None:
        time.sleep(seconds)
        signal.pthread_kill(main, signal.SIGTERM)

    for seconds in rng.uniform(0, 3e-4, size=30):
        (use, condition), free = kind(), list[bool]()
        sender = threading.Thread(target=send, args=[seconds])
        with contextlib.suppress(Stopped), Stopping():
            sender.start()
            works_on(use)
        sender.join()
        other = threading.Thread(target=lambda into, lock: into.append(lock.acquire(timeout=1)), args=[free, condition])
        other.start()
        other.join()
        assert free == [True], "nobody gives its lock back"


def test_ctrl_c_that_a_shell_has_switched_off_stays_off() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stopping():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
