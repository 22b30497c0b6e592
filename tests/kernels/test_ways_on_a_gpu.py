"""The ways that are meant for a GPU, run on a CPU: the same selection to the bit, the same sums, and few kernels.

A GPU starts a kernel for every operation of every turn of a loop, which bound a small step on an H100. So loops that
help a CPU are not lowered for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from saejax.kernels import pairs, sparse
from saejax.kernels.selection import largest_listed, largest_mask, largest_of_rows
from saejax.parallel import DATA, LATENT, ParallelConfig, make_mesh, on_mesh


@pytest.fixture
def gpu_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled from here on takes the branch of an NVIDIA card."""

    def of_cuda(*args: Any, default: Callable[..., Any] | None = None, **ways: Callable[..., Any]) -> Any:
        way = ways.get("cuda", default)
        assert way is not None
        return way(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", of_cuda)


def values(kind: str) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(8, 2, 64)).astype(np.float32)
    with_signs = {
        "equal": np.round(2 * np.abs(x)),
        "few": np.where(x > 1.5, x, 0),
        "signed": x,
        "around": np.abs(x) * 1e-41,
    }
    return np.asarray(with_signs[kind] * np.float32(1), np.float32)


def wanted(x: np.ndarray, k: int) -> np.ndarray:
    """bool: the k largest of all positive numbers, of equals the first; by numpy's stable sort of bits."""
    bits = np.where(np.signbit(x), 0, x.view(np.uint32)).ravel()
    mask = np.zeros(x.size, bool)
    mask[np.argsort(~bits, kind="stable")[:k]] = True
    return (mask & (bits > 0)).reshape(x.shape)


@pytest.mark.parametrize("kind", ["equal", "few", "signed", "around"])
@pytest.mark.parametrize("mesh", [(1, 1), (2, 4)])
def test_selection_by_digits_is_exact(kind: str, mesh: tuple[int, int], gpu_ways: None) -> None:
    x, on = values(kind), make_mesh(ParallelConfig(mesh))
    placed = jax.device_put(x, NamedSharding(on, PartitionSpec(DATA, None, LATENT)))

    def every(v: jax.Array) -> Any:
        ks = [largest_mask(v, k) for k in (0, 3, 100, 700)]
        return ks, largest_listed(v, 100, 100), largest_of_rows(v, 5), largest_of_rows(v, 5, falling=False)

    masks, (rows, latents), falling, rising = jax.jit(on_mesh(every, on))(placed)
    for mask, k in zip(masks, (0, 3, 100, 700), strict=True):
        np.testing.assert_array_equal(mask, wanted(x, k))
    listed = np.zeros((16, 64), bool)
    there = np.asarray(rows) < 16
    listed[np.asarray(rows)[there], np.asarray(latents)[there]] = True
    np.testing.assert_array_equal(listed.reshape(x.shape), wanted(x, 100))
    order = np.argsort(-x.astype(np.float64), axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(falling, order)
    np.testing.assert_array_equal(rising, np.sort(order, -1))


def test_sums_at_once_are_the_sums(gpu_ways: None) -> None:
    rng = np.random.default_rng(0)
    W_FD, g_BD, values_BK = (rng.normal(size=s).astype(np.float32) for s in ((64, 12), (9, 12), (9, 5)))
    indices_BK = np.stack([rng.permutation(64)[:5] for _ in range(9)]).astype(np.int32)
    gathered_BKD = W_FD.astype(np.float64)[indices_BK]
    decoded = jax.jit(sparse._weighted_rows)(values_BK, indices_BK, W_FD)
    np.testing.assert_allclose(decoded, np.einsum("bk,bkd->bd", values_BK, gathered_BKD), rtol=1e-5, atol=1e-5)
    products = jax.jit(sparse._row_products)(g_BD, indices_BK, W_FD)
    np.testing.assert_allclose(products, np.einsum("bd,bkd->bk", g_BD, gathered_BKD), rtol=1e-5, atol=1e-5)
    wide = rng.normal(size=(2, 2 * pairs._TURN, 3)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(pairs.turned)(wide), np.swapaxes(wide, -1, -2))


def test_no_loop_of_a_cpu_is_lowered_for_cuda() -> None:
    x_BF, W_FD, values_BK = (
        np.zeros((64, 4096), np.float32),
        np.zeros((4096, 768), np.float32),
        np.zeros((64, 32), np.float32),
    )
    indices_BK = np.zeros((64, 32), np.int32)
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "decode": (sparse._weighted_rows, (values_BK, indices_BK, W_FD)),
        "gradient by the values": (sparse._row_products, (x_BF[:, :768], indices_BK, W_FD)),
        "turned": (pairs.turned, (W_FD,)),
    }
    for name, (function, arrays) in programs.items():
        traced = jax.jit(function).trace(*arrays)
        assert "stablehlo.while" in traced.lower(lowering_platforms=("cpu",)).as_text(), name
        assert "stablehlo.while" not in traced.lower(lowering_platforms=("cuda",)).as_text(), name
    text = jax.jit(lambda v: largest_of_rows(v, 32, falling=False)).trace(jnp.asarray(x_BF))
    cuda, cpu = (text.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu"))
    # Candidates that a number is compared with in one turn: four bits, or two.
    assert "64x15x" in cuda and "64x15x" not in cpu


def test_selection_by_digits_works_in_another_program_s_shard_map(gpu_ways: None) -> None:
    x = np.round(np.abs(np.random.default_rng(1).normal(size=(8, 1024))) * 8).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ("data", "latent"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = PartitionSpec(("data", "latent"))
    of_rows = jax.shard_map(lambda v: largest_of_rows(v, 8, falling=False), mesh=mesh, in_specs=rows, out_specs=rows)
    np.testing.assert_array_equal(jax.jit(of_rows)(x), np.sort(np.argsort(-x, kind="stable")[:, :8], -1))
