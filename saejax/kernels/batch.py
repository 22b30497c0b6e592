"""Sums, means and least values over the tokens of a batch, wherever they are.

    per_token(values_BF)          mean_b sum_f values, of all tokens of the batch

In a program for all devices (jit over a mesh) an array is the whole batch, and these are plain sums. In one that every
device runs on its own tokens (pmap), arrays are a device's share, and what it lacks comes from the others: so the same
coder means the same batch in both.

Derivatives there are pmap's: each device differentiates the sum of all devices' losses by its own copy of the
parameters. As every device has the whole loss, the mean over devices of these is the gradient (`of_all_copies`).
"""

from typing import Any

import jax

# The axes of saejax's own meshes: tokens lie on the first, latents on the second. Nobody else's axes have these names.
# So in a program over a mesh of other people's (jax.set_mesh, shard_map, pmap) arrays are whole to the kernels.
MESH_AXES = DATA, LATENT = ("saejax_data", "saejax_latent")


def device_axis() -> str:
    """Name of the axis of devices, in a program that every device runs on its own tokens; else empty."""
    mesh = jax.sharding.get_abstract_mesh()
    return DATA if mesh.axis_names == (DATA,) and mesh.manual_axes else ""


def of_batch(share: jax.Array) -> jax.Array:
    """Sum over the devices, each of which has its own tokens' share of a sum."""
    axis = device_axis()
    return jax.lax.psum(share, axis) if axis else share


def least_of_batch(share: jax.Array) -> jax.Array:
    """The least of the devices' own least values."""
    axis = device_axis()
    return jax.lax.pmin(share, axis) if axis else share


def greatest_of_batch(share: jax.Array) -> jax.Array:
    """The greatest of the devices' own greatest values."""
    axis = device_axis()
    return jax.lax.pmax(share, axis) if axis else share


def n_tokens(n_own: int) -> int:
    """Tokens of the batch, of which this program's arrays have `n_own`."""
    axis = device_axis()
    return n_own * jax.sharding.get_abstract_mesh().shape[axis] if axis else n_own


def per_token(values: jax.Array) -> jax.Array:
    """mean_b sum of values[b]: [B, ...] -> []"""
    return of_batch(values.sum()) / n_tokens(values.shape[0])


def mean_token(values: jax.Array) -> jax.Array:
    """mean_b values[b]: [B, ...] -> [1, ...]"""
    return of_batch(values.sum(0, keepdims=True)) / n_tokens(values.shape[0])


def whole_batch(rows: jax.Array) -> jax.Array:
    """All tokens' rows in their order, [B, ...], on every device."""
    axis = device_axis()
    return jax.lax.all_gather(rows, axis, axis=0, tiled=True) if axis else rows


def of_all_copies(gradients: Any) -> Any:
    """The gradient by parameters that every device has a copy of, from each device's derivative by its own."""
    axis = device_axis()
    return jax.lax.pmean(gradients, axis) if axis else gradients
