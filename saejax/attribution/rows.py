"""The row program: for each of C targets, the direct effect of every source on it, by one backward pass.

    row_t = d target_t / d (one share for each source)      at shares 0, where the linear model of `frozen` is exact

A target is a vector at what a layer reads (a latent's encoder column) or at the end of the residual stream (a logit's),
at one position. vmap over targets makes C backward passes one program; the forward pass is the same for all of them and
gives nothing but constants, so that XLA removes it.

Over a mesh, targets lie along "data", decoder rows and the features they belong to along "latent".

Shape letters: C targets, L layers, S tokens, D width, M model width, N devices along "latent", T slots, K features of
a slot.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from saejax.attribution.frozen import linear
from saejax.attribution.layers import Layer
from saejax.attribution.sources import Slots, left, step_of, written
from saejax.kernels.batch import DATA, LATENT
from saejax.lm.conventions import DecoderConfig

Sources = dict[str, Any]
Targets = dict[str, jax.Array]


@functools.lru_cache(maxsize=8)  # prompts of one shape share a program
def row_program(config: DecoderConfig, layers: tuple[Layer, ...], block: int, mesh: Mesh) -> Callable[..., Any]:
    """jit of (params, frozen, sources, targets) -> {features: L x [C, N, T, K], errors [C, L, S], tokens [C, S]}.

    Args of the program:
        frozen: of `frozen.watch`, without what `linear` does not take.
        sources: decoders, L x [N, F / N, W, D]; slots, L x `Slots`; errors, L x [S, D]; embeddings [S, M]; skips.
        targets: layer [C] (L: the residual stream's end), position [C], vector [C, D of the widest], float32.
    """

    def rows(params: Any, frozen: Any, sources: Sources, targets: Targets) -> dict[str, Any]:
        length = sources["embeddings"].shape[0]
        zeros = {
            "features": [jnp.zeros_like(slots["value"]) for slots in sources["slots"]],
            "errors": jnp.zeros((len(layers), length)),
            "tokens": jnp.zeros(length),
        }

        def value(shares: Any, target: Targets) -> jax.Array:
            def read(layer: int, x_SD: jax.Array) -> jax.Array:
                vector_D = target["vector"][: x_SD.shape[1]]
                return _dot_at(x_SD, target["position"], jnp.where(target["layer"] == layer, vector_D, 0))

            return linear(
                config,
                params,
                frozen,
                layers,
                sources["skips"],
                read,
                lambda layer, tie: _added(layers, sources, shares, layer, tie, block),
                shares["tokens"][:, None] * sources["embeddings"].astype(jnp.float32),
            )

        return jax.vmap(jax.grad(value), (None, 0))(zeros, targets)

    over = NamedSharding(mesh, PartitionSpec(DATA))
    out = {"features": [NamedSharding(mesh, PartitionSpec(DATA, LATENT))] * len(layers), "errors": over, "tokens": over}
    return jax.jit(rows, out_shardings=out)


def shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """Shardings of the program's arguments: sources by latent, targets, and all else."""
    spec = {"latent": PartitionSpec(LATENT), "targets": PartitionSpec(DATA), "whole": PartitionSpec()}
    return {name: NamedSharding(mesh, axes) for name, axes in spec.items()}


@jax.custom_vjp
def _dot_at(x_SD: jax.Array, position: jax.Array, vector_D: jax.Array) -> jax.Array:
    """<x at the position, vector>, float32"""
    return x_SD[position].astype(jnp.float32) @ vector_D


def _dot_at_fwd(x_SD: jax.Array, position: jax.Array, vector_D: jax.Array) -> tuple[jax.Array, Any]:
    return _dot_at(x_SD, position, vector_D), (x_SD, position, vector_D)


def _dot_at_bwd(kept: Any, ct: jax.Array) -> tuple[jax.Array, None, None]:
    """The cotangent as a product of broadcasts, which XLA adds to the others without writing it down.

    The scatter that stands for it otherwise is written for every layer before the first is needed: at 26 layers of
    1,024 tokens, 8 targets, 2 GB of the 2.7 that were temporary.
    """
    x_SD, position, vector_D = kept
    here_S1 = jnp.arange(len(x_SD))[:, None] == position
    return jnp.where(here_S1, ct * vector_D[None], 0).astype(x_SD.dtype), None, None


_dot_at.defvjp(_dot_at_fwd, _dot_at_bwd)


def _added(layers: Sequence[Layer], sources: Sources, shares: Any, layer: int, tie: jax.Array, block: int) -> jax.Array:
    """The sum of the sources' shares where a layer writes, [S, D]."""
    total_SD = left(tie, shares["errors"][layer], sources["errors"][layer])
    for number, other in enumerate(layers):
        if layer in other.reaches:
            slots: Slots = sources["slots"][number]
            total_SD = total_SD + written(
                step_of(slots, block),
                other.reaches.index(layer),
                total_SD.shape,
                tie,
                shares["features"][number],
                slots,
                sources["decoders"][number],
            )
    return total_SD
