"""A limit on what a refusal may cost, which holds in a busy process on a busy machine."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator


@contextlib.contextmanager
def at_once(seconds: float = 3.0) -> Iterator[None]:
    """Fails when the block takes more than `seconds` of this thread's own CPU time.

    Other tests' threads do not count, nor does a collection of the objects that other tests left behind: both took
    more than a second on their own in long sessions.
    """
    gc.freeze()
    start = time.thread_time()
    try:
        yield
        took = time.thread_time() - start
    finally:
        gc.unfreeze()
    assert took < seconds, f"{took:.2f} s of CPU time, at most {seconds:g} s"
