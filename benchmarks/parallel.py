"""Bytes that one device sends in a train step, for each mesh over 8 devices, read from the compiled program.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.parallel [--batch=4096 --d_in=768]

Nothing is run: a program says what it sends. `always` is sent in every step, `in branches` at most beside it, where
latents are dead (AuxK) or more are equal at the border than are wanted (batchtopk). `least` is what no split of tokens
and latents can do without: the gradients of a device's weights summed over "data", the reconstruction over "latent".
`left to the compiler` is the same step under jit without `on_mesh`, every branch taken.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh, replicated
from saejax.plans.collectives import collectives
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import TrainState, abstract_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

_BATCH = flags.DEFINE_integer("batch", 4096, "Tokens in a batch.")
_D_IN = flags.DEFINE_integer("d_in", 768, "Width of the activations.")
_D_SAE = flags.DEFINE_integer("d_sae", 24576, "Latents, of a layer in a cross-layer transcoder.")
_K = flags.DEFINE_integer("k", 32, "Latents kept for a token.")
_CODERS = flags.DEFINE_list(
    "coders", "autoencoder/topk,autoencoder/batchtopk,clt/topk,clt/batchtopk", "Topology and sparsity of each row."
)
_SITES = flags.DEFINE_integer("sites", 3, "Layers of the cross-layer transcoder.")

MESHES = ((1, 1), (8, 1), (4, 2), (2, 4), (1, 8))


def programs(coder: Coder, stacked: bool, mesh: jax.sharding.Mesh) -> tuple[str, str, TrainState]:
    """The compiled step's text, the same left to the compiler, and the state's shapes."""
    hooks = tuple(f"h{i}" for i in range(_SITES.value if stacked else 1))
    sites = Sites(hooks, hooks, (1.0,) * len(hooks), (1.0,) * len(hooks), stacked)
    config = TrainConfig(batch_size=_BATCH.value, tokens=100 * _BATCH.value, lr=3e-4)
    optimizer: optax.GradientTransformationExtraArgs = make_optimizer(config)
    abstract = abstract_state(coder, make_init(coder, optimizer, config), mesh)
    step = make_step(coder, optimizer, make_schedule(config), sites, config)
    state: Any = jax.tree.map(lambda s: s.sharding, abstract)
    split, whole = batch_sharding(mesh), replicated(mesh)
    plain = jax.jit(step, in_shardings=(state, split, whole), out_shardings=(state, whole))
    arrays = {hook: jax.ShapeDtypeStruct((_BATCH.value, _D_IN.value), jnp.bfloat16, sharding=split) for hook in hooks}
    lowered = [
        jitted.lower(abstract, arrays, default_hyper(0))  # type: ignore[attr-defined]
        for jitted in (compile_step(step, abstract, mesh), plain)
    ]
    ours, theirs = (program.compile().as_text() for program in lowered)
    return ours, theirs, abstract


def least(abstract: TrainState, coder: Coder, batch: int, n_data: int, n_latent: int) -> float:
    """Bytes without which a device cannot take its share of a step."""
    own = sum(4 * math.prod(s.sharding.shard_shape(s.shape)) for s in jax.tree.leaves(abstract.params))
    written = 4 * batch // n_data * math.prod(coder.topology.out_shape)
    return 2 * (n_data - 1) / n_data * own + 2 * (n_latent - 1) / n_latent * written


def main(_: list[str]) -> None:
    b, d, f, k = _BATCH.value, _D_IN.value, _D_SAE.value, _K.value
    print(f"jax {jax.__version__}, batch {b}, d_in {d}, d_sae {f}, k {k}, {_SITES.value} layers in clt; MB a device\n")
    print("| coder | mesh | always | in branches | least | largest all-gather | left to the compiler |")
    print("|---|---|---|---|---|---|---|")
    for topology, sparsity in (name.split("/") for name in _CODERS.value):
        config = CoderConfig(sparsity, topology=topology, d_sae=f, k=k, init="uniform")
        stacked = topology == "clt"
        coder = build(config, [d] * _SITES.value if stacked else d, 100)
        for shape in MESHES:
            ours, theirs, abstract = programs(coder, stacked, make_mesh(ParallelConfig(shape)))
            found = collectives(ours)
            gathered = max((c.size for c in found if c.kind == "all-gather"), default=0)
            figures = (
                sum(c.sent for c in found if not c.branch),
                sum(c.sent for c in found if c.branch),
                least(abstract, coder, b, *shape),
                gathered,
                sum(c.sent for c in collectives(theirs)),
            )
            cells = " | ".join(f"{figure / 1e6:,.1f}" for figure in figures)
            print(f"| {topology} {sparsity} | {shape[0]} x {shape[1]} | {cells} |", flush=True)


if __name__ == "__main__":
    app.run(main)
