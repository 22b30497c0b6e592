"""The row program: for each of C targets, the direct effect of every source on it, by one backward pass.

    row_t    = d target_t / d (one share for each source)   at shares 0, where the linear model of `frozen` is exact
    effect_i = value_i  <cotangent[position_i], W_dec[latent_i]>        of a feature, where it writes

A target is a vector at what a layer reads (a latent's encoder column) or at the end of the residual stream (a logit's),
at one position. vmap over targets makes C backward passes one program; the forward pass is the same for all of them and
gives nothing but constants, so that XLA removes it.

Active features lie in slots of K of one position, so that a block of slots is one batched matrix product. Over a mesh,
targets lie along "data", decoder rows and the slots of their features along "latent".

Shape letters: C targets, L layers, S tokens, A active features of a layer, F latents, W layers written, D width, M
model width, N devices along "latent", T slots, K features of a slot.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from saejax.attribution.frozen import linear
from saejax.attribution.layers import Layer
from saejax.kernels.batch import DATA, LATENT
from saejax.lm.conventions import DecoderConfig

_K = 32  # on one device
Slots = dict[str, Any]  # place [N, T] int32, latent [N, T, K] int32, value [N, T, K] float32
Sources = dict[str, Any]
Targets = dict[str, jax.Array]


def listed(
    parts: Sequence[tuple[np.ndarray, ...]], widths: Sequence[int], devices: int, block: int
) -> tuple[list[Slots], list[np.ndarray]]:
    """Slots of each layer's active features, and `at`, int64 [A]: where each of them is.

    A place that is left over has value 0. The number of slots is a multiple of what `block` features take, and no layer
    has fewer than the longest, or than a block: few prompts need their own program.

    Args:
        parts: positions, latents and values [A] of each layer.
        widths: F of each layer.
    """
    size = max(4, _K // devices)  # K: the features of a position are divided among the devices
    places = [
        _places(positions_A, latents_A, width // devices, devices, size)
        for (positions_A, latents_A, _), width in zip(parts, widths, strict=True)
    ]
    counts, slots, at = [], [], []
    for *_, longest in places:  # few slots are one block of a power of two
        step = min(max(1, block // size), 1 << max(0, longest - 1).bit_length())
        counts.append(max(1, -(-longest // step)) * step)
    least = min(max(counts), max(1, block // size))
    for part, width, place, count in zip(parts, widths, places, counts, strict=True):
        positions_A, latents_A, values_A = part
        order, device, slot, column, _ = place
        shape = (devices, max(count, least), size)
        arrays = {"place": np.zeros(shape[:2], np.int32), "latent": np.zeros(shape, np.int32)}
        arrays["value"] = np.zeros(shape, np.float32)
        arrays["place"][device, slot] = positions_A[order]
        arrays["latent"][device, slot, column] = latents_A[order] % (width // devices)
        arrays["value"][device, slot, column] = values_A[order]
        slots.append(arrays)
        at.append(np.empty(len(order), np.int64))
        at[-1][order] = (device * shape[1] + slot) * size + column
    return slots, at


def _places(positions_A: np.ndarray, latents_A: np.ndarray, d_device: int, devices: int, size: int) -> tuple[Any, ...]:
    """(order of the features; in this order each one's device, slot and place there; the most slots of a device)"""
    order = np.lexsort((latents_A, positions_A, latents_A // d_device))
    device, place = latents_A[order] // d_device, positions_A[order]
    new_place = np.r_[True, (device[1:] != device[:-1]) | (place[1:] != place[:-1])][: len(order)]
    first = np.flatnonzero(new_place)
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.r_[first, len(order)]))
    opens = rank % size == 0  # a slot
    before = np.r_[0, np.cumsum(np.bincount(device[opens], minlength=devices))]
    slot = np.cumsum(opens) - 1 - before[device]
    return order, device, slot, rank % size, int(np.diff(before).max(initial=0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _written(
    step: int,
    which: int,
    shape: tuple[int, int],
    tie: jax.Array,
    shares_NTK: jax.Array,
    slots: Slots,
    W_NFWD: jax.Array,
) -> jax.Array:
    """The sum of features times their shares, [S, D], at the `which`-th of the layers that they write.

    Shares are 0 wherever this room asks for it, and so is the value; its derivative by the shares is not. That by the
    `tie` is 0, and known when the others are.
    """
    return jnp.zeros(shape, jnp.float32)


def _effects(
    step: int, which: int, shape: tuple[int, int], given: Any, ct_SD: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    """`step` slots at a time."""
    slots, W_NFWD = given
    devices, count = slots["place"].shape

    def block(part: Slots) -> jax.Array:
        rows_NPKD = jax.vmap(lambda W_FWD, latent_PK: W_FWD[latent_PK, which])(W_NFWD, part["latent"])
        # Of float32 although the model may be bfloat16: a graph's small effects are differences of large ones.
        return jnp.einsum("npd,npkd->npk", ct_SD[part["place"]], rows_NPKD, precision="highest") * part["value"]

    parts = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(devices, count // step, step, *a.shape[2:]), 1, 0), slots)
    effects = jnp.moveaxis(jax.lax.map(block, parts), 0, 1)  # [N, blocks, step, K]
    # Without a true dependency XLA leaves the effects for the end, and keeps all layers' cotangents until then.
    return 0 * effects.sum(), effects.reshape(devices, count, -1), None, None


_written.defvjp(lambda step, which, shape, *arrays: (jnp.zeros(shape, jnp.float32), arrays[2:]), _effects)


@jax.custom_vjp
def _left(tie: jax.Array, shares_S: jax.Array, e_SD: jax.Array) -> jax.Array:
    """As `_written`, of what no feature explains: one vector a token."""
    return jnp.zeros_like(e_SD)


def _left_bwd(e_SD: jax.Array, ct_SD: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    effects_S = jax.lax.optimization_barrier((ct_SD * e_SD).sum(1))  # else the tie has a sum of its own
    return 0 * effects_S.sum(), effects_S, None


_left.defvjp(lambda tie, shares_S, e_SD: (jnp.zeros_like(e_SD), e_SD), _left_bwd)


@functools.lru_cache(maxsize=8)  # prompts of one shape share a program
def row_program(
    config: DecoderConfig, layers: tuple[Layer, ...], block: int, mesh: Mesh, also: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """jit of (params, frozen, sources, targets) -> {features: L x [C, N, T, K], errors [C, L, S], tokens [C, S]}.

    Args:
        also: of `linear`: layers L + 1, ... of targets.

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
            def added(layer: int, tie: jax.Array) -> jax.Array:
                return _added(layers, sources, shares, layer, tie, block)

            embeddings_SM = shares["tokens"][:, None] * sources["embeddings"].astype(jnp.float32)
            read = functools.partial(read_at, target)
            return linear(config, params, frozen, layers, sources["skips"], read, added, embeddings_SM, also)

        return jax.vmap(jax.grad(value), (None, 0))(zeros, targets)

    over = NamedSharding(mesh, PartitionSpec(DATA))
    out = {"features": [NamedSharding(mesh, PartitionSpec(DATA, LATENT))] * len(layers), "errors": over, "tokens": over}
    return jax.jit(rows, out_shardings=out)


def shardings(mesh: Mesh) -> dict[str, NamedSharding]:
    """Shardings of the program's arguments: sources by latent, targets, and all else."""
    spec = {"latent": PartitionSpec(LATENT), "targets": PartitionSpec(DATA), "whole": PartitionSpec()}
    return {name: NamedSharding(mesh, axes) for name, axes in spec.items()}


def read_at(target: Targets, layer: int, x_SD: jax.Array) -> jax.Array:
    """<x at the target's position, its vector> of the target's layer, 0 of others."""
    vector_D = target["vector"][: x_SD.shape[1]]
    return _dot_at(x_SD, target["position"], jnp.where(target["layer"] == layer, vector_D, 0))


@jax.custom_vjp
def _dot_at(x_SD: jax.Array, position: jax.Array, vector_D: jax.Array) -> jax.Array:
    """<x at the position, vector>, float32"""
    return x_SD[position].astype(jnp.float32) @ vector_D


def _dot_at_bwd(arguments: Any, ct: jax.Array) -> tuple[jax.Array, None, None]:
    """The cotangent as a product of broadcasts, which XLA adds to the others without writing it down.

    The scatter that stands for it otherwise is written for every layer before the first is needed: at 26 layers of
    1,024 tokens, 8 targets, 2 GB of the 2.7 that were temporary.
    """
    x_SD, position, vector_D = arguments
    here_S1 = jnp.arange(len(x_SD))[:, None] == position
    return jnp.where(here_S1, ct * vector_D[None], 0).astype(x_SD.dtype), None, None


_dot_at.defvjp(lambda *arguments: (_dot_at(*arguments), arguments), _dot_at_bwd)


def _added(layers: Sequence[Layer], sources: Sources, shares: Any, layer: int, tie: jax.Array, block: int) -> jax.Array:
    """The sum of the sources' shares where a layer writes, [S, D]."""
    total_SD = _left(tie, shares["errors"][layer], sources["errors"][layer])
    for number, other in enumerate(layers):
        if layer in other.reaches:
            slots: Slots = sources["slots"][number]
            _, count, size = slots["latent"].shape
            how = min(max(1, block // size), count), other.reaches.index(layer), total_SD.shape
            total_SD = total_SD + _written(*how, tie, shares["features"][number], slots, sources["decoders"][number])
    return total_SD
