"""Progress, rate and time left of a long stage, on the terminal or as occasional lines in a log."""

import sys
import time
from typing import Any

from tqdm import tqdm


class Progress:
    """A bar in tokens. Use as a context manager; `advance(n)` after each piece of work.

    On a terminal it redraws itself; in a log it prints a line every 15 seconds.
    """

    def __init__(self, stage: str, total: int, done: int = 0):
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=stage,
            unit="tok",
            unit_scale=True,
            mininterval=0.2 if self._terminal else 15,
            maxinterval=15,
            ascii=not self._terminal,
            ncols=None if self._terminal else 100,
        )
        self._started, self._done = time.perf_counter(), 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def advance(self, tokens: int, **show: str) -> None:
        self._done += tokens
        if show:
            self._bar.set_postfix(show, refresh=False)
        self._bar.update(tokens)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._started

    @property
    def tokens(self) -> int:
        """Tokens of this session (without those done before it)."""
        return self._done
