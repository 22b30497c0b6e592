"""Lists of kept entries: what is listed, the products and their gradients, against plain references in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny.covering import rest_in

from saejax.kernels import listed, pairs
from saejax.kernels.groups import Groups
from saejax.kernels.selection import largest_listed, largest_of_rows
from saejax.kernels.sparse import decode_rows, rows_of_columns
from saejax.parallel import DATA, LATENT, ParallelConfig, make_mesh, on_mesh, replicated

pytestmark = pytest.mark.usefixtures("by_blocks")
MESHES = ((1, 1), (8, 1), (4, 2), (1, 8))


def _list(n_rows: int, n_latents: int, n_pairs: int, skew: float) -> dict[str, Any]:
    """A list in the order of rows; a large `skew` favours the first latents; the last pairs are nobody's."""
    rng = np.random.default_rng(n_pairs)
    rows = np.sort(rng.integers(0, n_rows, n_pairs))
    rows[n_pairs - n_pairs // 10 :] = n_rows
    return {
        "rows": rows.astype(np.int32),
        "latents": (rng.random(n_pairs) ** skew * n_latents).astype(np.int32),
        "values": rng.normal(size=n_pairs).astype(np.float32),
    }


# Ragged sizes, some of them long; all pairs on one latent, which is many times as long as a part; one pair; rows
# without any.
@pytest.mark.parametrize("held", [2**24, 24])
@pytest.mark.parametrize(
    ("n_rows", "n_latents", "D", "n_pairs", "skew"),
    [(16, 32, 8, 50, 1.0), (100, 300, 24, 900, 3.0), (7, 5, 3, 700, 40.0), (9, 4, 1, 1, 1.0), (2000, 64, 16, 90, 1.0)],
)
def test_sums_of_rows_and_products_are_those_of_the_references(
    n_rows: int, n_latents: int, D: int, n_pairs: int, skew: float, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "_HELD", held)  # what long rows come to, all at once and in pieces
    monkeypatch.setattr(pairs, "_PIECE", held)  # the products too
    a, rng = _list(n_rows, n_latents, n_pairs, skew), np.random.default_rng(1)
    W, g = (rng.normal(size=(n, D)).astype(np.float32) for n in (n_latents, n_rows))
    rows, latents, values = a["rows"], a["latents"], a["values"]
    there = rows < n_rows

    @jax.jit
    def sums(values: Any, rows: Any, latents: Any, W: Any, g: Any) -> tuple[Any, ...]:
        order = pairs.ordered(jnp.where(rows < n_rows, latents, n_latents), n_latents, D)
        return (
            pairs.weighted_sums(values, latents, pairs.ordered(rows, n_rows, D), W),
            pairs.weighted_sums_reference(values, latents, rows, W, n_rows),
            pairs.weighted_sums(values, jnp.minimum(rows, n_rows - 1), order, g),
            pairs.row_products([(g, W)], pairs.ordered(rows, n_rows, D), latents),
            pairs.row_products_reference(g, rows, latents, W),
        )

    of_rows, of_latents = np.zeros((n_rows, D)), np.zeros((n_latents, D))
    np.add.at(of_rows, rows[there], values[there, None].astype(np.float64) * W[latents[there]])
    np.add.at(of_latents, latents[there], values[there, None].astype(np.float64) * g[rows[there]])
    products = (g[rows[there]].astype(np.float64) * W[latents[there]]).sum(-1)
    got = sums(values, rows, latents, W, g)
    wanted = (of_rows, of_rows, of_latents, products, products)
    for i, (one, want) in enumerate(zip((*got[:3], *(p[there] for p in got[3:])), wanted, strict=True)):
        np.testing.assert_allclose(one, want, rtol=0, atol=1e-6 * max(1.0, float(np.abs(want).max())), err_msg=str(i))


@pytest.mark.parametrize(("n_rows", "k", "D"), [(3, 1, 8), (20, 37, 8), (24, 16, 12), (9, 32, 4)])
def test_sums_of_rows_of_one_length_are_those_of_float64(
    n_rows: int, k: int, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that fill their last block and others, and lengths that fill their last turn and others."""
    monkeypatch.setattr(pairs, "_PAIRS_IN_BLOCK", 8 * D)
    rng = np.random.default_rng(k)
    weights, table = rng.normal(size=(n_rows, k)).astype(np.float32), rng.normal(size=(50, D)).astype(np.float32)
    sources = rng.integers(0, 50, (n_rows, k)).astype(np.int32)
    got = jax.jit(pairs.even_sums_on_cpu)(weights, sources, table)
    wanted = (weights[..., None].astype(np.float64) * table[sources]).sum(1)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_sums_of_a_long_list_take_no_memory_of_its_length_times_the_width() -> None:
    """Nothing is run. The sums of one group, from the list of all: 8.9 GB before long rows went in pieces."""
    n_pairs, n_rows, D = 2**24, 2**13, 4096
    shapes = [jax.ShapeDtypeStruct((n_pairs,), kind) for kind in (jnp.float32, jnp.int32, jnp.int32)]

    def sums(values: Any, rows: Any, latents: Any, W: Any) -> Any:
        return pairs.weighted_sums(values, latents, pairs.ordered(rows, n_rows, D), W)

    compiled = jax.jit(sums).lower(*shapes, jax.ShapeDtypeStruct((n_rows, D), jnp.float32)).compile()
    of_list, out = 4 * n_pairs, 4 * n_rows * D
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * of_list + 4 * out + 2**30


@pytest.mark.parametrize("listed_pairs", [False, True])
def test_small_products_are_plain_and_large_ones_by_blocks(listed_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers at the bound and above it; loops and sorts only above."""
    monkeypatch.setattr(pairs, "FEW", 24 * 4 * 8)
    rng = np.random.default_rng(4)
    W, x = rng.normal(size=(32, 8)).astype(np.float32), rng.normal(size=(40, 8)).astype(np.float32)
    latents = np.argsort(rng.random((40, 32)))[:, :4].astype(np.int32)
    values = rng.normal(size=(40, 4)).astype(np.float32)

    def decoded(values: Any, latents: Any, W: Any) -> Any:
        if not listed_pairs:
            return decode_rows(values, latents, W)
        rows = jnp.repeat(jnp.arange(len(values), dtype=jnp.int32), 4)
        return listed.decode_listed(values.reshape(-1), rows, latents.reshape(-1), Groups.one(W), len(values), 1)

    def gradients(values: Any, latents: Any, W: Any, x: Any) -> Any:
        return jax.value_and_grad(lambda v, W: (decoded(v, latents, W) * x).sum(), (0, 1))(values, W)

    for n in (24, 40):
        a = values[:n], latents[:n], W, x[:n]
        lowered = jax.jit(gradients).lower(*a)
        text = lowered.as_text()
        assert ("stablehlo.while" in text) == ("stablehlo.sort" in text) == (n > 24)
        out, (of_values, of_W) = lowered.compile()(*a)
        dense = np.zeros((n, 32))
        np.put_along_axis(dense, latents[:n].astype(np.int64), values[:n].astype(np.float64), axis=1)
        np.testing.assert_allclose(out, (dense @ W * x[:n]).sum(), rtol=1e-5)
        np.testing.assert_allclose(of_W, dense.T @ x[:n], rtol=0, atol=1e-5)
        np.testing.assert_allclose(of_values, np.take_along_axis(x[:n] @ W.T, latents[:n], 1), rtol=0, atol=1e-5)


def test_an_order_keeps_pairs_of_one_row_as_they_stood_also_where_one_number_is_too_small() -> None:
    rows = np.array([3, 1, 1, 9, 0, 3, 1, 7], np.int32)
    for n_rows in (8, 2**30):  # so many rows times pairs pass 32 bits
        if n_rows == 8:
            found = pairs.ordered(rows, n_rows, 1)
            np.testing.assert_array_equal(found.places, [4, 1, 2, 6, 0, 5, 7, 3])
            np.testing.assert_array_equal(found.sizes, [1, 3, 0, 2, 0, 0, 0, 1])
        else:
            lowered = jax.jit(lambda r: pairs.ordered(r, 2**30, 1)).lower(rows).as_text()
            assert "num_keys" not in lowered and lowered.count("stablehlo.sort") == 1


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        "normal": rng.normal(size=(16, 96)),
        "ties": rng.integers(-4, 5, size=(16, 96)),
        "zeros": np.zeros((16, 96)),
        "equal": np.full((16, 96), 2.5),
        "one full row": np.where(np.arange(16)[:, None] == 5, 3 + rng.random((16, 96)), rng.random((16, 96))),
        "groups": rng.normal(size=(8, 3, 32)),
        "groups, ties": rng.integers(-2, 3, size=(8, 3, 32)),
    }
    return {name: a.astype(np.float32) for name, a in arrays.items()}


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s == (4, 2) else pytest.mark.ci) for s in MESHES])
def test_lists_hold_the_entries_of_the_mask_in_their_order_on_every_mesh(shape: tuple[int, int]) -> None:
    mesh = make_mesh(ParallelConfig(shape))

    @functools.lru_cache
    def found(ndim: int, per_row: int) -> Callable[..., Any]:
        del ndim
        rows = {2: 16, 3: 24}
        return jax.jit(on_mesh(lambda v, k: largest_listed(v, k, per_row * rows[v.ndim]), mesh))

    for name, signed in _arrays().items():
        values = np.maximum(signed, 0)
        placed = jax.device_put(values, NamedSharding(mesh, PartitionSpec(DATA, *[None] * (values.ndim - 2), LATENT)))
        n_rows, n = values.size // values.shape[-1], values.shape[-1]
        for per_row, k in ((2, 2 * n_rows), (2, 2 * n_rows - 5), (2, 1), (2, 0)):
            flat = values.reshape(-1)
            want = np.sort(np.argsort(-flat, kind="stable")[:k][np.sort(-flat, kind="stable")[:k] < 0])
            rows, latents = (np.asarray(a) for a in found(values.ndim, per_row)(placed, k))
            there = rows < n_rows
            assert (rows[~there] == n_rows).all()
            np.testing.assert_array_equal(np.sort(rows[there] * n + latents[there]), want, err_msg=f"{name}, {k}")
            if mesh.size == 1:
                assert (np.diff(rows[there] * n + latents[there]) > 0).all()


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_quick_way_finds_what_a_stable_sort_finds(k: int) -> None:
    find = jax.jit(lambda v: largest_of_rows(v, k, falling=False))
    for name, values in _arrays().items():
        want = np.sort(np.argsort(-values, axis=-1, kind="stable")[..., :k], axis=-1)
        np.testing.assert_array_equal(find(values), want, err_msg=name)
    # A last group that is not full.
    values = np.random.default_rng(2).normal(size=(5, 301)).astype(np.float32)
    np.testing.assert_array_equal(find(values), np.sort(np.argsort(-values, axis=-1)[:, :k], axis=-1))


@pytest.mark.parametrize(
    ("n_groups", "shape"), rest_in("ci", itertools.product((1, 3), MESHES), [(1, (1, 1)), (3, (4, 2))])
)
def test_listed_products_and_gradients_are_the_dense_ones(n_groups: int, shape: tuple[int, int]) -> None:
    """decode, kept pre-activations and biases of a selection, against the same with dense latents in float64."""
    B, F, D, k = 16, 64, 12, 4
    rng, mesh = np.random.default_rng(3), make_mesh(ParallelConfig(shape))
    x, W_enc = rng.normal(size=(B, n_groups, D)), rng.normal(size=(n_groups, D, F))
    bias, tables = rng.normal(size=(n_groups, F)), [rng.normal(size=(F, D - 2 * g)) for g in range(n_groups)]
    target, starts = rng.normal(size=(B, D)), tuple(2 * g for g in range(n_groups))

    def loss(tables: Any, W_enc: Any, bias: Any, x: Any) -> Any:
        pre = jnp.einsum("bgd,gdf->bgf", x, W_enc)
        most = k * B * n_groups
        rows, latents = largest_listed(jax.lax.stop_gradient(jax.nn.relu(pre)), most, most)
        kept = listed.kept_listed(x, rows_of_columns(W_enc), jax.lax.stop_gradient(pre), rows, latents, B)
        values = jax.nn.relu(kept + listed.of_latents_listed(bias, rows, latents, B))
        out = listed.decode_listed(values, rows, latents, Groups(tuple(tables), starts), B, n_groups)
        dense = listed.spread_listed(values, rows, latents, (B, n_groups, F))
        counts = listed.tally_listed((values > 0).astype(jnp.int32), rows, latents, (B, n_groups, F))
        return (jnp.sin(out) * target).sum(), (out, dense, counts)

    def dense_loss(tables: Any, W_enc: Any, bias: Any, mask: Any, pre_too: Any) -> Any:
        pre = jnp.einsum("bgd,gdf->bgf", pre_too, W_enc)
        f = jnp.where(mask, jax.nn.relu(pre + bias[None]), 0)
        out = jnp.zeros((B, D), f.dtype)
        for g, table in enumerate(tables):
            out = out.at[:, -table.shape[1] :].add(f[:, g] @ table)
        return (jnp.sin(out) * target).sum(), (out, f)

    exact = (tables, W_enc, bias, x)
    arrays = jax.device_put(jax.tree.map(lambda a: a.astype(np.float32), exact), replicated(mesh))
    got_grads, (out, dense, counts) = jax.jit(on_mesh(jax.grad(loss, (0, 1, 2), has_aux=True), mesh))(*arrays)
    pre = np.einsum("bgd,gdf->bgf", x, W_enc)
    mask = np.zeros(pre.size, bool)
    mask[np.argsort(-np.maximum(pre, 0).ravel(), kind="stable")[: k * B * n_groups]] = True
    mask = mask.reshape(pre.shape)
    with jax.enable_x64(True):
        tables, W_enc, bias, x = jax.tree.map(jnp.asarray, exact)
        want_grads, (want, f) = jax.grad(dense_loss, (0, 1, 2), has_aux=True)(tables, W_enc, bias, mask, x)
    np.testing.assert_array_equal(counts, (np.asarray(f) > 0).sum(0))
    found, wanted = (jax.tree.leaves(tree) for tree in ((out, dense, got_grads), (want, f, want_grads)))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * float(np.abs(other).max()))
