"""The section of GPU sizes where no GPU is there: FLOPs and bytes of a train step, and what they would take an H100.

By arithmetic, part by part: a part takes the longer of its FLOPs at the card's peak and its bytes at its bandwidth, and
parts follow one another. Nobody reaches the peaks: large products of bfloat16 reach 80 %, copies 90 %. Beside it stands
what XLA counts in the step lowered for CUDA, before anything is fused: its bytes are those of every operation alone, a
loop's body counts once, and of branches all.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bench import rows as training_rows
from benchmarks.bench.frame import LeftOut, Result, Told
from benchmarks.bench.markdown import number, table
from benchmarks.bench.protocol import Worker, serve

NAME = "device_costs"
TITLE = "The GPU's sizes, by arithmetic"

# An H100 SXM: dense products of bfloat16 and of TF32 (what Precision.HIGH is there), float32, bytes a second.
BFLOAT16, TF32, FLOAT32, BANDWIDTH = 989e12, 495e12, 67e12, 3.35e12
_PREFIX = "cost-"


@dataclasses.dataclass(frozen=True)
class Row:
    """One of the GPU's rows of training."""

    of: training_rows.Row
    quick: bool = False

    @property
    def name(self) -> str:
        return _PREFIX + self.of.name


@dataclasses.dataclass(frozen=True)
class Part:
    """What one part of a step computes and moves."""

    name: str
    flops: float
    bytes: float
    rate: float = BFLOAT16

    @property
    def seconds(self) -> float:
        return max(self.flops / self.rate, self.bytes / BANDWIDTH)


def parts(row: training_rows.Row) -> list[Part]:
    """The parts of a row's step."""
    encoder = row.d_in * row.d_sae * row.encoders
    decoder = row.parameters - encoder
    product, latents, x = 2.0 * row.batch, 4.0 * row.batch * row.latents, 4.0 * row.batch * row.d_in * row.sites
    found = [
        Part("encode", product * encoder, x + 4 * encoder + latents),
        Part("optimizer", 0, row.adam_bytes + 4 * row.parameters),  # clipping reads the gradient once more
    ]
    if not row.sparse:
        return [
            *found,
            Part("decode", product * decoder, latents + 4 * decoder + x),
            Part("gradients", product * (encoder + 2 * decoder), 4 * latents + 8 * decoder + 4 * encoder, TF32),
            Part("latents: activation, penalty, firing", 0, 4 * latents),
        ]
    # A kept latent's rows are read for the output, for its own gradient, and each weight's gradient reads as much.
    read, written = 4.0 * row.batch * row.k * row.d_in * row.encoders, 4.0 * row.batch * row.k * decoder / row.d_sae
    return [
        *found,
        Part("select", 0, 2 * latents),
        Part(
            "decode and the latents' gradient", 4 * row.batch * row.k * decoder / row.d_sae, 2 * (written + x), FLOAT32
        ),
        Part("weights' gradients", 0, written + read + 4 * row.parameters),
    ]


def costs(row: training_rows.Row) -> dict[str, Any]:
    """FLOPs, bytes, and predicted seconds of a row's step on an H100, with its parts and its floor."""
    found = parts(row)
    predicted = sum(part.seconds for part in found)
    return {
        "flops": sum(part.flops for part in found),
        "bytes": sum(part.bytes for part in found),
        "predicted_seconds": predicted,
        "floor_flops": row.flops,
        "floor_bytes": row.adam_bytes,
        "floor_seconds": row.flops / BFLOAT16 + row.adam_bytes / BANDWIDTH,
        "tokens_per_second": row.batch / predicted,
        "parts": {part.name: {**dataclasses.asdict(part), "seconds": part.seconds} for part in found},
    }


def rows(told: Told) -> list[Row]:
    return [Row(row) for row in training_rows.GPU_ROWS] if told.backend == "cpu" else []


def run(row: Row, told: Told) -> Result:
    del told
    if row.of.dead:
        raise LeftOut("dead latents cost what their number says; that is not arithmetic")
    worker = Worker("lowering", [sys.executable, "-m", "benchmarks.bench.device_costs"])
    try:
        counted = worker.ask("lower", row=row.of.to_json())
    finally:
        worker.close()
    return {"about": row.of.to_json(), **costs(row.of), "xla": counted}


def page(results: list[Result], folder: Path) -> list[str]:
    del folder
    heading = ("", "GFLOP", "GB", "floor's GFLOP", "XLA's GFLOP", "XLA's GB", "predicted ms", "of it floor", "measured")
    lines = [
        [
            r["row"].removeprefix(_PREFIX),
            *(number(r[key], 1e9) for key in ("flops", "bytes", "floor_flops")),
            *(number(r["xla"][key], 1e9) for key in ("flops", "bytes")),
            number(r["predicted_seconds"], 1e-3),
            f"{100 * r['floor_seconds'] / r['predicted_seconds']:.0f} %",
            "not measured",
        ]
        for r in results
        if "xla" in r
    ]
    if not lines:
        return []
    return [
        "No GPU was there. An H100 at its peaks (989 TFLOP/s in bfloat16, 495 in TF32, 3.35 TB/s), part by part; the",
        "floor is the encoder's products and Adam's bytes. XLA counts every operation of the step lowered for CUDA by",
        "itself, before it fuses any, and a loop's body once.",
        "",
        *table(heading, lines),
        "",
    ]


def lower(row: dict[str, Any]) -> dict[str, Any]:
    """What XLA counts in the row's step, lowered for CUDA; nothing is compiled or allocated."""
    import jax

    step, inputs = step_of(training_rows.Row(**row))
    cost = jax.jit(step).trace(*inputs).lower(lowering_platforms=("cuda",)).cost_analysis() or {}
    return {"flops": cost["flops"], "bytes": cost["bytes accessed"]}


def step_of(about: training_rows.Row) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A row's train step as a GPU would run it, and the shapes of its inputs."""
    import jax
    import jax.numpy as jnp

    from saejax.coders import CoderConfig, Sites, build
    from saejax.training import TrainConfig
    from saejax.training.optim import make_optimizer, make_schedule
    from saejax.training.state import make_init
    from saejax.training.step import default_hyper, make_step

    names = tuple(f"site{s}" for s in range(about.sites))
    reads, writes = (names[:1], names[1:]) if about.preset == "transcoder" else (names, names)
    ones = (1.0,) * len(reads)
    config = CoderConfig(
        preset=about.preset, d_sae=about.d_sae, matmul_dtype="bfloat16", **({"k": about.k} if about.sparse else {})
    )
    coder = build(config, [about.d_in] * len(reads), 1000, [about.d_in] * len(writes))
    train = TrainConfig(batch_size=about.batch, tokens=1000 * about.batch, lr=3e-4)
    optimizer = make_optimizer(train)
    step = make_step(coder, optimizer, make_schedule(train), Sites(reads, writes, ones, ones, len(reads) > 1), train)
    state = jax.eval_shape(make_init(coder, optimizer, train), 0)
    arrays = {name: jax.ShapeDtypeStruct((about.batch, about.d_in), jnp.bfloat16) for name in names}
    return step, (state, arrays, default_hyper(0))


if __name__ == "__main__":
    serve({"lower": lower})
