"""What is freed stays with the process: arrays of the same size ask the system for no page twice."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from saejax.core.host import keep_memory
kept = keep_memory()
import numpy as np
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(12_000_000, np.float32)  # 48 MB: glibc alone maps it anew each time
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
counts = [faults() for _ in range(4)]
print(kept, min(counts[1:]))
"""

_LARGE = """
import ctypes
from saejax.core.host import keep_memory
kept, libc = keep_memory(), ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
place = libc.malloc(5 << 29)  # 2.7 GB, which nobody touches
end = libc.sbrk(0)
libc.free(place)
print(kept, end - libc.sbrk(0))
"""


def _run(program: str = _PROGRAM, **environment: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"} | environment,
    )
    kept, number = done.stdout.split()
    return kept, int(number)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc keeps memory")
def test_pages_of_freed_arrays_are_not_asked_for_again() -> None:
    kept, faults = _run()
    assert kept == "True" and faults < 100


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc keeps memory")
def test_no_array_is_so_large_that_it_is_given_back() -> None:
    assert _run(_LARGE) == ("True", 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc keeps memory")
def test_the_environment_leaves_malloc_alone() -> None:
    kept, faults = _run(SAEJAX_KEEP_MEMORY="0")
    assert kept == "False" and faults > 1000
