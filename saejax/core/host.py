"""This machine: its memory and processors as far as the system says, and how this process uses them."""

import contextlib
import ctypes
import os
import re
import sys
import threading
from pathlib import Path

_NICER = 5
# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8

# (limit, use) of the control group that a container or a scheduler's job runs in: the newer files, and the older ones.
_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def resident_memory() -> int:
    """Bytes that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def processors() -> int:
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


def instruction_sets() -> frozenset[str]:
    """The names that Linux has for what the processor knows, as "avx2"; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def keep_memory() -> bool:
    """Let malloc keep what is freed; whether it does. Environment SAEJAX_KEEP_MEMORY=0 leaves malloc alone.

    A step's large arrays come from malloc, and glibc's asks the system for each of them and gives it back: the next
    step waits again for every page to be cleared. On 2 CPU cores that was a quarter of a TopK step.
    It should come before JAX starts its threads: those that have a heap of their own by then give large arrays back.
    Other C libraries than glibc (macOS, musl) stay as they are.
    """
    if os.environ.get("SAEJAX_KEEP_MEMORY", "1") == "0":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # One heap for all threads: a thread's own one cannot hold arrays above 64 MB, and maps those.
    return all(mallopt(name, value) for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)))


def give_way() -> None:
    """Lower the priority of this thread, and of those that it starts: it runs where others leave a core idle.

    For what is done ahead (packing, hashing, writing): on a machine whose cores compute the model, such work would
    otherwise stop a computation that waits for its slowest thread. Linux alone has priorities of threads.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICER))
