"""Bytes that the row program of attribution takes, from shapes alone: it is lowered and compiled, and never run.

Shape letters: S tokens, T slots, K features of a slot, N devices along "latent".
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from saejax.attribution.frozen import watch
from saejax.attribution.layers import Layer
from saejax.attribution.rows import listed, row_program, shardings
from saejax.attribution.settings import AttributionConfig
from saejax.kernels.batch import LATENT
from saejax.lm import decoder, logical_axes
from saejax.lm.conventions import DecoderConfig
from saejax.parallel import sharding_of


@dataclasses.dataclass(frozen=True)
class RowMemory:
    """Bytes of each device: the program's arguments, its result, and what XLA reserves besides for this backend."""

    arguments: int
    rows: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.arguments + self.rows + self.temporaries


def transcoder_layers(config: DecoderConfig, cross_layer: bool = False) -> tuple[Layer, ...]:
    """The layers of transcoders on all MLPs, one a layer, or of one cross-layer transcoder."""
    n = config.n_layer
    reaches = [tuple(range(i, n)) if cross_layer else (i,) for i in range(n)]
    return tuple(
        Layer(0 if cross_layer else i, i if cross_layer else 0, f"blocks.{i}.mlp_in", f"blocks.{i}.mlp_out", r, False)
        for i, r in enumerate(reaches)
    )


def row_memory(
    config: DecoderConfig,
    layers: Sequence[Layer],
    d_sae: int,
    length: int,
    active: int,
    settings: AttributionConfig,
    mesh: Mesh,
    dtype: Any = jnp.float32,
) -> RowMemory:
    """Compiled memory of a chunk's rows, for a prompt of `length` tokens with `active` latents a token and layer.

    `layers` are of dictionaries between places of the model's width, without skips.
    """
    put, devices, width = shardings(mesh), mesh.shape[LATENT], config.d_model

    def shape(of: tuple[int, ...], kind: Any, where: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(of, kind, sharding=put[where])

    params = jax.tree.map(
        lambda leaf, axes: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding_of(mesh, leaf.shape, axes)),
        jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0))),
        logical_axes(config),
    )
    tokens_S = jax.ShapeDtypeStruct((length,), jnp.int32)
    seen = jax.eval_shape(
        lambda params, tokens_S: watch(config, params, tokens_S, jnp.int32(length), layers), params, tokens_S
    )
    seen = jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype, "whole"), seen)
    positions, latents = np.repeat(np.arange(length), active), np.tile(np.arange(active) * d_sae // active, length)
    ((slots,), _) = listed([(positions, latents, np.ones(len(latents)))], [d_sae], devices, settings.block)
    sources = {
        "decoders": [
            shape((devices, d_sae // devices, len(layer.reaches), width), jnp.float32, "latent") for layer in layers
        ],
        "slots": [{name: shape(a.shape, a.dtype, "latent") for name, a in slots.items()} for _ in layers],
        "errors": [shape((length, width), jnp.float32, "whole") for _ in layers],
        "embeddings": seen["embeddings"],
        "skips": {},
    }
    targets = {
        "layer": shape((settings.chunk,), jnp.int32, "targets"),
        "position": shape((settings.chunk,), jnp.int32, "targets"),
        "vector": shape((settings.chunk, width), jnp.float32, "targets"),
    }
    frozen = {name: seen[name] for name in ("queries", "keys", "scales", "inputs")}
    program = row_program(config, tuple(layers), settings.block, mesh)
    # jit gives what `lower` is of; a `Callable` does not say so.
    memory = program.lower(params, frozen, sources, targets).compile().memory_analysis()  # type: ignore[attr-defined]
    return RowMemory(memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
