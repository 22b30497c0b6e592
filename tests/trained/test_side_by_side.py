"""Dictionaries side by side in one coder: what they do, learn and become is what each does by itself."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import saejax
from saejax.coders import CoderConfig, Sites, build
from saejax.core.errors import ConfigError
from saejax.trained import Origin, TrainedCoder, side_by_side

D, F, K, N = 6, 12, 3, 40


@functools.cache
def single(topology: str, sparsity: str, place: int, **keys: Any) -> TrainedCoder:
    config = CoderConfig(
        topology=topology, sparsity=sparsity, d_sae=F, k=K, init="uniform", unit_decoder_every=0, encoder_centre=False
    )
    coder = build(config, D, 10, D)
    rng, shapes = np.random.default_rng(place), jax.eval_shape(coder.init, jax.random.key(0))
    params = {name: rng.normal(0, 0.5, s.shape).astype(np.float32) for name, s in sorted(shapes.items())}
    coder, params = coder.inference(params, coder.init_stats() | keys)
    at = (f"blocks.{place}.mlp_in",), (f"blocks.{place}.mlp_out",)
    reads, writes = (at[1], at[1]) if topology == "autoencoder" else at
    params = {name: np.asarray(value) for name, value in params.items()}
    return TrainedCoder(coder, params, Sites(reads, writes, (1.0,), (1.0,)), Origin("demo"))


CASES = [("autoencoder", "topk"), ("transcoder", "jumprelu"), ("autoencoder", "gated"), ("transcoder", "relu")]


@pytest.mark.parametrize(("topology", "sparsity"), CASES)
def test_side_by_side_they_do_what_each_does_and_come_apart_again(topology: str, sparsity: str, tmp_path: Path) -> None:
    each = [single(topology, sparsity, place) for place in (0, 2, 3)]
    whole = saejax.side_by_side(each)
    x = np.random.default_rng(9).normal(size=(N, 3, D)).astype(np.float32)
    assert whole.describe()["topology"] == f"per_layer_{topology}" and whole.n_latents == 3 * F
    for i, sae in enumerate(each):
        np.testing.assert_allclose(whole.encode(x)[:, i], sae.encode(x[:, i]), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(whole(x)[:, i], sae(x[:, i]), rtol=1e-5, atol=1e-5)
    whole.save(tmp_path / "whole")
    again = saejax.load(tmp_path / "whole")
    assert again.fingerprint() == whole.fingerprint()
    for sae, back in zip(each, saejax.layers(again), strict=True):
        assert (back.sites, repr(back)) == (sae.sites, repr(sae))
        for name, value in sae.params.items():
            np.testing.assert_allclose(back.params[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    written = saejax.convert(tmp_path / "whole", tmp_path / "theirs", "saelens") if sparsity != "relu" else []
    for made, sae in zip(written, each, strict=False):
        np.testing.assert_allclose(saejax.load(made.folder)(x[:, 0]), sae(x[:, 0]), rtol=1e-4, atol=1e-4)
    assert len(written) in (0, 3)


def test_transcoders_become_one_set_of_another_project(tmp_path: Path) -> None:
    whole = side_by_side([single("transcoder", "jumprelu", place) for place in (0, 1)])
    whole.save(tmp_path / "whole")
    saejax.convert(tmp_path / "whole", tmp_path / "set", "circuit_tracer")
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == [
        "config.yaml",
        "layer_0.safetensors",
        "layer_1.safetensors",
    ]
    with pytest.raises(ConfigError, match="cannot be written for"):
        whole.save(tmp_path / "direct", format="circuit_tracer")


def test_what_does_not_stand_side_by_side_is_refused() -> None:
    sae = single("autoencoder", "topk", 0)
    with pytest.raises(ConfigError, match="none given"):
        side_by_side([])
    with pytest.raises(ConfigError, match="is one dictionary"):
        saejax.layers(sae)
    with pytest.raises(ConfigError, match="have one hook point"):
        side_by_side([sae, sae])
    other = single("autoencoder", "relu", 1)
    with pytest.raises(ConfigError, match=r"with Relu.*with TopK"):
        side_by_side([sae, other])
    with pytest.raises(ConfigError, match=r"of another model \(gpt2\)"):
        side_by_side([sae, dataclasses.replace(single("autoencoder", "topk", 1), origin=Origin("gpt2"))])
    with pytest.raises(ConfigError, match="takes autoencoders and transcoders"):
        side_by_side([side_by_side([sae])])


@pytest.mark.parametrize("topology", ["autoencoder", "transcoder"])
def test_each_learns_what_it_would_learn_by_itself(topology: str) -> None:
    """The gradients of a squared error; the reconstruction's share of the variance has one denominator for all."""
    keys = {
        "sparsity": "topk",
        "d_sae": F,
        "k": K,
        "reconstruction": "mse",
        "init": "uniform",
        "matmul_dtype": "float32",
    }
    keys |= {"auxk_coefficient": 0.0, "lift_coefficient": 0.0}
    several = build(CoderConfig(topology=f"per_layer_{topology}", **keys), [D] * 3, 10, [D] * 3)
    one = build(CoderConfig(topology=topology, **keys), D, 10, D)
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(N, 3, D)), jnp.float32) for _ in "xy")
    y = x if topology == "autoencoder" else y
    params = several.init(jax.random.key(1))
    params |= {"centre": jnp.asarray(rng.normal(size=(3, D)), jnp.float32)}
    step, grads_of = jnp.int32(0), functools.partial(jax.grad, has_aux=True)
    grads, _ = grads_of(several.loss)(params, {"x": x, "y": y}, several.init_stats(), step)
    for g in range(3):
        own = {name: params[name][g] for name in ("W_enc", "b_enc", "b_dec", "centre")}
        own["W_dec"] = params[f"W_dec_{g}"][:, 0]
        want, _ = grads_of(one.loss)(own, {"x": x[:, g], "y": y[:, g]}, one.init_stats(), step)
        for name, value in want.items():
            got = grads[f"W_dec_{g}"][:, 0] if name == "W_dec" else grads[name][g]
            np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4, err_msg=name)
