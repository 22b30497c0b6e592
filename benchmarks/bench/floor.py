"""The floor, measured in the same run: what no train step can do without. A worker (see protocol.py).

    python -m benchmarks.bench.floor --framework=jax | torch

The product x W_enc [B, D] x [D, F] of either framework; bytes a second through memory; selections by torch. The faster
framework is the floor.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.bench.protocol import serve


class Jax:
    def __init__(self) -> None:
        from saejax.core.host import keep_memory

        keep_memory()
        import jax

        self.jax, self.gpu = jax, jax.default_backend() != "cpu"

    def product(self, x: np.ndarray, w: np.ndarray) -> Callable[[], None]:
        """float32; on an accelerator of bfloat16 operands, which is faster there."""
        jnp = self.jax.numpy
        kind = jnp.bfloat16 if self.gpu else jnp.float32
        a, b = jnp.asarray(x, kind), jnp.asarray(w, kind)
        multiply = self.jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
        return lambda: self.jax.block_until_ready(multiply(a, b))

    def stream(self, n: int) -> Callable[[], None]:
        """c = a + 2 b, in place of a: 3 x 4 bytes a number."""
        jnp = self.jax.numpy
        arrays = [jnp.ones(n, jnp.float32), jnp.ones(n, jnp.float32)]
        add = self.jax.jit(lambda a, b: a + 2 * b, donate_argnums=0)

        def once() -> None:
            arrays[0] = self.jax.block_until_ready(add(*arrays))

        return once

    def selections(self, values: np.ndarray, k: int) -> dict[str, Callable[[], None]]:
        jnp, lax = self.jax.numpy, self.jax.lax
        v = jnp.asarray(values)
        by_row = self.jax.jit(lambda v: lax.top_k(v, k))
        return {"jax.lax.top_k by row": lambda: self.jax.block_until_ready(by_row(v))}


class Torch:
    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _tensor(self, a: np.ndarray) -> Any:
        return self.torch.from_numpy(a).to(self.device)

    def product(self, x: np.ndarray, w: np.ndarray) -> Callable[[], None]:
        kind = self.torch.bfloat16 if self.device == "cuda" else self.torch.float32
        a, b = self._tensor(x).to(kind), self._tensor(w).to(kind)

        def once() -> None:
            self.torch.matmul(a, b)
            self._wait()

        return once

    def stream(self, n: int) -> Callable[[], None]:
        a, b = self.torch.ones(n, device=self.device), self.torch.ones(n, device=self.device)

        def once() -> None:
            a.add_(b, alpha=2)
            self._wait()

        return once

    def selections(self, values: np.ndarray, k: int) -> dict[str, Callable[[], None]]:
        v, torch = self._tensor(values), self.torch

        def of(*arguments: Any) -> Callable[[], None]:
            def once() -> None:
                torch.topk(*arguments, sorted=False)
                self._wait()

            return once

        return {"torch.topk by row": of(v, k), "torch.topk, flat": of(v.flatten(), k * len(values))}


_FRAMEWORKS: dict[str, Callable[[], Any]] = {"jax": Jax, "torch": Torch}
_made: dict[str, Any] = {}


def prepare(batch: int, d_in: int, width: int) -> dict[str, Any]:
    """Makes the product's operands, and warms up."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((batch, d_in), np.float32), rng.standard_normal((d_in, width), np.float32)
    _made["product"] = _made["framework"].product(x, w)
    _made["product"]()
    return {}


def product(calls: int) -> dict[str, Any]:
    """Seconds of each call."""
    return {"seconds": [_seconds(_made["product"]) for _ in range(calls)]}


def bandwidth(numbers: int, calls: int) -> dict[str, Any]:
    """Bytes a second, the fastest of the calls."""
    once = _made["framework"].stream(numbers)
    once()
    return {"bytes_per_second": 12 * numbers / min(_seconds(once) for _ in range(calls))}


def select(rows: int, width: int, k: int, calls: int) -> dict[str, Any]:
    values = np.maximum(np.random.default_rng(0).standard_normal((rows, width), np.float32), 0)
    found = {}
    for name, once in _made["framework"].selections(values, k).items():
        once()
        found[name] = statistics.median(_seconds(once) for _ in range(calls))
    return {"seconds": found}


def _seconds(once: Callable[[], None]) -> float:
    started = time.perf_counter()
    once()
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=_FRAMEWORKS, required=True)
    _made["framework"] = _FRAMEWORKS[parser.parse_args().framework]()
    serve({"prepare": prepare, "product": product, "bandwidth": bandwidth, "select": select})
