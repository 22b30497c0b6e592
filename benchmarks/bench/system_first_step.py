"""A process that trains two steps and ends: what `saejax train` does before its first step, and little else.

python -m benchmarks.bench.system_first_step topk
"""

import sys

import numpy as np

import saejax
from saejax.core.compiled import keep_programs


def main(preset: str) -> None:
    keep_programs()
    x = np.random.default_rng(0).standard_normal((4096, 128), np.float32)
    if preset == "clt":
        names = [f"blocks.{layer}.{point}" for layer in range(3) for point in ("mlp_in", "mlp_out")]
        saejax.train(dict.fromkeys(names, x), preset, d_sae=1024, batch_size=2048, tokens=4096, progress=False)
    else:
        saejax.train(x, preset, k=16, d_sae=1024, batch_size=2048, tokens=4096, progress=False)


if __name__ == "__main__":
    main(sys.argv[1])
