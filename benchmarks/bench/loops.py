"""A lower bound: the sparse parts of a step of TopK, as XLA does them and as a loop written by hand does.

    python -m benchmarks.bench.loops

Compiles loops.cpp (needs a C++ compiler with OpenMP) and takes both in turn, each part alone: the selection, decoding,
and the two gradients of decoding (that of W_enc is the second once more). Both give the same latents and sums. Writes
loops.md beside this file, with the bytes that a part reads and writes if nothing stays in a cache.
"""

import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.bench.markdown import table
from benchmarks.bench.rows import CPU_ROWS, Row, shape
from saejax.core.host import keep_memory
from saejax.kernels.selection import largest_of_rows
from saejax.kernels.sparse import decode_rows

SOURCE, PAGE = Path(__file__).with_name("loops.cpp"), Path(__file__).with_name("loops.md")
_ROWS = ("topk-128-1024", "topk-3072", "topk-6144", "topk-6144-k128", "topk-24576")
_CALLS = 9
Part = tuple[str, float, Callable[[], Any], Callable[[], Any]]


def compiled(folder: Path) -> ctypes.CDLL:
    """loops.cpp for this processor."""
    library = folder / "loops.so"
    flags = ("-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC")
    subprocess.run([os.environ.get("CXX", "c++"), *flags, str(SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def parts(row: Row, loops: ctypes.CDLL) -> list[Part]:
    """(name, MB, XLA's, the loop) of each part, after both have been found to agree."""
    B, D, F, K = row.batch, row.d_in, row.d_sae, row.k
    rng = np.random.default_rng(0)
    pre, W, g, values = (rng.normal(size=size).astype(np.float32) for size in ((B, F), (F, D), (B, D), (B, K)))
    at = np.empty((B, K), np.int32)
    out = {"decode": np.empty((B, D), np.float32), "values": np.empty((B, K), np.float32), "rows": np.empty_like(W)}
    on_device = [jax.device_put(a) for a in (pre, W, g, values)]
    select = jax.jit(lambda pre: largest_of_rows(pre, K, falling=False))
    decode = jax.jit(decode_rows)
    of_values = jax.jit(lambda v, at, W, g: jax.vjp(lambda v: decode_rows(v, at, W), v)[1](g)[0])
    of_rows = jax.jit(lambda v, at, W, g: jax.vjp(lambda W: decode_rows(v, at, W), W)[1](g)[0])
    sizes = [ctypes.c_int64(n) for n in (B, K, D)]

    def loop(name: str, *arguments: Any) -> Callable[[], Any]:
        pointers = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in arguments]
        return lambda: getattr(loops, name)(*pointers)

    pre_j, W_j, g_j, values_j = on_device
    own_select = loop("select_rows", pre, sizes[0], ctypes.c_int64(F), sizes[1], at)
    own_select()
    at_j = select(pre_j)
    np.testing.assert_array_equal(at, at_j)
    pairs = B * K * D * 4
    found = [
        ("select", pre.nbytes, lambda: select(pre_j), own_select),
        (
            "decode",
            pairs + g.nbytes,
            lambda: decode(values_j, at_j, W_j),
            loop("decode", values, at, W, *sizes, out["decode"]),
        ),
        (
            "gradient of the values",
            2 * pairs,
            lambda: of_values(values_j, at_j, W_j, g_j),
            loop("of_values", g, at, W, *sizes, out["values"]),
        ),
        (
            "gradient of the rows",
            pairs + W.nbytes,
            lambda: of_rows(values_j, at_j, W_j, g_j),
            loop("of_rows", values, at, g, *sizes, ctypes.c_int64(F), out["rows"]),
        ),
    ]
    for (_, _, xla, own), name in zip(found[1:], out, strict=True):
        own()
        np.testing.assert_allclose(out[name], xla(), rtol=0, atol=1e-3)
    return [(name, size / 1e6, xla, own) for name, size, xla, own in found]


def milliseconds(part: Part) -> tuple[float, float]:
    """Medians of both, in turn."""
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(_CALLS):
        for times, call in zip(taken, part[2:], strict=True):
            begun = time.perf_counter()
            jax.block_until_ready(call())
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken[0]), statistics.median(taken[1])


def main() -> None:
    os.environ["OMP_WAIT_POLICY"] = "passive"  # or the loops' threads would run on while XLA's are timed
    keep_memory()
    there = {row.name: row for row in CPU_ROWS}
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        loops = compiled(Path(folder))
        for name in _ROWS:
            for part in parts(there[name], loops):
                xla, own = milliseconds(part)
                about = shape(there[name].to_json())
                lines.append([about, part[0], f"{part[1]:,.0f}", f"{xla:.1f}", f"{own:.1f}", f"{xla / own:.1f}"])
                print(*lines[-1], sep="  ", flush=True)
    where = f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    heads = ("shape", "part", "MB", "XLA, ms", "a loop, ms", "ratio")
    text = (
        f"# The sparse parts of a step, and a loop by hand\n\n`python -m benchmarks.bench.loops`: {where}. Each part\n"
        "alone, both in turn, medians. MB: what a part reads and writes if nothing stays in a cache.\n\n"
    )
    PAGE.write_text(text + "\n".join(table(heads, lines)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
