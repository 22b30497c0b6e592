"""Bytes of each device in a train step of a cross-layer transcoder as large as GPT-2's, from the compiled program.

    XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0" python -m benchmarks.memory

Nothing is allocated: shapes alone are compiled, for 1, 2, 4 and 8 devices, with the latents over all of them, and with
the rows and all parameters over "data" (fsdp). The flag spares the compiler work that moves no byte. State and batch
are the program's arguments, and the state's bytes are given back to it (donated); temporaries are what XLA reserves
besides, in its schedule for this backend.
"""

import math
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from saejax.coders import CoderConfig, Sites, build
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import abstract_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

_LAYERS = flags.DEFINE_integer("layers", 12, "Layers read and written.")
_D_IN = flags.DEFINE_integer("d_in", 768, "Width of the activations.")
_D_SAE = flags.DEFINE_integer("d_sae", 12_288, "Latents of a layer.")
_BATCH = flags.DEFINE_integer("batch", 1024, "Tokens in a batch.")
_PRESET = flags.DEFINE_string("preset", "clt", "The coder.")
_DEVICES = flags.DEFINE_multi_integer("devices", [1, 2, 4, 8], "Numbers of devices.")

GB = 1e9


def row(mesh_shape: tuple[int, int], fsdp: bool) -> str:
    """A line of the table: of one mesh."""
    started = time.perf_counter()
    layers, d_in, batch = _LAYERS.value, _D_IN.value, _BATCH.value
    config = TrainConfig(batch_size=batch, tokens=1000 * batch, lr=3e-4)
    sites = Sites(
        tuple(f"blocks.{i}.mlp_in" for i in range(layers)),
        tuple(f"blocks.{i}.mlp_out" for i in range(layers)),
        *((1.0,) * layers,) * 2,
        stacked=True,
    )
    coder = build(CoderConfig(_PRESET.value, d_sae=_D_SAE.value), [d_in] * layers, config.steps, [d_in] * layers)
    mesh, optimizer = make_mesh(ParallelConfig(mesh_shape)), make_optimizer(config)
    state = abstract_state(coder, make_init(coder, optimizer, config), mesh, fsdp)
    arrays = {
        name: jax.ShapeDtypeStruct((batch, d_in), jnp.bfloat16, sharding=batch_sharding(mesh))
        for name in sites.hook_points
    }
    step = make_step(coder, optimizer, make_schedule(config), sites, config)
    lowered = compile_step(step, state, mesh).lower(state, arrays, default_hyper(0))  # type: ignore[attr-defined]
    memory = lowered.compile().memory_analysis()
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
    )
    numbers = (held, memory.argument_size_in_bytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes)
    devices = math.prod(mesh_shape)
    cells = " | ".join(f"{number / GB:.3f}" for number in numbers)
    name = f"{mesh_shape[0]}, {mesh_shape[1]}{' fsdp' if fsdp else ''}"
    return f"| {devices} | {name} | {cells} | {time.perf_counter() - started:.0f} |"


def main(_: list[str]) -> None:
    print(
        f"{_PRESET.value}, {_LAYERS.value} layers, {_D_IN.value} -> {_D_SAE.value:,} latents a layer, "
        f"batch {_BATCH.value:,}, adam; GB (10^9 bytes) a device; {jax.devices()[0].device_kind}, "
        f"jax {jax.__version__}\n"
    )
    print("| devices | mesh data, latent | state | arguments | donated | temporaries | seconds to compile |")
    print("|---|---|---|---|---|---|---|")
    for n in _DEVICES.value:
        print(row((1, n), fsdp=False), flush=True)
    for n in _DEVICES.value:
        if n > 1:
            print(row((n, 1), fsdp=True), flush=True)


if __name__ == "__main__":
    app.run(main)
