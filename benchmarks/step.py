"""Milliseconds of a train step and its parts on this machine.

    python -m benchmarks.step [--d_in=128 --d_sae=1024 --k=16 --batch=2048]

Prints the median and the fastest of several calls, all in one process.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from saejax.coders import CoderConfig, build

_D_IN = flags.DEFINE_integer("d_in", 128, "Width of the activations.")
_D_SAE = flags.DEFINE_integer("d_sae", 1024, "Latents.")
_K = flags.DEFINE_integer("k", 16, "Latents kept for a token.")
_BATCH = flags.DEFINE_integer("batch", 2048, "Tokens in a batch.")
_CALLS = flags.DEFINE_integer("calls", 15, "Calls that are timed, after one that is not.")


def milliseconds(name: str, function: Callable[..., Any], *arguments: Any) -> None:
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(_CALLS.value):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(1000 * (time.perf_counter() - started))
    print(f"{name:<44} median {statistics.median(times):8.1f} ms   fastest {min(times):8.1f} ms", flush=True)


def main(_: list[str]) -> None:
    d_in, d_sae, k = _D_IN.value, _D_SAE.value, _K.value
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {_BATCH.value} x {d_in} -> {d_sae}, k {k}")
    x = jax.random.normal(jax.random.key(1), (_BATCH.value, d_in))
    for preset in ("topk", "standard"):
        coder = build(CoderConfig(preset=preset, d_sae=d_sae, k=k, dead_after_tokens=10), d_in, 100)
        params = coder.init(jax.random.key(0))
        gradient = jax.grad(coder.loss, has_aux=True)
        milliseconds(f"{preset}: encode and decode", lambda p, c=coder: c.decode(p, c.encode(p, x)), params)
        for dead in (0, d_in // 4, d_in) if preset == "topk" else (0,):
            stats = {"tokens_since_fired": jnp.where(jnp.arange(d_sae) < dead, 100, 0)}
            name = f"{preset}: loss and gradient, {dead} dead"
            batch = {"x": x, "y": x}
            milliseconds(name, lambda p, s, g=gradient, b=batch: g(p, b, s, jnp.int32(0)), params, stats)


if __name__ == "__main__":
    app.run(main)
