"""Memory and processors of this machine, as far as its system says."""

import os
from pathlib import Path

# (limit, use) of the control group that a container or a scheduler's job runs in: the newer files, and the older ones.
_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def resident_memory() -> int:
    """Bytes that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def processors() -> int:
    """CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: what the machine has free, or its control group leaves; 0 if unknown."""
    left = [_free(proc / "meminfo"), *(_left(groups / limit, groups / used) for limit, used in _GROUPS)]
    return min((known for known in left if known is not None), default=0)


def _free(meminfo: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def _left(limit: Path, used: Path) -> int | None:
    try:
        return max(0, int(limit.read_text(encoding="ascii")) - int(used.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such group, or "max": without a limit
        return None
