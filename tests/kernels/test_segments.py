"""Sums by latent without atomic additions: float64, any spread of tokens over latents, one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saejax.kernels import segments
from saejax.kernels.segments import (
    prefers_product,
    sum_by_latent,
    sum_by_latent_reference,
    sum_by_product,
    sum_gathered,
    tally_by_latent,
)

# 600 tokens: latents of more than 4, 8 and 16 tokens are summed in ways of their own.
B, K, D, F = 600, 3, 2, 500
WAYS = [sum_gathered, sum_by_product, sum_by_latent_reference]

Sum = Callable[..., jax.Array]


def _pairs(seed: int, steepness: float = 1.0, dropped: float = 0.1, n_latents: int = F) -> dict[str, np.ndarray]:
    """Latent f is drawn as (f + 1)^-steepness; some places belong to nobody (F, F + 1)."""
    rng = np.random.default_rng(seed)
    wait = rng.exponential(size=(B, n_latents)) * np.arange(1, n_latents + 1) ** steepness
    indices = np.argsort(wait, axis=1)[:, :K]
    indices = np.where(rng.random(indices.shape) < dropped, n_latents + rng.integers(2, size=indices.shape), indices)
    scale, rows = rng.normal(size=indices.shape), rng.normal(size=(B, D))
    return {"scale": scale.astype("f4"), "indices": indices.astype("i4"), "rows": rows.astype("f4")}


def _oracle(a: dict[str, np.ndarray], n_latents: int = F) -> np.ndarray:
    out = np.zeros((n_latents + 2, a["rows"].shape[1]))
    np.add.at(out, a["indices"], a["scale"][..., None].astype(np.float64) * a["rows"][:, None])
    return out[:n_latents]


def _jitted(way: Sum, n_latents: int = F) -> Callable[[dict[str, np.ndarray]], jax.Array]:
    return jax.jit(lambda a: way(a["scale"], a["indices"], a["rows"], n_latents))


@pytest.fixture(scope="module", params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Any:
    return _jitted(request.param)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), steepness=st.floats(0, 8), dropped=st.sampled_from([0.0, 0.1, 0.9, 1.0]))
def test_sums_are_those_of_float64_however_tokens_lie_on_latents(
    way: Any, seed: int, steepness: float, dropped: float
) -> None:
    a = _pairs(seed, steepness, dropped)
    np.testing.assert_allclose(way(a), _oracle(a), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("latent", [0, F // 2, F - 1])
def test_all_tokens_on_one_latent(way: Any, latent: int) -> None:
    a = _pairs(1)
    a["indices"] = np.full((B, K), F, np.int32)
    a["indices"][:, 1] = latent
    got = np.asarray(way(a))
    np.testing.assert_allclose(got, _oracle(a), rtol=1e-5, atol=3e-5)
    assert not np.delete(got, latent, axis=0).any()


@pytest.mark.parametrize("n_tokens", [4, 5, 8, 9, 16, 17, 18])
def test_latents_with_as_many_tokens_as_a_level_takes(way: Any, n_tokens: int) -> None:
    """The borders between the levels: every latent that is used has just so many tokens."""
    a = _pairs(2)
    places = np.arange(B * K)
    a["indices"] = (places // n_tokens).reshape(K, B).T.astype(np.int32)
    np.testing.assert_allclose(way(a), _oracle(a), rtol=1e-5, atol=3e-5)


def test_the_order_within_a_row_changes_no_bit() -> None:
    """What is added to a latent comes in the order of the tokens, wherever in its row a token has it."""
    a, rng = _pairs(3), np.random.default_rng(3)
    order = rng.permuted(np.broadcast_to(np.arange(K), (B, K)), axis=1)
    b = a | {name: np.take_along_axis(a[name], order, 1) for name in ("scale", "indices")}
    for function in (sum_gathered, sum_by_product):
        np.testing.assert_array_equal(_jitted(function)(a), _jitted(function)(b))


@pytest.mark.parametrize("n_latents", [1, 7])
def test_fewer_latents_than_a_level_takes(n_latents: int) -> None:
    a = _pairs(4, n_latents=n_latents, dropped=0.3)
    np.testing.assert_allclose(_jitted(sum_gathered, n_latents)(a), _oracle(a, n_latents), rtol=1e-5, atol=1e-4)


def test_vmap_over_batches() -> None:
    many = [_pairs(seed) for seed in range(2)]
    a = {name: np.stack([one[name] for one in many]) for name in many[0]}
    got = jax.jit(jax.vmap(lambda a: sum_gathered(a["scale"], a["indices"], a["rows"], F)))(a)
    for i, one in enumerate(many):
        np.testing.assert_allclose(got[i], _oracle(one), rtol=1e-5, atol=3e-5)


def test_tally_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    a = _pairs(5)
    want = _oracle(a | {"rows": np.ones((B, 1))})[:, 0]
    for few in (0, 1e9):
        monkeypatch.setattr(segments, "_FEW_MULTIPLICATIONS", few)
        got = jax.jit(lambda a: tally_by_latent(a["scale"], a["indices"], F))(a)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-5)


def test_small_sums_are_one_product_and_large_ones_are_not() -> None:
    assert prefers_product(1024, 768, 3072) and not prefers_product(2048, 768, 6144)
    shapes = (np.zeros((2048, 4), np.float32), np.zeros((2048, 4), np.int32), np.zeros((2048, 768), np.float32))
    for n_latents, sorts in ((64, False), (6144, True)):
        text = jax.jit(lambda s, i, r, n=n_latents: sum_by_latent(s, i, r, n)).lower(*shapes).as_text()
        assert ("stablehlo.sort" in text) is sorts


def test_nothing_of_the_size_of_all_pairs_is_built() -> None:
    """Neither [N, D] nor [B, F] in the compiled program: memory is that of the sums and of the busiest latents."""
    B, K, D, F = 1024, 16, 7, 5000
    shapes = (jnp.zeros((B, K)), jnp.zeros((B, K), jnp.int32), jnp.zeros((B, D)))
    text = jax.jit(lambda s, i, r: sum_gathered(s, i, r, F)).lower(*shapes).as_text()
    assert f"{F}x{D}x" in text
    assert f"{B * K}x{D}x" not in text and f"{B}x{K}x{D}x" not in text and f"{B}x{F}x" not in text
