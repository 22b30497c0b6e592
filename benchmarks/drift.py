"""Where a training on another mesh leaves the one on one device, and over what.

    python -m benchmarks.drift [--presets=topk,standard --d_sae=64,512 --meshes=8x1,2x4 --output=benchmarks/drift.md]

The same float32 batches and 150 steps of Adam on one device and on a mesh of eight. Sums in another order differ in
last bits. After each step both sets of parameters encode the next batch in one and the same program: while they keep
the same latents of every token, parameters should differ by rounding alone; the first latent that only one of them
keeps is where a coder that is not smooth goes another way.
"""

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.equality import devices
from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import abstract_state, init_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

STEPS, B, D, K = 150, 128, 16, 4
SCALE = 0.7
Params = dict[str, np.ndarray]


def batch(step: int) -> np.ndarray:
    """Sparse sums of 32 directions, [B, D]."""
    fixed, rng = np.random.default_rng(99), np.random.default_rng(1000 + step)
    codes = (rng.random((B, 32)) < 0.1) * rng.exponential(2.0, (B, 32))
    return (codes @ fixed.normal(size=(32, D)) + 0.5).astype(np.float32)


def a_coder(preset: str, d_sae: int) -> Coder:
    return build(CoderConfig(preset=preset, d_sae=d_sae, k=K, matmul_dtype="float32"), D, STEPS)


def trained(coder: Coder, shape: tuple[int, int]) -> list[Params]:
    """The parameters before each step, and at the end."""
    config, mesh = TrainConfig(tokens=STEPS * B, batch_size=B, lr=3e-3), make_mesh(ParallelConfig(shape))
    optimizer = make_optimizer(config)
    init = make_init(coder, optimizer, config)
    abstract = abstract_state(coder, init, mesh)
    step = make_step(coder, optimizer, make_schedule(config), Sites(("h",), ("h",), (SCALE,), (SCALE,)), config)
    compiled, hyper, state = compile_step(step, abstract, mesh), default_hyper(3), init_state(init, 3, abstract)
    seen = []
    for i in range(STEPS):
        seen.append({name: np.array(value) for name, value in state.params.items()})
        state, _ = compiled(state, {"h": jax.device_put(batch(i), batch_sharding(mesh))}, hyper)
    return [*seen, {name: np.array(value) for name, value in state.params.items()}]


def apart(a: Params, b: Params) -> float:
    """The largest max |a - b| / max |a| of a parameter."""
    return max(float(np.abs(a[name] - b[name]).max() / max(np.abs(a[name]).max(), 1e-30)) for name in a)


def row(preset: str, d_sae: int, mesh: str, alone: list[Params]) -> str:
    coder = a_coder(preset, d_sae)
    along_data, along_latent = map(int, mesh.split("x"))
    other = trained(coder, (along_data, along_latent))

    @jax.jit
    def encode(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return coder.topology.pre_activations(params, x), coder.encode(params, x).dense()

    first, where = None, "-"
    for i in range(STEPS):
        (pre, f), (_, g) = (encode(p[i], SCALE * batch(i)) for p in (alone, other))
        if len(differ := np.argwhere((np.asarray(f) > 0) != (np.asarray(g) > 0))):
            token, latent = differ[0]
            where = f"step {i}, token {token}, latent {latent}: pre-activation {float(pre[token, latent]):.1e}"
            first = i
            break
    before = max(apart(alone[i], other[i]) for i in range((STEPS if first is None else first) + 1))
    after = "-" if first is None else f"{apart(alone[first + 1], other[first + 1]):.1e}"
    return f"| {preset} | {d_sae} | {mesh} | {before:.1e} | {where} | {after} | {apart(alone[-1], other[-1]):.1e} |"


_HEAD = """# Where a training on another mesh leaves the one on one device

`python -m benchmarks.drift`: {machine}, eight virtual devices. {size}.

Differences: the largest max |a - b| / max |a| of a parameter. A coder that selects, or has a ReLU, is not smooth where
a latent begins to be kept. A pre-activation closer to there than its rounding lies on the other side on another mesh;
its token gives that latent's gradient a part, or does not, and the two trainings go apart.

| preset | latents | mesh | while the same latents are kept | the first that is not | a step later | at the end |
|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="topk,standard")
    parser.add_argument("--d_sae", default="64,512", help="numbers of latents")
    parser.add_argument("--meshes", default="8x1,2x4", help="devices along data x devices along latent, eight in all")
    parser.add_argument("--output", type=Path, help="also write the table there")
    asked = parser.parse_args()
    devices(8)
    lines = [
        _HEAD.format(
            machine=f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, "
            f"jax {jax.__version__}",
            size=f"{STEPS} steps of Adam, batch {B}, width {D}, k {K}, float32",
        )
    ]
    print("\n".join(lines))
    for preset in asked.presets.split(","):
        for d_sae in map(int, asked.d_sae.split(",")):
            alone = trained(a_coder(preset, d_sae), (1, 1))
            for mesh in asked.meshes.split(","):
                lines.append(row(preset, d_sae, mesh, alone))
                print(lines[-1], flush=True)
    if asked.output:
        asked.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
