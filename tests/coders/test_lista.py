"""The unrolled encoder: against its formula in float64, its gradient, and at every door that a linear one passes."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import saejax
from benchmarks import equality
from benchmarks.equality import ALONE, LIMIT, Place, difference, same_l0
from saejax.attribution.layers import at_model
from saejax.coders import Coder, CoderConfig, build
from saejax.core.errors import ConfigError, DataError
from saejax.interop import FORMATS, saebench
from saejax.kernels.sparse import entries
from saejax.lm import LanguageModel

D, F, K, RATE = 6, 16, 3, 0.4
X = np.random.default_rng(0).normal(size=(40, D)).astype(np.float32)


def coder_of(preset: str, steps: int, d_in: Any = D, **settings: Any) -> Coder:
    keys = {"d_sae": F, "k": K, "matmul_dtype": "float32", "lista_steps": steps, "lista_rate": RATE} | settings
    if preset != "topk" or "topology" in settings:
        keys |= {"init": "uniform"}
    return build(CoderConfig(preset, **keys), d_in, steps=10)


def random_params(coder: Coder) -> dict[str, Any]:
    shapes, rng = jax.eval_shape(coder.init, jax.random.key(0)), np.random.default_rng(1)
    params = {name: jnp.asarray(rng.normal(size=s.shape) * 0.5, jnp.float32) for name, s in shapes.items()}
    return params | {name: jnp.abs(params[name]) * 0.3 for name in ("threshold", "ln_eps") if name in params}


def bounded(error: Any, nothing: Any) -> Any:
    """What is added to u: the error of a look, at most as long as the error of no latents, times the rate."""
    error, nothing = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (error, nothing))
    size, largest = (np.sqrt((a**2).sum(1, keepdims=True)) for a in (error, nothing))
    assert 0 < (size > largest).mean() < 1  # both kinds of tokens are there
    return RATE * np.where(size > largest, largest / size, 1) * error


SELECTIONS = {
    "topk": lambda pre, p: np.where(pre >= -np.sort(-pre, axis=1)[:, K - 1 : K], np.maximum(pre, 0), 0),
    "standard": lambda pre, p: np.maximum(pre, 0),
    "jumprelu": lambda pre, p: np.where(pre > p["threshold"], pre, 0),
}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("preset", SELECTIONS)
def test_the_encoder_is_its_formula(preset: str, steps: int) -> None:
    coder = coder_of(preset, steps, encoder_centre=False)
    params = random_params(coder)
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    u = x = X.astype(np.float64)
    for _ in range(steps):
        z = SELECTIONS[preset]((u - p["b_dec"]) @ p["W_enc"] + p["b_enc"], p)
        u = u + bounded(x - z @ p["W_dec"] - p["b_dec"], x - p["b_dec"])
    z = SELECTIONS[preset]((u - p["b_dec"]) @ p["W_enc"] + p["b_enc"], p)
    np.testing.assert_allclose(coder.encode(params, X).dense(), z, rtol=1e-4, atol=1e-5)
    linear = dataclasses.replace(coder, lista=dataclasses.replace(coder.lista, steps=0))
    assert np.abs(np.asarray(linear.encode(params, X).dense()) - z).max() > 0.1


@pytest.mark.parametrize("topology", ["crosscoder", "layernorm_autoencoder"])
def test_other_topologies_read_what_they_left_over(topology: str) -> None:
    """The latents of x are those that a linear encoder has of u."""
    sites = 2 if topology == "crosscoder" else 1
    coder = coder_of("topk", 1, [D] * sites, topology=topology)
    params = random_params(coder)
    x = jnp.asarray(np.stack([X, X[::-1]], 1) if sites == 2 else X)
    linear = dataclasses.replace(coder, lista=dataclasses.replace(coder.lista, steps=0))
    rest = {name: value * (name not in linear.topology.decoders) for name, value in params.items()}
    added = bounded(x - linear.reconstruct(params, x), x - linear.reconstruct(rest, x))
    u = x + jnp.asarray(added.reshape(x.shape), jnp.float32)
    want = linear.encode(params, u).dense()
    np.testing.assert_allclose(coder.encode(params, x).dense(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "preset",
    ["topk", "batchtopk", *(pytest.param(name, marks=pytest.mark.ci) for name in ("jumprelu", "gated", "matryoshka"))],
)
def test_the_gradient_is_that_of_a_linear_encoder_of_u(preset: str) -> None:
    """AuxK takes part: half of the latents are dead."""
    coder = coder_of(preset, 1, **({"auxk_coefficient": 0.5, "auxk_k": 3} if preset != "gated" else {}))
    linear = dataclasses.replace(coder, lista=dataclasses.replace(coder.lista, steps=0))
    params, step, x = random_params(coder), jnp.int32(3), jnp.asarray(X)
    stats = coder.init_stats()
    stats |= {"tokens_since_fired": jnp.where(jnp.arange(F) < F // 2, 2**29, 0).astype(jnp.int32)}

    def first(sparsity: Any) -> jax.Array:
        pre = linear.topology.pre_activations(params, x)
        keep = functools.partial(entries, pre)
        error = x - linear.decode(params, sparsity(pre, keep, params, step), x)
        return x + jnp.asarray(bounded(error, x - params["b_dec"][None]), jnp.float32)

    u = first(linear.sparsity)
    (loss, _), got = jax.value_and_grad(coder.loss, has_aux=True)(params, {"x": x, "y": x}, stats, step)
    want_loss, want = jax.value_and_grad(linear.loss, has_aux=True)(params, {"x": u, "y": x}, stats, step)
    np.testing.assert_allclose(loss, want_loss[0], rtol=1e-5)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert np.abs(want["W_enc"]).max() > 0 and np.abs(u - x).max() > 0.1


def test_encoding_is_differentiable_in_x() -> None:
    coder = coder_of("topk", 1)
    params = random_params(coder)

    def total(scale: jax.Array) -> jax.Array:
        return coder.encode(params, jnp.asarray(X) * scale).dense().sum()

    h = 1e-3
    want = float(total(jnp.float32(1 + h)) - total(jnp.float32(1 - h))) / (2 * h)
    assert float(jax.grad(total)(jnp.float32(1.0))) == pytest.approx(want, rel=0.02)


def rows(n: int = 4096) -> np.ndarray:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 12))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return ((rng.random((n, 40)) < 0.06) * rng.uniform(1, 2, (n, 40)) @ features).astype(np.float32)


def trained(preset: str, **settings: Any) -> saejax.TrainedCoder:
    keys: dict[str, Any] = {"k": 3, "d_sae": 32, "lr": 3e-3, "batch_size": 256, "tokens": 25_600, "progress": False}
    return saejax.train(rows(), preset, **keys | settings)


@pytest.fixture(scope="module")
def two_steps() -> saejax.TrainedCoder:
    return trained("batchtopk", lista_steps=2)


def test_every_step_has_a_threshold_of_its_own(two_steps: saejax.TrainedCoder) -> None:
    thresholds = [float(two_steps.params[name][0]) for name in ("threshold_0", "threshold_1", "threshold")]
    assert min(thresholds) > 0 and len(set(thresholds)) == 3
    assert (two_steps.encode(rows()) != 0).sum(1).mean() == pytest.approx(3, rel=0.15)
    # With the last step's threshold for all of them another dictionary comes out.
    one = dict(two_steps.params) | dict.fromkeys(("threshold_0", "threshold_1"), two_steps.params["threshold"])
    other = dataclasses.replace(two_steps, params=one)
    assert np.abs(other.encode(rows()) - two_steps.encode(rows())).max() > 0.01
    assert "lista_steps=2" in repr(two_steps)


def test_it_explains_more_at_the_same_l0(two_steps: saejax.TrainedCoder) -> None:
    def fve(sae: saejax.TrainedCoder) -> float:
        x = rows()
        return float(1 - np.square(x - sae(x)).sum() / np.square(x - x.mean(0)).sum())

    assert fve(two_steps) > fve(trained("batchtopk")) + 0.02


def test_larger_latents_reconstruct_the_same(two_steps: saejax.TrainedCoder) -> None:
    x, factor = jnp.asarray(rows(200)), np.linspace(0.5, 2, 32).astype(np.float32)
    params = two_steps.coder.rescaled(dict(two_steps.params), factor)
    latents = two_steps.coder.encode(params, x)
    np.testing.assert_allclose(latents.dense(), np.asarray(two_steps.encode(x)) * factor, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(two_steps.coder.decode(params, latents), two_steps(x), rtol=1e-3, atol=1e-4)


def test_a_saved_one_comes_back_and_a_damaged_one_does_not(two_steps: saejax.TrainedCoder, tmp_path: Path) -> None:
    two_steps.save(tmp_path / "sae")
    back = saejax.load(tmp_path / "sae")
    np.testing.assert_array_equal(back.encode(rows()), two_steps.encode(rows()))
    assert back.coder.lista == two_steps.coder.lista
    path = tmp_path / "sae" / "saejax.json"
    described = json.loads(path.read_text())
    for lista in ({"steps": 0}, {"steps": 9}, {"steps": True}, {"rate": 0.0}, {"rate": "fast"}, {"more": 1}):
        path.write_text(json.dumps(described | {"lista": described["lista"] | lista}))
        with pytest.raises(DataError, match=r"saejax\.json is damaged"):
            saejax.load(tmp_path / "sae")
    path.write_text(json.dumps(described | {"lista": described["lista"] | {"own": False}}))
    with pytest.raises(DataError, match="threshold_0"):
        saejax.load(tmp_path / "sae")


@pytest.mark.parametrize("preset", ["batchtopk", "topk"])
def test_pytorch_has_the_same_numbers(preset: str, two_steps: saejax.TrainedCoder) -> None:
    torch = pytest.importorskip("torch")
    sae = two_steps if preset == "batchtopk" else trained(preset, lista_steps=1)
    module, x = sae.to_torch(), rows(300)
    with torch.no_grad():
        np.testing.assert_allclose(module.encode(torch.tensor(x)), sae.encode(x), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(module(torch.tensor(x)), sae(x), rtol=1e-4, atol=1e-4)


def test_who_has_no_such_encoder_says_so(two_steps: saejax.TrainedCoder, tmp_path: Path) -> None:
    for name in FORMATS:
        with pytest.raises(ConfigError, match="This coder cannot be written for"):
            two_steps.save(tmp_path / name, format=name)
    assert "unrolled encoder" in FORMATS["saelens"].refuses(two_steps)
    assert "unrolled encoder" in saebench.refuses(two_steps)
    with pytest.raises(ConfigError, match=r"its encoder is unrolled \(coder\.lista_steps\)"):
        at_model(object.__new__(LanguageModel), [two_steps])


@pytest.mark.parametrize("preset", ["transcoder", "clt", "crosscoder_causal"])
def test_coders_that_write_something_else_are_refused(preset: str) -> None:
    n = 1 if preset == "transcoder" else 2
    with pytest.raises(ConfigError, match=r"coder\.lista_steps is 1.*Set it to 0"):
        build(CoderConfig(preset, d_sae=F, k=K, lista_steps=1), [D] * n, steps=10, d_out=[D] * n)


@pytest.mark.ci
def test_a_warm_start_leads_from_one_to_the_other(two_steps: saejax.TrainedCoder, tmp_path: Path) -> None:
    two_steps.save(tmp_path / "unrolled")
    trained("batchtopk").save(tmp_path / "linear")
    for source, steps in (("linear", 2), ("unrolled", 2), ("unrolled", 0), ("linear", 1)):
        sae = trained("batchtopk", lista_steps=steps, tokens=2560, lr=1e-6, init_from=str(tmp_path / source))
        assert sae.coder.lista.steps == steps
        np.testing.assert_allclose(sae.W_dec, saejax.load(tmp_path / source).W_dec, atol=1e-3)
        assert sorted(name for name in sae.params if "_" in name and "threshold" in name) == [
            f"threshold_{t}" for t in range(steps)
        ]


@pytest.mark.ci
def test_parts_of_a_batch_and_a_restart_are_one_training(tmp_path: Path) -> None:
    """TopK selects token by token, so parts change nothing; a run that was stopped goes on to the bit."""
    whole, parts = (trained("topk", lista_steps=1, accumulate=n, tokens=5120) for n in (1, 4))
    np.testing.assert_allclose(whole.W_enc, parts.W_enc, rtol=1e-3, atol=1e-4)
    once = trained("batchtopk", lista_steps=1, tokens=5120, run=str(tmp_path / "once"), checkpoint_every=10)
    steps = saejax.load(tmp_path / "once", step=10)
    assert {"threshold", "threshold_0"} <= set(steps.params)
    for folder in (tmp_path / "once" / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > 10:
            for path in sorted(folder.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            folder.rmdir()
    again = trained("batchtopk", lista_steps=1, tokens=5120, run=str(tmp_path / "once"), checkpoint_every=10)
    for name, value in once.params.items():
        np.testing.assert_array_equal(again.params[name], value, err_msg=name)


SPREAD = [("topk", Place((4, 2))), ("batchtopk", Place((2, 4)))]
SPREAD_CI = [
    ("topk", Place((8, 1), mode="pmap")),
    ("batchtopk", Place((4, 2), fsdp=True)),
    ("batchtopk", Place((8, 1))),
]


@pytest.mark.parametrize(
    ("preset", "place"), [*SPREAD, *(pytest.param(*case, marks=pytest.mark.ci) for case in SPREAD_CI)], ids=str
)
def test_a_mesh_trains_what_one_device_trains(preset: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"autoencoder/lista_{preset}"
    monkeypatch.setitem(equality.CODERS, name, ({"preset": preset, "lista_steps": 1, **equality.SMALL}, 0.2))
    got, want = equality.trained(name, place), equality.trained(name, ALONE)
    assert difference(got, want) < LIMIT and same_l0(got, want)
    if preset == "batchtopk":
        assert want.end["threshold_0"] > 0 and want.end["threshold_0"] != want.end["threshold"]
