"""Every family's step and forward pass is lowered for NVIDIA, AMD and TPU, and adds nothing in an order left to chance.

On a GPU a scatter adds with atomic operations: two threads that add to one number do so in either order, and the last
bits differ from run to run. So resuming a run would not give the same bits. A scatter whose places are known to be
distinct needs none; sums of integers are the same in every order.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.covering import rest_in

from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.kernels import segments
from saejax.kernels.segments import sum_by_latent, sum_by_latent_reference, tally_by_latent
from saejax.parallel import ParallelConfig, batch_sharding, make_mesh
from saejax.training.config import TrainConfig
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import abstract_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

B, D, F, K = 32, 16, 64, 4
SITES = {"transcoder": (("a",), ("b",)), "crosscoder_batchtopk": (("a", "b"),) * 2, "clt": (("a", "b"),) * 2}
FAMILIES = ("standard", "gated", "jumprelu", "topk", "batchtopk", "matryoshka", *SITES)
# Families whose step still scatters into sums on a GPU.
IN_ANY_ORDER: tuple[str, ...] = ()


def _coder(preset: str) -> tuple[Coder, Sites]:
    reads, writes = SITES.get(preset, (("a",), ("a",)))
    sparse = {} if preset in ("standard", "gated", "jumprelu") else {"k": K}
    config = CoderConfig(preset=preset, d_sae=F, dead_after_tokens=100, **sparse)
    ones = (1.0,) * len(reads)
    return build(config, [D] * len(reads), 10, [D] * len(writes)), Sites(reads, writes, ones, ones, len(reads) > 1)


@pytest.fixture(scope="module", params=FAMILIES)
def programs(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """(preset, {program: traced})"""
    coder, sites = _coder(request.param)
    config, mesh = TrainConfig(batch_size=B, tokens=10 * B, lr=1e-3), make_mesh(ParallelConfig((1, 1)))
    optimizer = make_optimizer(config)
    abstract = abstract_state(coder, make_init(coder, optimizer, config), mesh)
    step = compile_step(make_step(coder, optimizer, make_schedule(config), sites, config), abstract, mesh)
    hooks = {
        hook: jax.ShapeDtypeStruct((B, D), jnp.bfloat16, sharding=batch_sharding(mesh))
        for hook in (*sites.reads, *sites.writes)
    }
    x = jax.eval_shape(lambda arrays: sites.batch(arrays)["x"], hooks)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), abstract.params)
    traced = {
        "step": step.trace(abstract, hooks, default_hyper(0)),  # type: ignore[attr-defined]
        "forward": jax.jit(coder.reconstruct).trace(params, x),
    }
    return request.param, traced


@pytest.mark.parametrize("platform", rest_in("ci", ("cuda", "rocm", "tpu"), ["tpu"]))  # cuda: below, of every family
def test_step_and_forward_pass_are_lowered(programs: Any, platform: str) -> None:
    _, traced = programs
    for program in traced.values():
        assert "stablehlo.dot_general" in program.lower(lowering_platforms=(platform,)).as_text()


def test_a_step_on_a_gpu_adds_in_one_order(programs: Any, request: pytest.FixtureRequest) -> None:
    preset, traced = programs
    if preset in IN_ANY_ORDER:
        request.applymarker(pytest.mark.xfail(strict=True, reason="its sums are scattered into"))
    for program in traced.values():
        text = program.lower(lowering_platforms=("cuda",)).as_text()
        assert "stablehlo.dot_general" in text and in_any_order(text) == []


def test_a_sum_of_floats_over_places_that_may_be_equal_is_found() -> None:
    shapes = np.zeros((8, 2), np.float32), np.zeros((8, 2), np.int32), np.zeros((8, 3), np.float32)
    text = jax.jit(lambda s, i, r: sum_by_latent_reference(s, i, r, 5)).lower(*shapes).as_text()
    assert in_any_order(text) == ["tensor<5x3xf32>"]
    counted = jax.jit(lambda i: jnp.zeros(5, jnp.int32).at[i].add(1)).lower(shapes[1]).as_text()
    assert "stablehlo.scatter" in counted and in_any_order(counted) == []


@pytest.mark.parametrize("few", [0.0, 1e9])
def test_sums_by_latent_add_in_one_order(few: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_FEW_MULTIPLICATIONS", few)
    shapes = np.zeros((600, 2), np.float32), np.zeros((600, 2), np.int32), np.zeros((600, 3), np.float32)

    def both(s: Any, i: Any, r: Any) -> Any:
        return sum_by_latent(s, i, r, 50), tally_by_latent(s, i, 50)

    text = jax.jit(both).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.scatter" in text and in_any_order(text) == []


def in_any_order(text: str) -> list[str]:
    """Types of the arrays that a StableHLO text scatters floats into, where equal places would combine by chance."""
    found = re.findall(r'"stablehlo\.scatter"\((.*?)\}\) : \((tensor<[^>]*>).*?->', text, re.DOTALL)
    return [into for body, into in found if re.search(r"x?b?f\d+>$", into) and "unique_indices = true" not in body]
