"""Threads that do what can wait."""

import contextlib
import os
import sys
import threading

_NICER = 5


def give_way() -> None:
    """Lower the priority of this thread, and of those that it starts: it runs where others leave a core idle.

    For what is done ahead (packing, hashing, writing): on a machine whose cores compute the model, such work would
    otherwise stop a computation that waits for its slowest thread. Linux alone has priorities of threads.
    """
    if sys.platform == "linux":
        own = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + _NICER))
