"""The k largest of all by counting, against sorting: ties, zeros, tiny and huge numbers, any shape, any sharding."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from saejax.kernels import selection
from saejax.kernels.selection import largest_listed, largest_mask, largest_of_rows
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


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 15, 16, 127, 128, 129, 5000])
def test_true_entries_are_listed_in_their_order(n: int, share: float) -> None:
    mask = np.random.default_rng(n).random(n) < share
    wanted = np.flatnonzero(mask)
    for most in {len(wanted), len(wanted) + 3} - {0}:
        got = np.asarray(selection._ranked(jax.numpy.asarray(mask), most))
        np.testing.assert_array_equal(got, np.append(wanted, [n] * (most - len(wanted))))


@pytest.mark.parametrize("n", [1, 31, 32, 769, 1000, 20_000])
def test_the_largest_pattern_that_enough_of_a_long_row_reach(n: int) -> None:
    """Counts of all lengths fit where three of them share a number; the largest pattern has all 32 bits."""
    rng = np.random.default_rng(n)
    keys = rng.integers(0, 2**32, size=(3, n), dtype=np.uint32)
    keys[1], keys[2] = 2**32 - 1, rng.integers(0, 3, size=n)
    for k in {1, n // 2 + 1, n}:
        got = np.asarray(selection._kth(jax.numpy.asarray(keys), lambda n_RC, k=k: n_RC >= k))
        np.testing.assert_array_equal(got, np.sort(keys, axis=1)[:, n - k])


def _tiny(which: str) -> np.ndarray:
    """[8, 512] of numbers that a CPU's comparison of floats takes for 0: all of them, a few among zeros, of both signs,
    or those around the smallest normal number."""
    rng = np.random.default_rng(0)
    low, high = (0x00700000, 0x00900000) if which == "around" else (1, 0x00800000)
    bits = rng.integers(low, high, size=(8, 512), dtype=np.int32)
    if which == "few":
        bits = np.where(rng.random(bits.shape) < 0.05, bits, 0)
    if which == "signed":
        bits = np.where(rng.random(bits.shape) < 0.5, bits, bits | np.int32(-(2**31)))
    return bits.astype(np.int32).view(np.float32)


@pytest.mark.parametrize("k", [4, 100, 300])
@pytest.mark.parametrize("which", ["all", "few", "signed", "around"])
def test_every_selection_is_exact_below_the_smallest_normal_number(which: str, k: int) -> None:
    """As a mask, a list, and by rows: in two rounds (k of 4), and in one."""
    values = _tiny(which)
    wanted = _wanted(values, 8 * k)
    if which != "signed":
        np.testing.assert_array_equal(np.asarray(MASK(values, 8 * k)), wanted)
    rows, latents = jax.jit(largest_listed, static_argnums=(1, 2))(values, 8 * k, 8 * k)
    listed = np.zeros((9, 512), bool)
    listed[np.asarray(rows), np.asarray(latents)] = True
    np.testing.assert_array_equal(listed[:8], wanted)
    order = np.argsort(-values.astype(np.float64), axis=1, kind="stable")[:, :k]
    for falling in (True, False):
        found = jax.jit(largest_of_rows, static_argnums=(1, 2))(values, k, falling)
        np.testing.assert_array_equal(np.asarray(found), order if falling else np.sort(order, axis=1))


@pytest.mark.parametrize("shape", [(8, 1), (2, 4), (1, 8)])
def test_any_sharding_gives_the_same_bits(shape: tuple[int, int]) -> None:
    sharding = NamedSharding(make_mesh(ParallelConfig(shape)), PartitionSpec(DATA, LATENT))
    for name, values in _arrays().items():
        placed = jax.device_put(values, sharding)
        for k in (1, 37, 300):
            np.testing.assert_array_equal(MASK(placed, k), MASK(values, k), err_msg=name)
