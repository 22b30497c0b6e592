"""Watchers of a training: none by default."""

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from saejax.training.program import Program


class Watch:
    """Listens to the loop while it runs, and must not touch what it is shown; this one does nothing."""

    @contextlib.contextmanager
    def over(self, programs: Sequence[Program], first: int, total: int) -> Iterator[None]:
        """Around all steps of a session, from `first` to at most `total`, of compiled programs."""
        yield

    def before_step(self, step: int, states: Sequence[Any]) -> None:
        """`step` steps are done or under way, and another one begins."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around one part of the loop's own work. Within another phase only the inner one counts."""
        return contextlib.nullcontext()

    def row(self, step: int) -> Mapping[str, float]:
        """Its addition to the row of metrics of a step, which is written now."""
        return {}


class Phases:
    """Seconds by phase of the loop, in all; the time within a phase's inner one is the inner one's alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack, self._mark = [""], time.perf_counter()

    def count(self, entered: str | None = None) -> None:
        """The time since the last call belongs to the innermost phase; `entered` begins, or None: that one ends."""
        self.look()
        if entered is None:
            self._stack.pop()
        else:
            self._stack.append(entered)

    def look(self) -> None:
        """Bring `seconds` up to now."""
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._mark
        self._mark = now


@dataclasses.dataclass(frozen=True)
class Together(Watch):
    """Several who watch one training."""

    watches: Sequence[Watch]

    @contextlib.contextmanager
    def over(self, programs: Sequence[Program], first: int, total: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for watch in self.watches:
                stack.enter_context(watch.over(programs, first, total))
            yield

    def before_step(self, step: int, states: Sequence[Any]) -> None:
        for watch in self.watches:
            watch.before_step(step, states)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for watch in self.watches:
                stack.enter_context(watch.phase(name))
            yield

    def row(self, step: int) -> Mapping[str, float]:
        return {name: value for watch in self.watches for name, value in watch.row(step).items()}


def device_memory(devices: Sequence[jax.Device]) -> tuple[int, int] | None:
    """(bytes in use on the fullest device, the most so far); None where the devices do not say."""
    known = [stats for device in devices if (stats := device.memory_stats())]
    if not known:
        return None
    return max(stats["bytes_in_use"] for stats in known), max(stats.get("peak_bytes_in_use", 0) for stats in known)
