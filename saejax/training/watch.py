"""Who watches a training from the outside: nobody, by default."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from saejax.training.program import Program


class Watch:
    """What the loop says of itself while it runs; this one does not listen. It must not touch what it is shown."""

    @contextlib.contextmanager
    def over(self, programs: Sequence[Program], first: int, total: int) -> Iterator[None]:
        """Around all steps of a session, from `first` to at most `total`, of compiled programs."""
        yield

    def before_step(self, step: int, states: Sequence[Any]) -> None:
        """`step` steps are done or under way, and another one begins."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around one part of the loop's own work. Within another phase only the inner one counts."""
        return contextlib.nullcontext()
