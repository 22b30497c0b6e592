"""The k largest of all by counting, against sorting: ties, zeros, tiny and huge numbers, any shape, any sharding."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from saejax.kernels.selection import largest_mask
from saejax.parallel import DATA, LATENT, ParallelConfig, make_mesh

MASK = jax.jit(largest_mask)
# Below the smallest normal number, at it, and next to the largest; a zero with a sign.
EDGES = np.array([0, -0.0, 1e-45, 3e-45, 1e-40, 1.1754944e-38, 1e-3, 1, 1.0000001, 3e38, 3.4028235e38], np.float32)
# A program each: flat, a batch of latents, with groups, one number.
SHAPES = ((37,), (8, 16), (4, 3, 8), (1,))


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        "normal": np.maximum(rng.normal(size=(8, 64)), 0),
        "ties": np.maximum(rng.integers(-4, 5, size=(8, 64)), 0),
        "edges": rng.choice(EDGES, size=(8, 64)),
        "zeros": np.zeros((8, 64)),
        "equal": np.full((8, 64), 2.5),
    }
    return {name: a.astype(np.float32) for name, a in arrays.items()}


def _wanted(values: np.ndarray, k: int) -> np.ndarray:
    """By a stable sort: the first k in falling order, then in row-major order, of those that are positive."""
    flat = values.ravel().astype(np.float64)
    mask = np.zeros(flat.size, bool)
    mask[np.argsort(-flat, kind="stable")[:k]] = True
    return (mask & (flat > 0)).reshape(values.shape)


@pytest.mark.parametrize("k", [1, 2, 7, 100, 511, 512, 600])
@pytest.mark.parametrize("which", _arrays())
def test_the_mask_holds_exactly_k_positive_and_first_ties_win(which: str, k: int) -> None:
    values = _arrays()[which]
    got = np.asarray(MASK(values, k))
    np.testing.assert_array_equal(got, _wanted(values, k))
    assert got.sum() == min(k, (values.astype(np.float64) > 0).sum())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_numbers_any_shape_any_k(data: Any) -> None:
    """Numbers that hypothesis makes up, and edges again and again, so that most borders have ties."""
    shape = data.draw(st.sampled_from(SHAPES))
    size = int(np.prod(shape))
    number = st.one_of(st.sampled_from(EDGES.tolist()), st.floats(0, float(np.finfo(np.float32).max), width=32))
    values = np.array(data.draw(st.lists(number, min_size=size, max_size=size)), np.float32).reshape(shape)
    k = data.draw(st.integers(1, size + 2))
    np.testing.assert_array_equal(np.asarray(MASK(values, k)), _wanted(values, k))


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (1, 8)])
def test_any_sharding_gives_the_same_bits(shape: tuple[int, int]) -> None:
    sharding = NamedSharding(make_mesh(ParallelConfig(shape)), PartitionSpec(DATA, LATENT))
    for name, values in _arrays().items():
        placed = jax.device_put(values, sharding)
        for k in (1, 37, 300):
            np.testing.assert_array_equal(MASK(placed, k), MASK(values, k), err_msg=name)
