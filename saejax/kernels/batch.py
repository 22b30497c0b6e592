"""Sums, means and least values over the tokens of a batch, wherever they are.

    per_token(values_BF)          mean_b sum_f values, of all tokens of the batch

In a program for all devices (jit over a mesh) an array is the whole batch, and these are plain sums. In one that every
device runs on its own tokens (pmap), arrays are a device's share, and what it lacks comes from the others: so the same
coder means the same batch in both.

Derivatives there are pmap's: each device differentiates the sum of all devices' losses by its own copy of the
parameters. As every device has the whole loss, the mean over devices of these is the gradient (`of_all_copies`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

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


@jax.custom_vjp
def over_tokens(values: jax.Array) -> jax.Array:
    """sum_b values[b]: [B, ...] -> [...], of the array's own tokens.

    On a CPU a product with ones: XLA's own sum over the first axis of [2048, 49152] takes 583 ms there, this 14.
    """

    def product(values: jax.Array) -> jax.Array:
        flat = values.reshape(len(values), -1)
        sums = jnp.matmul(jnp.ones_like(flat[:, 0]), flat, precision=jax.lax.Precision.HIGHEST)
        return sums.reshape(values.shape[1:])

    return jax.lax.platform_dependent(values, cpu=product, default=lambda values: values.sum(0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def for_tokens(of_latents: jax.Array, n_tokens: int) -> jax.Array:
    """The same numbers for each token: [...] -> [n_tokens, ...]; the gradient is `over_tokens`."""
    return jnp.broadcast_to(of_latents[None], (n_tokens, *of_latents.shape))


over_tokens.defvjp(lambda values: (over_tokens(values), len(values)), lambda n, g: (for_tokens(g, n),))
for_tokens.defvjp(lambda of_latents, n: (for_tokens(of_latents, n), None), lambda n, _, g: (over_tokens(g),))


def per_token(values: jax.Array) -> jax.Array:
    """mean_b sum of values[b]: [B, ...] -> []"""
    return of_batch(values.sum()) / n_tokens(values.shape[0])


def mean_token(values: jax.Array) -> jax.Array:
    """mean_b values[b]: [B, ...] -> [1, ...]"""
    return of_batch(over_tokens(values)[None]) / n_tokens(values.shape[0])


def whole_batch(rows: jax.Array) -> jax.Array:
    """All tokens' rows in their order, [B, ...], on every device."""
    axis = device_axis()
    return jax.lax.all_gather(rows, axis, axis=0, tiled=True) if axis else rows


def of_all_copies(gradients: Any) -> Any:
    """The gradient by parameters that every device has a copy of, from each device's derivative by its own."""
    axis = device_axis()
    return jax.lax.pmean(gradients, axis) if axis else gradients
