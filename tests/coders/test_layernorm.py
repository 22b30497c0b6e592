"""layernorm_autoencoder: trained, folded, saved and written, against its formulas in float64.

Its losses and gradients stand with those of the other topologies, in test_conformance.py.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import saejax
from saejax.coders import CoderConfig, build
from saejax.core.errors import ConfigError
from saejax.interop.assemble import coder_kind
from saejax.trained import TrainedCoder

D, F, K = 16, 48, 3
RNG = np.random.default_rng(0)
DIRECTIONS = RNG.normal(size=(F, D))


def tokens(n: int) -> np.ndarray:
    """Sums of a few directions, every token with a mean and a size of its own."""
    rng = np.random.default_rng(n)
    codes = (rng.random((n, F)) < K / F) * rng.uniform(0.5, 1.5, (n, F))
    size, mean = np.exp(rng.normal(size=(n, 1))), rng.normal(size=(n, 1))
    return (size * (codes @ DIRECTIONS + 0.1 * rng.normal(size=(n, D))) + mean).astype(np.float32)


def by_hand(sae: TrainedCoder, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(latents, x_hat) of raw activations, float64."""
    p, x = {name: np.asarray(value, np.float64) for name, value in sae.params.items()}, x.astype(np.float64)
    mean, std = x.mean(1, keepdims=True), x.std(1, ddof=1, keepdims=True)
    pre = ((x - mean) / (std + p["ln_eps"]) - p["b_dec"]) @ p["W_enc"] + p["b_enc"]
    f = np.where(pre >= np.sort(pre, axis=1)[:, -K, None], np.maximum(pre, 0), 0)
    return f, std * (f @ p["W_dec"] + p["b_dec"]) + mean


def trained(**settings: Any) -> TrainedCoder:
    settings = {"k": K, "d_sae": F, "batch_size": 256, "tokens": 60_000, "lr": 3e-3} | settings
    return saejax.train(tokens(8192), "topk", topology="layernorm_autoencoder", **settings)


@pytest.fixture(scope="module")
def unscaled() -> TrainedCoder:
    return trained(normalize="none", b_dec_init="zeros")


def fve(sae: TrainedCoder, x: np.ndarray) -> float:
    """Of directions: each token without its mean, at size 1."""
    x_hat = sae.decode(sae.encode(x), x)
    mean, std = x.mean(1, keepdims=True), x.std(1, ddof=1, keepdims=True)
    z, z_hat = (x - mean) / std, (x_hat - mean) / std
    return float(1 - ((z - z_hat) ** 2).sum() / ((z - z.mean(0)) ** 2).sum())


@pytest.mark.ci
def test_it_learns_directions_of_tokens_of_all_sizes(unscaled: TrainedCoder, tmp_path: Path) -> None:
    x = tokens(512)
    assert fve(unscaled, x) > 0.6
    latents, x_hat = by_hand(unscaled, x)
    np.testing.assert_allclose(unscaled.encode(x), latents, rtol=0, atol=1e-5 * latents.max())
    np.testing.assert_allclose(unscaled.decode(unscaled.encode(x), x), x_hat, rtol=0, atol=1e-5 * np.abs(x_hat).max())
    unscaled.save(tmp_path / "own")
    again = saejax.load(tmp_path / "own")
    assert coder_kind(again) == ("layernorm_autoencoder", "topk")
    np.testing.assert_array_equal(again.encode(x), unscaled.encode(x))


def test_eps_is_no_weight_and_scales_fold_into_it(unscaled: TrainedCoder, tmp_path: Path) -> None:
    np.testing.assert_array_equal(unscaled.params["ln_eps"], np.float32([1e-5]))
    unscaled.save(tmp_path / "theirs", format="saelens")
    scaled = trained(tokens=1024)
    factor = 1e-5 / float(scaled.params["ln_eps"][0])
    x = tokens(8192)
    assert factor == pytest.approx(np.sqrt(D) / np.linalg.norm(x, axis=1).mean(), rel=1e-3)
    with pytest.raises(ConfigError, match="eps"):
        scaled.save(tmp_path / "scaled", format="saelens")


def test_a_token_of_equal_entries_is_its_mean_and_has_a_gradient() -> None:
    coder = build(CoderConfig("standard", topology="layernorm_autoencoder", d_sae=F, matmul_dtype="float32"), D, 1)
    params = dict(coder.init(jax.random.key(0)))
    x = jnp.concatenate([jnp.full((1, D), 3.0), jnp.asarray(tokens(3))])
    grads = jax.grad(lambda x: coder.reconstruct(params, x).sum())(x)
    assert np.isfinite(grads).all()
    np.testing.assert_allclose(coder.reconstruct(params, x)[0], 3.0, rtol=1e-6)


def test_the_size_of_its_input_hardly_matters(unscaled: TrainedCoder) -> None:
    x = tokens(64)
    latents = unscaled.encode(x)
    np.testing.assert_allclose(unscaled.encode(100 * x - 7), latents, rtol=0, atol=1e-3 * latents.max())
    same = dataclasses.replace(unscaled, params=dict(unscaled.params) | {"ln_eps": np.float32([1e-3])})
    np.testing.assert_allclose(same.encode(100 * x), unscaled.encode(x), rtol=0, atol=1e-5 * latents.max())
