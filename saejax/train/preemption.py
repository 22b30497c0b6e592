"""SIGTERM, SIGUSR1 and Ctrl-C end training after the current step, with a checkpoint.

Schedulers send SIGTERM when they take a machine back. SLURM ends a job at its time limit with no more than a few
seconds' notice, but tells it earlier when asked to: `#SBATCH --signal=USR1@60`, a minute before.
"""

import signal
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Preemption:
    """Context manager: `.requested` turns true on the first of these signals; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, object] = {}

    def __enter__(self) -> "Preemption":
        for number in STOPPING:
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
