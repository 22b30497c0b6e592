"""The section of sums by latent, out[indices_bk] += scale_bk rows_b: the gradients of a sparse coder's weights.

A scatter, whose additions are atomic on a GPU; pairs sorted by latent, gathered in order; one dense product; what is
chosen. Seconds of each, and in how many numbers a second call differs from the first: resuming gives the same bits only
where that is 0. Latents are drawn as (f + 1)^-0.7, so that some have many tokens and most few.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench.frame import Result, Told
from benchmarks.bench.markdown import number, table
from benchmarks.bench.protocol import Worker, serve

NAME = "sums"
TITLE = "Sums by latent, and whether they come out the same twice"
CHOSEN = "saejax: what a GPU runs"


@dataclasses.dataclass(frozen=True)
class Row:
    """B tokens with k latents of F, rows of width D."""

    name: str
    batch: int
    k: int
    width: int
    latents: int
    quick: bool = False


def rows(told: Told) -> list[Row]:
    if told.backend == "cpu":
        return [Row("sums-6144", 2048, 32, 768, 6144)]
    return [
        Row("gpu-sums-4096", 1024, 25, 768, 4096),
        Row("gpu-sums-32768", 4096, 32, 768, 32768, quick=True),
        Row("gpu-sums-2304-65536", 4096, 64, 2304, 65536),
        Row("gpu-sums-4096-131072", 2048, 64, 4096, 131072),
    ]


def run(row: Row, told: Told) -> Result:
    worker = Worker("sums", [sys.executable, "-m", "benchmarks.bench.sums"])
    try:
        found = worker.ask("measure", **dataclasses.asdict(row), calls=3 if told.backend == "cpu" else 20)
    finally:
        worker.close()
    for what, ms in found["milliseconds"].items():
        print(f"  {what:<34}{ms:9.2f} ms, {found['differ'][what]} numbers differ", flush=True)
    return {"about": dataclasses.asdict(row), **found}


def figures(results: list[Result]) -> list[dict[str, Any]]:
    what = "sums by latent: numbers that differ in a second call"
    return [
        {"what": what, "row": r["row"], "value": r["differ"][CHOSEN], "aim": 0, "better": "less"}
        for r in results
        if "differ" in r
    ]


def page(results: list[Result], folder: Path) -> list[str]:
    del folder
    lines: list[str] = []
    for r in results:
        if "milliseconds" not in r:
            continue
        a = r["about"]
        lines += [
            f"{r['row']}: {a['batch']:,} tokens, k {a['k']}, rows of {a['width']:,}, {a['latents']:,} latents.",
            "",
            *table(
                ("", "ms", "numbers that differ in 5 more calls", "furthest from float64"),
                [
                    [what, number(ms), f"{r['differ'][what]:,}", f"{r['furthest'][what]:.1e}"]
                    for what, ms in r["milliseconds"].items()
                ],
            ),
            "",
        ]
    return lines


def measure(batch: int, k: int, width: int, latents: int, calls: int, **_: Any) -> dict[str, Any]:
    """Milliseconds of each way; how many numbers differ between calls; the distance from float64 of 64 latents."""
    import jax
    import jax.numpy as jnp

    from benchmarks.bench.ours import median_seconds
    from saejax.kernels import segments

    rng = np.random.default_rng(0)
    # Bounded: a token draws from 16 k candidates, so that nothing of the size of batch x latents is drawn.
    weight = np.cumsum((np.arange(latents) + 1.0) ** -0.7)
    drawn = np.searchsorted(weight / weight[-1], rng.random((batch, 16 * k)))
    indices = np.stack([distinct(row, k, latents) for row in drawn]).astype(np.int32)
    scale, g = rng.standard_normal((batch, k), np.float32), rng.standard_normal((batch, width), np.float32)
    some = rng.choice(latents, min(64, latents), replace=False)
    want = np.stack([(scale * (indices == f)).sum(1, dtype=np.float64) @ g.astype(np.float64) for f in some])
    inputs = tuple(map(jnp.asarray, (scale, indices, g)))
    ways = {
        "scatter": segments.sum_by_latent_reference,
        "sorted and gathered": segments.sum_gathered,
        "dense product, float32": segments.sum_by_product,
        CHOSEN: segments.sum_by_latent,
    }
    found: dict[str, dict[str, float]] = {"milliseconds": {}, "differ": {}, "furthest": {}}
    for name, way in ways.items():
        summed = jax.jit(lambda s, i, r, way=way: way(s, i, r, latents))
        first = summed(*inputs)
        found["milliseconds"][name] = 1000 * median_seconds(calls, summed, *inputs)
        found["differ"][name] = max(int((summed(*inputs) != first).sum()) for _ in range(5))
        found["furthest"][name] = float(np.abs(np.asarray(first[some], np.float64) - want).max())
    return found


def distinct(drawn: np.ndarray, k: int, latents: int) -> np.ndarray:
    """The first k different ones; where there are fewer, nobody's."""
    _, places = np.unique(drawn, return_index=True)
    chosen = drawn[np.sort(places)[:k]]
    return np.pad(chosen, (0, k - len(chosen)), constant_values=latents)


if __name__ == "__main__":
    serve({"measure": measure})
