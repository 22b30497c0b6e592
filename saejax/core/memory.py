"""Memory that the C library keeps for the next step instead of giving it back.

A step's large arrays come from malloc, and glibc's asks the system for each of them and gives it back: the next step
waits again for every page to be cleared. On 2 CPU cores that was a quarter of a TopK step. Kept memory is what the
process once needed at most; it counts as the process's own until it ends.
"""

import ctypes
import os

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_memory() -> bool:
    """Let malloc keep what is freed; whether it does. Environment SAEJAX_KEEP_MEMORY=0 leaves malloc alone.

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
    return all(mallopt(name, value) for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_ARENA_MAX, 1)))
