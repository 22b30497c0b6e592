"""The matrix product of the decoder, and the library that XLA's CPU backend does it with."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from saejax.core.host import instruction_sets

_OPTION = "xla_cpu_experimental_ynn_fusion_type"
# Eigen's products in place of XLA's default library.
EIGEN: dict[str, str | bool] = {_OPTION: ""}
# The widest residual stream or MLP that was measured and is faster with Eigen.
_WIDEST = 3072


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a b [..., N, K] in the type of both.

    XLA's CPU backend uses a processor's instructions for bfloat16 (AMX) only where the product is float32. The sums are
    float32 either way, and are rounded once.
    """
    if a.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)
    return jnp.matmul(a, b)


def options_of_blocks(params: Any, mesh: Mesh) -> dict[str, str | bool]:
    """XLA's options for a program that runs blocks of such `params` without unembedding; empty: the default is best.

    On a CPU XLA has two libraries for products. Eigen is the faster one for a block's: a forward pass of GPT-2's shape
    takes 1 / 1.3 of the time on AMD Zen 3, 1 / 1.1 on AMD's AVX-512 (benchmarks/products.py). It is the slower one for
    matrices with 4,096 columns and more, such as most dictionaries, unembeddings and the MLPs of larger models. Not
    measured, so left to XLA: others' AVX-512, and no AVX2. What XLA_FLAGS says of it stays as well.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or not _measured_here() or _OPTION in os.environ.get("XLA_FLAGS", "") or not _has_option():
        return {}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    of_blocks = [leaf for path, leaf in leaves if "blocks" in jax.tree_util.keystr(path)]
    narrow = all(leaf.dtype == jnp.float32 and leaf.shape[-1] <= _WIDEST for leaf in of_blocks if leaf.ndim)
    return EIGEN if narrow else {}


@functools.cache
def _measured_here() -> bool:
    known = instruction_sets()
    return "avx2" in known and ("avx512f" not in known or "sse4a" in known)  # AMD's alone have SSE4a


@functools.cache
def _has_option() -> bool:
    """True if this XLA knows the option, which it calls experimental."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=EIGEN)
    except jax.errors.JaxRuntimeError:
        return False
    return True
