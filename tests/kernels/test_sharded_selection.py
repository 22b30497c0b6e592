"""Latents split over devices: the same selection to the bit, the same products and gradients; what a program sends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.equality import B, D, F, K, a_coder
from saejax.coders import CoderConfig, Sites, build
from saejax.kernels.dense import decode_dense_split
from saejax.kernels.groups import Groups
from saejax.kernels.selection import _sum_reaches, largest_mask, largest_of_rows
from saejax.kernels.shards import WHOLE, shards_of
from saejax.kernels.sparse import (
    decode_groups,
    decode_rows,
    entries,
    kept_pre_activations,
    of_latents,
    rows_of_columns,
    spread,
    tally,
)
from saejax.parallel import DATA, LATENT, ParallelConfig, batch_sharding, make_mesh, on_mesh, replicated, tree_shardings
from saejax.plans.collectives import Collective, collectives
from saejax.trained import TrainedCoder

MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))


def _on(shape: tuple[int, int], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled for a mesh; arguments that lie on no mesh go to all its devices."""
    mesh = make_mesh(ParallelConfig(shape))
    compiled = jax.jit(on_mesh(function, mesh))

    def call(*arguments: Any) -> Any:
        def place(a: Any) -> jax.Array:
            return a if isinstance(getattr(a, "sharding", 0), NamedSharding) else jax.device_put(a, replicated(mesh))

        return compiled(*jax.tree.map(place, arguments))

    return call


# --- kernels -----------------------------------------------------------------------------------------------


def _scores() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    scores = {}
    for name, shape in (("flat", (16, 64)), ("groups", (8, 3, 16))):
        scores[f"{name}, all different"] = np.maximum(rng.normal(size=shape), 0)
        scores[f"{name}, few values"] = np.maximum(rng.integers(-4, 5, size=shape), 0)
        scores[f"{name}, all equal"] = np.full(shape, 2.5)
    return {name: a.astype(np.float32) for name, a in scores.items()}


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s == (4, 2) else pytest.mark.ci) for s in MESHES])
def test_ties_over_rows_groups_and_shards_go_to_the_same_places(shape: tuple[int, int]) -> None:
    """Every k from none to more than all: the cut falls within rows, at their ends, and at borders of devices."""
    mesh = make_mesh(ParallelConfig(shape))
    mask, rows = _on(shape, largest_mask), _on(shape, lambda v: largest_of_rows(v, 5))
    for name, values in _scores().items():
        axes = (DATA, *[None] * (values.ndim - 2), LATENT)
        placed = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))
        flat = values.ravel()
        order = np.argsort(-flat, kind="stable")
        for k in (0, 1, 16, 37, 64, 100, 129, flat.size - 3, flat.size + 4):
            want = np.zeros(flat.size, bool)
            want[order[:k]] = True
            got = np.asarray(mask(placed, k)).ravel()
            np.testing.assert_array_equal(got, want & (flat > 0), err_msg=f"{name}, k {k}")
        np.testing.assert_array_equal(rows(placed), np.argsort(-values, axis=-1, kind="stable")[..., :5], err_msg=name)


@pytest.mark.parametrize(("own", "devices"), [(5, 1), (2**30, 8), (2**32 - 1, 4096), (70_000, 3)])
def test_counts_that_pass_32_bits_are_compared_rightly(own: int, devices: int) -> None:
    total = own * devices
    for k in {0, 1, min(total, 2**31 - 1), min(total + 1, 2**31 - 1), 2**31 - 1, 65_536, 210_000, 210_001}:
        got = _sum_reaches(jnp.uint32(own), jnp.int32(k), lambda halves: halves * jnp.uint32(devices))
        assert bool(got) == (total >= k), k


def _products(a: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Every product with kept latents or with groups of dense ones, and its gradients."""
    i = a["indices"]

    def loss(v: jax.Array, W_FD: jax.Array, pre: jax.Array, W_DF: jax.Array, b: jax.Array) -> tuple[Any, Any]:
        groups = Groups((W_FD, W_FD[:, 1:]), (0, 1))
        out = {
            "decoded": decode_rows(v, i, W_FD),
            "groups": decode_groups(jnp.stack([v, -2 * v], axis=1), jnp.stack([i, (i + 1) % F], axis=1), groups),
            "dense groups": decode_dense_split(jnp.stack([pre, jnp.cos(pre)], axis=1), groups, "float32"),
            "entries": entries(pre, i),
            "spread": spread(v, i, F),
            "bias": of_latents(b, i),
            "kept": kept_pre_activations(a["x"], rows_of_columns(W_DF[None])[0], a["x"] @ W_DF, i),
        }
        return sum((jnp.sin(value) * (n + 1)).sum() for n, value in enumerate(out.values())), out

    grads, out = jax.grad(loss, (0, 1, 2, 3, 4), has_aux=True)(a["v"], a["W_FD"], a["pre"], a["W_DF"], a["b"])
    names = ("v", "W_FD", "pre", "W_DF", "b")
    counted = tally((a["v"] > 0).astype(jnp.int32), i, F)
    return out | {f"d_{name}": g for name, g in zip(names, grads, strict=True)} | {"tally": counted}


@pytest.mark.usefixtures("by_blocks")
@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s == (4, 2) else pytest.mark.ci) for s in MESHES])
def test_products_and_their_gradients_are_those_of_one_device(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    shapes = {"v": (B, K), "W_FD": (F, D), "pre": (B, F), "W_DF": (D, F), "b": (F,), "x": (B, D)}
    a = {name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in shapes.items()}
    a["indices"] = jnp.asarray(np.argsort(rng.random((B, F)))[:, :K], jnp.int32)
    got, want = _on(shape, _products)(a), jax.jit(_products)(a)
    for name, value in want.items():
        scale = float(np.abs(value).max())  # small entries are sums that cancel
        np.testing.assert_allclose(got[name], value, rtol=0, atol=5e-6 * scale, err_msg=name)


def test_what_does_not_divide_is_whole() -> None:
    seen = []
    _on((2, 4), lambda: seen.extend([shards_of(4, 8), shards_of(3, 8), shards_of(4, 6)]))()
    assert seen[0].n_along_latents == 4 and seen[1:] == [WHOLE, WHOLE]
    _on((1, 1), lambda: seen.append(shards_of(4, 8)))()
    assert seen[-1] == WHOLE == shards_of(4, 8)


# --- coders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["autoencoder/batchtopk", "clt/topk", pytest.param("autoencoder/abs_topk", marks=pytest.mark.ci)]
)
def test_every_mesh_keeps_the_same_latents(name: str) -> None:
    """Small whole numbers everywhere: sums are exact whatever their order, and most borders have ties."""
    coder, rng = a_coder(name)[0], np.random.default_rng(0)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    params = {name: jnp.asarray(rng.integers(-1, 2, size=s.shape), jnp.float32) for name, s in shapes.items()}
    x = jnp.asarray(rng.integers(-1, 2, size=(B, *coder.topology.in_shape)), jnp.float32)

    def encode(params: Any, x: jax.Array) -> Any:
        latents = coder.encode(params, x)
        return latents.indices, latents.dense(), latents.l0(), latents.counts(), latents.fired()

    want = jax.jit(encode)(params, x)
    kept = np.abs(np.asarray(want[1]))
    assert 4 * len(np.unique(kept)) < (kept > 0).sum()  # ties there are
    for shape in MESHES:
        mesh = make_mesh(ParallelConfig(shape))
        placed = jax.device_put(params, tree_shardings(mesh, params, coder.logical_axes()))
        got = _on(shape, encode)(placed, jax.device_put(x, batch_sharding(mesh)))
        jax.tree.map(np.testing.assert_array_equal, got, want)


# --- other people's programs -------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.usefixtures("by_blocks")
def test_a_coder_in_another_program_s_mesh_takes_arrays_as_they_are() -> None:
    """jax.set_mesh, shard_map, pmap and vmap over axes of any name: the plain numbers, of the tokens that are there."""
    coder = build(CoderConfig(d_sae=F, k=K, matmul_dtype="float32"), D, 8)
    coder, params = coder.inference(coder.init(jax.random.key(0)), coder.init_stats())
    sites = Sites(("h",), ("h",), (1.0,), (1.0,))
    sae = TrainedCoder(coder, jax.device_get(params), sites)
    x = np.random.default_rng(0).normal(size=(B, D)).astype(np.float32)

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return sae.encode(x), coder.reconstruct(sae.params, x)

    want = both(x)

    def same(got: Any) -> None:
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(np.reshape(one, other.shape), other, rtol=1e-5, atol=1e-6)

    # Ours used to be called like this.
    names = ("data", "latent")
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(jax.make_mesh((4, 2), names, axis_types=(kind,) * 2)):
            same(jax.jit(both)(x))
    for axes in (names, names[:1]):
        mesh = jax.make_mesh((4, 2)[: len(axes)], axes, axis_types=(AxisType.Auto,) * len(axes))
        rows = PartitionSpec(axes)
        same(jax.jit(jax.shard_map(both, mesh=mesh, in_specs=rows, out_specs=rows))(x))
    parts = x.reshape(8, -1, D)
    same(jax.pmap(both, names[0])(parts))
    same(jax.jit(jax.vmap(both, axis_name=names[0]))(parts))


# --- reading programs --------------------------------------------------------------------------------------


def test_collectives_are_counted_through_loops_and_branches() -> None:
    mesh = make_mesh(ParallelConfig((2, 4)))

    def local(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: int, total: jax.Array) -> jax.Array:
            return jnp.cos(jax.lax.psum(total * 2, LATENT))

        looped = jax.lax.fori_loop(0, 5, body, x)
        gather = functools.partial(jax.lax.all_gather, axis_name=DATA, axis=0, tiled=True)
        return looped, jax.lax.cond(flag > 0, lambda: gather(x), lambda: jnp.zeros((6, 7), x.dtype))

    split, whole = PartitionSpec(DATA, LATENT), PartitionSpec()
    function = jax.shard_map(
        local, mesh=mesh, in_specs=(split, whole), out_specs=(split, PartitionSpec(None, LATENT)), check_vma=False
    )
    text = jax.jit(function).lower(jnp.ones((6, 28)), jnp.int32(1)).compile().as_text()
    assert sorted(collectives(text), key=lambda c: c.kind) == [
        Collective("all-gather", size=4 * 6 * 7, devices=2, times=1, branch=True),
        Collective("all-reduce", size=4 * 3 * 7, devices=4, times=5, branch=False),
    ]


def test_bytes_sent_in_a_ring() -> None:
    def sent(kind: str) -> float:
        return Collective(kind, size=80, devices=4, times=3, branch=False).sent

    assert [sent(kind) for kind in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute")] == [
        3 * 120,
        3 * 60,
        3 * 240,
        3 * 80,
    ]
    assert Collective("all-reduce", 80, devices=1, times=1, branch=False).sent == 0
