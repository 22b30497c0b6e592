"""HierarchicalTopK: the errors of all prefixes of a token's list, on one device and on many, and a coder at every k."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import saejax
from saejax.coders import CoderConfig, build
from saejax.core.errors import ConfigError
from saejax.kernels.batch import of_all_copies
from saejax.kernels.groups import Groups
from saejax.kernels.prefixes import prefix_errors, prefix_errors_reference
from saejax.parallel import MODES, ParallelConfig, batch_sharding, make_mesh, replicated

B, K, F, R = 8, 5, 16, 6
WIDTHS = (R, R - 2)  # two groups, of which the second writes less


@functools.cache
def _arrays() -> tuple[Any, Any, Any, Any]:
    rng = np.random.default_rng(0)
    indices = np.stack([[rng.permutation(F)[:K] for _ in WIDTHS] for _ in range(B)]).astype(np.int32)
    tables = tuple(rng.normal(size=(F, width)).astype(np.float32) for width in WIDTHS)
    rows = Groups(tables, tuple(R - width for width in WIDTHS))
    values = rng.normal(size=(B, len(WIDTHS), K)).astype(np.float32)
    return values, indices, rows, rng.normal(size=(B, R)).astype(np.float32)


@pytest.mark.parametrize("every", [1, 2, 7, 2**31 - 1])
def test_errors_of_all_prefixes_and_their_gradients(every: int) -> None:
    values, indices, rows, target = _arrays()
    levels = range(K, 0, -every)
    want = np.zeros(B)
    for b in range(B):
        for j in levels:
            left = target[b].astype(np.float64)
            for g, width in enumerate(WIDTHS):
                left[R - width :] -= values[b, g, :j].astype(np.float64) @ rows[g][indices[b, g, :j]]
            want[b] += (left**2).sum() / len(levels)
    weights = np.linspace(-1, 2, B, dtype=np.float32)

    def weighted(errors: Any, values: Any, rows: Any, target: Any) -> jax.Array:
        return (weights * errors(values, indices, rows, target, every)).sum()

    np.testing.assert_allclose(prefix_errors(values, indices, rows, target, every), want, rtol=1e-5)
    got, dense = (
        jax.jit(jax.grad(functools.partial(weighted, errors), argnums=(0, 1, 2)))(values, rows, target)
        for errors in (prefix_errors, prefix_errors_reference)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(dense), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("preset", "changes"), [("hierarchical_topk", {}), ("gemma_scope_2", {"bandwidth": 1.0})])
def test_loss_and_gradients_are_the_same_on_every_mesh(preset: str, changes: dict[str, Any]) -> None:
    """What is not linear in the tokens has all of them: each latent's frequency, and every prefix of a split list."""
    config = CoderConfig(preset, d_sae=F, k=K, target_l0=4.0, auxk_k=2, matmul_dtype="float32", **changes)
    coder = build(config, R, 4)
    params = coder.init(jax.random.key(0))
    if "threshold" in params:
        params = {**params, "threshold": jnp.full(F, 0.3)}
    x = np.random.default_rng(1).normal(size=(B, R)).astype(np.float32)
    stats = coder.init_stats() | {"tokens_since_fired": jnp.full(F, 0, jnp.int32).at[:4].set(2**29)}

    def run(shape: tuple[int, int], mode: str) -> Any:
        mesh = make_mesh(ParallelConfig(shape, mode=mode))

        def both(params: Any, arrays: Any) -> Any:
            batch = {"x": arrays["h"], "y": arrays["h"]}
            (loss, _), grads = jax.value_and_grad(coder.loss, has_aux=True)(params, batch, stats, jnp.int32(3))
            return loss, of_all_copies(grads)

        shardings = replicated(mesh), batch_sharding(mesh)
        program = jax.jit(MODES[mode](both, mesh), in_shardings=shardings, out_shardings=replicated(mesh))
        return jax.device_get(program(params, {"h": x}))

    want_loss, want = run((1, 1), "jit")
    for shape, mode in (((2, 4), "jit"), ((8, 1), "pmap")):
        loss, grads = run(shape, mode)
        np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
        for name, value in want.items():
            np.testing.assert_allclose(grads[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)


@pytest.mark.ci
def test_one_coder_keeps_any_number_of_latents() -> None:
    """L0 is k, and every latent more explains more, of a coder trained for all of them."""
    rng = np.random.default_rng(0)
    codes = (rng.random((4096, 24)) < 0.12) * rng.uniform(0.5, 1.5, (4096, 24))
    x = (codes @ rng.normal(size=(24, 12))).astype(np.float32)
    sae = saejax.train(x, "hierarchical_topk", k=6, d_sae=32, batch_size=256, tokens=60_000, lr=1e-2)
    fves = []
    for k in range(1, 7):
        at_k = sae.with_k(k)
        f = at_k.encode(x)
        assert ((f != 0).sum(1) <= k).all() and (f != 0).sum(1).mean() > 0.95 * k
        fves.append(1 - np.square(x - at_k.decode(f)).sum() / np.square(x - x.mean(0)).sum())
    assert np.all(np.diff(fves) > 0) and fves[0] > 0.3
    np.testing.assert_array_equal(sae.with_k(6).encode(x[:9]), sae.encode(x[:9]))
    assert sae.with_k(2).describe()["sparsity"]["k"] == 2


def test_what_has_no_ranks_is_refused_with_the_remedy() -> None:
    for changes, match in (
        ({"sparsity": "batchtopk"}, "hierarchical needs a sparsity with ranks.*topk or abs_topk.*hierarchical_every"),
        ({"prefixes": (0.5, 1.0)}, "leave prefixes empty"),
        ({"k_start": 12}, "remove coder.k_start"),
    ):
        with pytest.raises(ConfigError, match=match):
            build(CoderConfig("hierarchical_topk", d_sae=F, k=K, **changes), R, 10)
    plain = build(CoderConfig("hierarchical_topk", d_sae=F, k=K, hierarchical_every=0), R, 10)
    assert plain.terms == build(CoderConfig("topk", d_sae=F, k=K), R, 10).terms
    x = np.random.default_rng(0).normal(size=(256, R)).astype(np.float32)
    sae = saejax.train(x, "topk", k=2, d_sae=F, batch_size=64, tokens=64)
    with pytest.raises(ConfigError, match=r"with_k\(17\): k must be between 1 and 16"):
        sae.with_k(F + 1)
    relu = dataclasses.replace(sae, coder=build(CoderConfig("standard", d_sae=F), R, 1))
    with pytest.raises(ConfigError, match="with_k needs"):
        relu.with_k(3)
