"""The matrix product of the decoder."""

import jax
import jax.numpy as jnp


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b [..., N, K] in the type of both.

    XLA's CPU backend uses a processor's instructions for bfloat16 (AMX) only where the product is float32. The sums are
    float32 either way, and are rounded once.
    """
    if a.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)
    return jnp.matmul(a, b)
