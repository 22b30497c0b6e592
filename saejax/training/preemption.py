"""SIGTERM, SIGUSR1 and Ctrl-C end training after the current step, with a checkpoint.

Schedulers send SIGTERM when they take a machine back. SLURM ends a job at its time limit with no more than a few
seconds' notice, but tells it earlier when asked to: `#SBATCH --signal=USR1@60`, a minute before.
"""

import signal
import threading
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.core.stopping import SIGNALS
from saejax.parallel import DATA, batch_sharding, own_rows, replicated


class Preemption:
    """Context manager: `.signal` is the last of these signals that came, or None; a second Ctrl-C interrupts at once.

    `mesh` is the one that several processes share. Where an error ends the block after a signal, the signal goes on to
    whom it would have reached outside: a caller that handles the error would else go on without a word.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.signal: int | None = None
        self._old: dict[int, Any] = {}
        self._mesh, self._asked = mesh, np.zeros((), bool)
        self._any = jax.jit(jnp.any, out_shardings=mesh and replicated(mesh))

    def agreed(self) -> bool:
        """True to stop now; of several processes all are told the same, one call after a signal to any of them.

        All must call it equally often. Each call asks the devices and answers what the call before has asked, so that
        nothing waits for it.
        """
        if self._mesh is None or jax.process_count() == 1:
            return self.signal is not None
        answer, n = self._asked, self._mesh.shape[DATA]
        first, stop = own_rows(self._mesh, n)
        mine = np.full(stop - first, self.signal is not None)
        self._asked = self._any(jax.make_array_from_process_local_data(batch_sharding(self._mesh), mine, (n,)))
        return bool(answer)

    def __enter__(self) -> "Preemption":
        for number in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        if self.signal is not None and isinstance(error, Exception):
            self._hand_on(self.signal, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            self._hand_on(number, frame)
        self.signal = number

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        outside = self._old.get(number)
        if callable(outside):
            outside(number, frame)
