"""Run one task of a job and keep its record: when, where, how it ended, what it took, with what around it.

    python -m saejax.plan.jobs.task <folder> <label> -- <command>

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.core.errors import EXIT_PREEMPTED, DataError
from saejax.core.files import read_json, write_bytes, write_json
from saejax.core.stopping import SIGNALS

_MODULES = "LOADEDMODULES"


def run_task(folder: Path, label: str, command: Sequence[str]) -> int:
    """The command's exit code; of several processes of one task the first keeps the record."""
    for number in SIGNALS:
        # Not SIG_IGN, which the command would inherit.
        signal.signal(number, lambda *_: None)
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    path = folder / "records" / f"{label}.json"
    attempt = _begun(command)
    if first:
        write_bytes(path.with_suffix(".environment.txt"), environment().encode())
        _record(path, attempt)
    started = time.monotonic()
    try:
        code = subprocess.call(command)
    except OSError as error:
        print(f"error: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        code = 127
    if code in [-number for number in SIGNALS]:
        code = EXIT_PREEMPTED
    code = 128 - code if code < 0 else code
    if first:
        ended = {
            "ended": _now(),
            "seconds": time.monotonic() - started,
            "code": code,
            "max_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        }
        _record(path, attempt | ended)
    return code


def _record(path: Path, attempt: Mapping[str, Any]) -> None:
    """Write an attempt among those of the record, which another attempt may have been added to meanwhile."""
    attempts = read_attempts(path)
    same = [all(one.get(key) == attempt[key] for key in ("host", "pid", "started")) for one in attempts]
    at = same.index(True) if any(same) else len(attempts)
    write_json(path, {"attempts": [*attempts[:at], dict(attempt), *attempts[at + 1 :]]})


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """The attempts of a task's record, the oldest first; none where there is no record.

    Raises:
        DataError: it is damaged.
    """
    if not path.is_file():
        return []
    content = read_json(path)
    attempts = content.get("attempts") if isinstance(content, dict) else None
    if not isinstance(attempts, list) or not all(isinstance(one, dict) for one in attempts):
        raise DataError(f"{path} does not hold attempts; delete it, and the task counts as not begun.")
    return attempts


def environment() -> str:
    """Modules, packages and devices around a task, as text."""
    modules = os.environ.get(_MODULES, "").replace(":", "\n") or "none"
    packages = sorted({f"{one.name}=={one.version}" for one in importlib.metadata.distributions()}, key=str.lower)
    return "\n".join(
        [
            f"# {_now()} on {platform.node()}, Python {platform.python_version()}, {platform.platform()}",
            *("", "# modules", modules, "", "# packages", *packages, "", "# devices", _devices(), ""),
        ]
    )


def _devices() -> str:
    if not (tool := shutil.which("nvidia-smi")):
        return "no nvidia-smi"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run([tool], capture_output=True, text=True, timeout=30, check=False).stdout
    return "nvidia-smi does not answer"


def _begun(command: Sequence[str]) -> dict[str, Any]:
    known = {
        "job": os.environ.get("SLURM_JOB_ID"),
        "restarts": os.environ.get("SLURM_RESTART_COUNT"),
        "nodes": os.environ.get("SLURM_JOB_NODELIST"),
    }
    own = {"started": _now(), "host": platform.node(), "pid": os.getpid(), "command": list(command)}
    return own | {key: value for key, value in known.items() if value}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main(argv: Sequence[str]) -> int:
    if len(argv) < 4 or argv[2] != "--":
        print("usage: python -m saejax.plan.jobs.task <folder> <label> -- <command>", file=sys.stderr)
        return 2
    try:
        return run_task(Path(argv[0]), argv[1], argv[3:])
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
