"""Processes that a task started and that still run, whoever started it and whatever became of them."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_PROCESSES = Path("/proc")


def left_of(group: int, folder: Path) -> list[int]:
    """Processes of this machine that a task started and that go on, although its runner may have been killed.

    They are of the process group that the task led, and their command lines name the jobs' folder: the group's
    number alone could be another's by now.
    """
    if group < 2:
        return []
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return []
    return [pid for pid, theirs, command in _all() if theirs == group and os.fsencode(folder) in command]


def _all() -> Iterator[tuple[int, int, bytes]]:
    """(pid, process group, command line) of each process of this machine."""
    if not _PROCESSES.is_dir():  # macOS
        listing = ["ps", "-axww", "-o", "pid=,pgid=,args="]
        for line in subprocess.run(listing, capture_output=True, check=True).stdout.splitlines():
            pid, leader, command = [*line.split(None, 2), b""][:3]
            yield int(pid), int(leader), command
        return
    for process in _PROCESSES.iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
                group = int((process / "stat").read_text().rpartition(")")[2].split()[2])
                yield int(process.name), group, (process / "cmdline").read_bytes()
