"""Run one task of a job and keep its record: when, where, how it ended, what it took, what is left of it.

    python -m saejax.jobs.task <folder> <label> -- <command>

Exits with the command's code. A command that a signal ended before it could listen lost nothing: 75, as for one that
saved. Signals are the command's: whoever sends one sends it to both.
"""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import EXIT_PREEMPTED, DataError
from saejax.core.files import read_json, write_bytes, write_json
from saejax.core.stopping import SIGNALS

_PROCESSES = Path("/proc")


def run_task(folder: Path, label: str, command: Sequence[str]) -> int:
    """Run the command and return its exit code; of several processes of one task the first keeps the record."""
    for number in SIGNALS:
        # Not SIG_IGN, which the command would inherit.
        signal.signal(number, lambda *_: None)
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    path = folder / "records" / f"{label}.json"
    start = {"started": _now(), "host": platform.node(), "pid": os.getpid(), "command": list(command)}
    slurm = {"job": "SLURM_JOB_ID", "restarts": "SLURM_RESTART_COUNT", "nodes": "SLURM_JOB_NODELIST"}
    start |= {key: os.environ[variable] for key, variable in slurm.items() if os.environ.get(variable)}
    if first:
        write_bytes(path.with_suffix(".environment.txt"), environment().encode())
        _record(path, start)
    began = time.monotonic()
    try:
        code = subprocess.call(command)
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        code = 127
    if code in [-number for number in SIGNALS]:
        code = EXIT_PREEMPTED
    code = 128 - code if code < 0 else code
    if first:
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        seconds = time.monotonic() - began
        _record(path, start | {"ended": _now(), "seconds": seconds, "code": code, "max_rss_bytes": memory})
    return code


def _record(path: Path, start: Mapping[str, Any]) -> None:
    """Write a start among those of the record, which another one may have been added to meanwhile."""
    starts = read_starts(path)
    same = [all(other.get(key) == start[key] for key in ("host", "pid", "started")) for other in starts]
    at = same.index(True) if any(same) else len(starts)
    write_json(path, {"starts": [*starts[:at], dict(start), *starts[at + 1 :]]})


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts of a task, the oldest first; none where there is no record.

    Raises:
        DataError: the record is damaged.
    """
    if not path.is_file():
        return []
    content = read_json(path)
    starts = content.get("starts") if isinstance(content, dict) else None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise DataError(f"{path} does not hold starts; delete it, and the task counts as not begun.")
    return starts


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
    return [pid for pid, theirs, command in _processes() if theirs == group and os.fsencode(folder) in command]


def _processes() -> Iterator[tuple[int, int, bytes]]:
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


def environment() -> str:
    """Modules, packages and devices around a task, as text."""
    modules = os.environ.get("LOADEDMODULES", "").replace(":", "\n") or "none"
    packages = sorted({f"{known.name}=={known.version}" for known in importlib.metadata.distributions()}, key=str.lower)
    devices = "no nvidia-smi"
    if tool := shutil.which("nvidia-smi"):
        devices = "nvidia-smi does not answer"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            devices = subprocess.run([tool], capture_output=True, text=True, timeout=30, check=False).stdout
    machine = f"# {_now()} on {platform.node()}, Python {platform.python_version()}, {platform.platform()}"
    return "\n".join([machine, "", "# modules", modules, "", "# packages", *packages, "", "# devices", devices, ""])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 4 or argv[2] != "--":
        print("usage: python -m saejax.jobs.task <folder> <label> -- <command>", file=sys.stderr)
        return 2
    try:
        return run_task(Path(argv[0]), argv[1], argv[3:])
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
