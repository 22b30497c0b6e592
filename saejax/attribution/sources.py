"""The active features of one layer as sources: what a cotangent where they write says of each of them.

    effect_i = value_i  <cotangent[position_i], W_dec[latent_i]>

They lie in slots of K features of one position, so that a block of slots is one batched matrix product. Over devices
each has the slots of the latents whose decoder rows it holds.

Shape letters: N devices along "latent", T slots, K features of a slot, F latents, W layers written, D width, S tokens,
A active features, C targets.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_K = 32  # on one device
Slots = dict[str, Any]  # place [N, T] int32, latent [N, T, K] int32, value [N, T, K] float32


@dataclasses.dataclass(frozen=True)
class Listed:
    """Slots of A features (a place that is left over has value 0), and `at`, int64 [A]: where each of them is."""

    slots: Slots
    at: np.ndarray


def listed(
    positions_A: np.ndarray, latents_A: np.ndarray, values_A: np.ndarray, d_sae: int, devices: int, block: int
) -> Listed:
    """Slots for the features, their number a multiple of what `block` features take."""
    d_device = d_sae // devices
    device_A = latents_A // d_device
    size = _slot(devices)
    order = np.lexsort((latents_A, positions_A, device_A))
    device, place = device_A[order], positions_A[order]
    new_place = np.r_[True, (device[1:] != device[:-1]) | (place[1:] != place[:-1])][: len(order)]
    first = np.flatnonzero(new_place)
    rank = np.arange(len(order)) - np.repeat(first, np.diff(np.r_[first, len(order)]))
    opens = rank % size == 0  # a slot
    slot = np.cumsum(opens) - 1
    before = np.r_[0, np.cumsum(np.bincount(device[opens], minlength=devices))]
    slot = slot - before[device]
    count = _whole_blocks(int(np.diff(before).max(initial=0)), block // size)
    slots = {name: np.zeros(shape, dtype) for name, (shape, dtype) in _shapes(devices, count).items()}
    slots["place"][device, slot] = place
    slots["latent"][device, slot, rank % size] = latents_A[order] % d_device
    slots["value"][device, slot, rank % size] = values_A[order]
    at = np.empty(len(order), np.int64)
    at[order] = (device * count + slot) * size + rank % size
    return Listed(slots, at)


def alike(lists: Sequence[Listed], block: int) -> list[Listed]:
    """The same with as many slots in each as in the longest, or as a block has: few prompts need their own program."""
    counts = [one.slots["place"].shape[1] for one in lists]
    size = lists[0].slots["latent"].shape[2]
    common = min(max(counts), max(1, block // size))

    def longer(one: Listed, count: int) -> Listed:
        more = max(count, common) - count
        slots = {name: np.pad(a, ((0, 0), (0, more), (0, 0))[: a.ndim]) for name, a in one.slots.items()}
        return Listed(slots, one.at + one.at // (count * size) * (more * size))

    return [longer(one, count) for one, count in zip(lists, counts, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def written(
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


def _zero(step: int, which: int, shape: tuple[int, int], *given: Any) -> tuple[jax.Array, Any]:
    return jnp.zeros(shape, jnp.float32), given[2:]


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


written.defvjp(_zero, _effects)


@jax.custom_vjp
def left(tie: jax.Array, shares_S: jax.Array, e_SD: jax.Array) -> jax.Array:
    """As `written`, of what no feature explains: one vector a token."""
    return jnp.zeros_like(e_SD)


def _left_bwd(e_SD: jax.Array, ct_SD: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    effects_S = jax.lax.optimization_barrier((ct_SD * e_SD).sum(1))  # else the tie has a sum of its own
    return 0 * effects_S.sum(), effects_S, None


left.defvjp(lambda tie, shares_S, e_SD: (jnp.zeros_like(e_SD), e_SD), _left_bwd)


def slots_shape(length: int, active: int, devices: int, block: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """{array: (shape, dtype)} of slots, where each of `length` tokens has `active` features, evenly over devices."""
    per_device, size = -(-active // devices), _slot(devices)
    return _shapes(devices, _whole_blocks(length * -(-per_device // size), block // size))


def step_of(slots: Slots, block: int) -> int:
    """Slots of a block."""
    _, count, size = slots["latent"].shape
    return min(max(1, block // size), count)


def _slot(devices: int) -> int:
    """K: the features of a position are divided among the devices."""
    return max(4, _K // devices)


def _shapes(devices: int, count: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    size = _slot(devices)
    return {
        "place": ((devices, count), np.int32),
        "latent": ((devices, count, size), np.int32),
        "value": ((devices, count, size), np.float32),
    }


def _whole_blocks(count: int, step: int) -> int:
    """`count` slots and what fills up the last block; few slots are one block of a power of two."""
    step = min(max(1, step), 1 << max(0, count - 1).bit_length())
    return max(1, -(-count // step)) * step
