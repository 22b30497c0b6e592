"""Watchers of a training, and the time of the loop's own work by its phases."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from saejax.training.program import Program
from saejax.training.trace import HOST


class Phases:
    """Seconds by phase of the loop, in all; the time within a phase's inner one is the inner one's alone."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._stack, self._mark = [""], time.perf_counter()

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Around one part of the loop's own work, which a trace shows by this name."""
        self.seconds()
        self._stack.append(name)
        try:
            with jax.profiler.TraceAnnotation(HOST + name):
                yield
        finally:
            self.seconds()
            self._stack.pop()

    def seconds(self) -> dict[str, float]:
        """{phase: seconds} up to now; "" is outside of all."""
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._mark
        self._mark = now
        return dict(self._seconds)


class Watch:
    """Listens to the loop while it runs, and must not touch what it is shown; this one does nothing."""

    @contextlib.contextmanager
    def over(self, programs: Sequence[Program], first: int, total: int, phases: Phases) -> Iterator[None]:
        """Around all steps of a session, from `first` to at most `total`, of compiled programs; `phases` begin here."""
        yield

    def before_step(self, step: int, states: Sequence[Any]) -> None:
        """`step` steps are done or under way, and another one begins."""

    def row(self, step: int) -> Mapping[str, float]:
        """Its addition to the row of metrics of a step, which is written now."""
        return {}


def device_memory(devices: Sequence[jax.Device]) -> tuple[int, int] | None:
    """(bytes in use on the fullest device, the most so far); None where the devices do not say."""
    known = [stats for device in devices if (stats := device.memory_stats())]
    if not known:
        return None
    return max(stats["bytes_in_use"] for stats in known), max(stats.get("peak_bytes_in_use", 0) for stats in known)
