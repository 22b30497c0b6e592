"""The state of a run in a word: what its files say is done, and who holds its lease."""

import os
import platform
import re
import time
from collections.abc import Mapping
from typing import Any

from saejax.core.files import read_bounded
from saejax.core.lease import LOCK, held
from saejax.runs.folder import Run, Sweep

# A run that another machine writes shows its life by its rows alone.
_QUIET = 60.0  # seconds
_LONGEST_LOCK = 4096


def is_written(folder: Run | Sweep) -> bool:
    """A process of this machine holds the folder's lease."""
    return held(folder.path) is not None


def state_of(run: Run, done: Mapping[str, Any], sweep: Sweep | None = None, free: bool = False) -> str:
    """waiting, running, stopped, trained, evaluated, or failed where a gate failed.

    Args:
        done: "step", "finished", "has_checkpoint", "updated", "failed_gates", and "gates_total": None before it is
            evaluated.
        sweep: that the run is a member of.
        free: nobody writes it; else the leases are asked.

    Raises:
        DataError: a lease's file cannot be read.
    """
    evaluated = done["gates_total"] is not None
    if not free and (is_written(run) or (sweep is not None and not evaluated and is_written(sweep))):
        return "running"
    if evaluated:
        return "failed" if done["failed_gates"] else "evaluated"
    if done["finished"]:
        return "trained"
    if done["step"] and not free and _held_elsewhere(run) and time.time() - done["updated"] < _QUIET:
        return "running"
    return "stopped" if done["step"] or done["has_checkpoint"] else "waiting"


def _held_elsewhere(run: Run) -> bool:
    """Another machine held the lease last."""
    lock = run.path / LOCK
    if not os.path.lexists(lock):
        return False
    match = re.search(r" on (\S+)", read_bounded(lock, _LONGEST_LOCK).decode(errors="replace"))
    return match is not None and match[1] != platform.node()


def state_of_sweep(states: list[str]) -> str:
    """The state of a sweep whose members have these."""
    for state in ("running", "stopped", "waiting", "failed"):
        if state in states:
            return state
    return "trained" if "trained" in states else "evaluated" if states else "waiting"
