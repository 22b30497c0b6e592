"""Random streams: no key is ever stored; each is a pure function of (seed, name, step)."""

import zlib

import jax


def stream(seed: int | jax.Array, name: str, step: int | jax.Array = 0) -> jax.Array:
    """fold_in(fold_in(key(seed), crc32(name)), step): an independent key for every name and step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode())), step)
