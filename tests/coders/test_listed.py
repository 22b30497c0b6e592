"""BatchTopK as a list against BatchTopK as a mask: loss, metrics, statistics and every gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny.covering import rest_in

from saejax.coders import CoderConfig, build
from saejax.coders.sparsity.batchtopk import BatchTopK

SITES = {"crosscoder_batchtopk": 2, "clt": 3}
CODERS: dict[str, dict[str, Any]] = {preset: {"preset": preset} for preset in ("batchtopk", "matryoshka", *SITES)}
CODERS["detached"] = CODERS["matryoshka"] | {"prefixes_detached": True}


@pytest.mark.parametrize("named", rest_in("ci", CODERS, ["clt"]))
def test_the_list_and_the_mask_are_the_same_coder(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sites, rng = SITES.get(named, 0), np.random.default_rng(0)
    config = CoderConfig(**CODERS[named], d_sae=64, k=4, dead_after_tokens=100, matmul_dtype="float32")
    coder = build(config, (12,) * max(1, sites), 100)
    x = rng.normal(size=(32, sites, 12) if sites else (32, 12)).astype(np.float32)
    fresh = coder.init(jax.random.key(0))
    # Half of the latents have a bias; of the second kind so few are positive that the list has room left.
    bias = 0.1 * rng.normal(size=fresh["b_enc"].shape).astype(np.float32)
    few = np.where(np.arange(64) == 0, 0.5, -9.0).astype(np.float32)
    kinds = [fresh | {"b_enc": jnp.asarray(b)} for b in (bias, np.broadcast_to(few, bias.shape))]

    def results() -> list[Any]:
        def loss(params: Any) -> Any:
            return coder.loss(params, {"x": x, "y": x}, coder.init_stats(), jnp.int32(0))

        compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return [compiled(params) for params in kinds]

    listed = results()
    monkeypatch.setattr(BatchTopK, "for_loss", lambda self, needs: self)
    for got, want in zip(listed, results(), strict=True):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 * max(1.0, float(np.abs(other).max())))
