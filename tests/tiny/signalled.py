"""A signal that comes inside a finalizer, where Python drops what a handler raises."""

import os
from typing import Any


class Late:
    """An object during whose finalization a signal is delivered to this process."""

    itself: Any = None

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        if self._number:
            os.kill(os.getpid(), self._number)
            sum(1 for _ in range(1000))  # the handler is called between two of these


def late(number: int) -> None:
    """Send this process a signal whose handler runs in a finalizer."""
    Late(number)
