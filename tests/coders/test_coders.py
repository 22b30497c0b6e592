"""Coders against float64 definitions: losses, every gradient, sparsity, statistics, what training does.

Tiny shapes, float32 products unless bfloat16 is the subject.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.lax import Precision
from tiny import equations, products

from saejax.coders import Coder, CoderConfig, Latents, build
from saejax.coders.ramp import Ramp
from saejax.coders.recipes import RECIPES
from saejax.coders.reconstruction import Fvu, Mse
from saejax.coders.sparsity.relu import Relu
from saejax.coders.sparsity.topk import TopK
from saejax.coders.term import Context
from saejax.coders.terms.auxk import AuxK
from saejax.coders.terms.penalties import NormWeightedL1
from saejax.core.errors import ConfigError

B, D, F, K = 7, 6, 20, 3
DEAD_AFTER = 100
PRESETS = ("standard", "topk")
STEP = jnp.int32(3)

Tree = dict[str, Any]


def _coder(preset: str = "topk", **changes: Any) -> Coder:
    """L1 weight 0.5 rising over 10 steps; AuxK weight 0.5 on 4 dead latents: large enough to be seen."""
    config = {"d_sae": F, "k": K, "auxk_k": 4, "sparsity_warmup_fraction": 0.1, "encoder_centre": False}
    config |= {"auxk_coefficient": 0.5} if preset == "topk" else {"l1_coefficient": 0.5}
    config |= {"dead_after_tokens": DEAD_AFTER, "matmul_dtype": "float32", "lift_coefficient": 0.0}
    return build(CoderConfig(preset=preset, **(config | changes)), D, steps=100)


def _params(seed: int = 0) -> Tree:
    """Nothing in a special position: no zero bias, no unit row, no transpose."""
    rng = np.random.default_rng(seed)
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,)}
    return {name: jnp.asarray(rng.normal(size=shape) * 0.7, jnp.float32) for name, shape in shapes.items()}


def _batch(seed: int = 1, rows: int = B) -> Tree:
    x_BD = jnp.asarray(np.random.default_rng(seed).normal(size=(rows, D)), jnp.float32)
    return {"x": x_BD, "y": x_BD}


def _stats(n_dead: int) -> Tree:
    """The last `n_dead` latents are dead, just."""
    return {"tokens_since_fired": jnp.full(F, DEAD_AFTER - 1, jnp.int32).at[F - n_dead :].set(DEAD_AFTER)}


def _f64(tree: Tree) -> dict[str, np.ndarray]:
    return {name: np.array(value, np.float64) for name, value in tree.items()}


def _kth_largest(pre_BF: Any, k: int) -> Any:
    return np.sort(pre_BF, axis=1)[:, -k, None]


def _reference_loss(p: Tree, start: Tree, x: np.ndarray, preset: str, n_dead: int, terms: str = "all") -> float:
    """The loss of `_coder(preset)` at STEP, dense and by definition, in float64.

    Where a stop_gradient stands, it is computed from `start`, which stays while p is varied.
    """
    pre = (x - p["b_dec"]) @ p["W_enc"] + p["b_enc"]
    f = np.maximum(pre, 0)
    if preset == "topk":
        f = f * (pre >= _kth_largest(pre, K))
    x_hat = f @ p["W_dec"] + p["b_dec"]
    error = ((x - x_hat) ** 2).sum()
    if preset == "standard":
        l1 = (f * np.linalg.norm(p["W_dec"], axis=1)).sum() / len(x)
        return error / len(x) + 0.5 * (4 / 10) * l1
    fvu = error / ((x - x.mean(0)) ** 2).sum() if terms == "all" else 0
    if n_dead == 0:
        return fvu
    dead, pre0 = slice(F - n_dead, F), (x - start["b_dec"]) @ start["W_enc"] + start["b_enc"]
    f0 = np.maximum(pre0, 0) * (pre0 >= _kth_largest(pre0, K))
    e = x - f0 @ start["W_dec"] - start["b_dec"]
    pre = (x - start["b_dec"]) @ p["W_enc"][:, dead] + p["b_enc"][dead]
    f = np.maximum(pre, 0) * (pre >= _kth_largest(pre, min(4, n_dead)))
    return fvu + 0.5 * ((e - f @ p["W_dec"][dead]) ** 2).sum() / ((e - e.mean(0)) ** 2).sum()


def _reference_gradients(p: Tree, x: Any, *args: Any) -> tuple[float, dict[str, np.ndarray]]:
    """By central differences of `_reference_loss`, every entry of every parameter."""
    start, x, h = _f64(p), np.asarray(x, np.float64), 1e-6
    p, grads = _f64(p), {}
    for name, value in p.items():
        grads[name] = np.zeros(value.shape)
        for i in np.ndindex(value.shape):
            ends = []
            for sign in (1, -1):
                value[i] = start[name][i] + sign * h
                ends.append(_reference_loss(p, start, x, *args))
            value[i] = start[name][i]
            grads[name][i] = (ends[0] - ends[1]) / (2 * h)
    return _reference_loss(p, start, x, *args), grads


@functools.cache
def _value_and_grad(coder: Coder) -> Any:
    return jax.jit(jax.value_and_grad(coder.loss, has_aux=True))


def _auxk_gradients(n_dead: int) -> tuple[float, Tree]:
    coder = dataclasses.replace(_coder(), terms=(AuxK(Ramp.constant(0.5), 4),))
    (value, _), grads = _value_and_grad(coder)(_params(), _batch(), _stats(n_dead), STEP)
    return float(value), grads


def _assert_relative(got: Any, want: Any, tolerance: float, name: str = "") -> None:
    """Largest difference, relative to the largest entry: small entries are sums that cancel."""
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), 1e-12), err_msg=name)


# --- gradients of the whole loss ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "n_dead"), [("standard", 0), ("standard", 9), ("topk", 0), ("topk", 9), ("topk", 2)]
)
def test_loss_and_every_gradient_equal_the_dense_definition(preset: str, n_dead: int) -> None:
    """Proves the sparse gradients, the way b_dec's gradient goes, and AuxK, against float64 differences."""
    p, batch = _params(), _batch()
    (loss, _), grads = _value_and_grad(_coder(preset))(p, batch, _stats(n_dead), STEP)
    want_loss, want = _reference_gradients(p, batch["x"], preset, n_dead)
    assert float(loss) == pytest.approx(want_loss, rel=1e-5)
    assert grads.keys() == want.keys()
    for name in want:
        assert np.abs(want[name]).max() > 1e-3
        _assert_relative(grads[name], want[name], 1e-4, name)


@pytest.mark.parametrize("n_dead", [1, 3, 4, 9, F])
def test_auxk_alone_equals_its_definition(n_dead: int) -> None:
    """Fewer dead than k (4), as many, more, all of them."""
    value, grads = _auxk_gradients(n_dead)
    want_value, want = _reference_gradients(_params(), _batch()["x"], "topk", n_dead, "auxk")
    assert value == pytest.approx(want_value, rel=1e-5)
    for name in want:
        _assert_relative(grads[name], want[name], 1e-4, name)


def test_auxk_reaches_encoder_and_decoder_of_the_dead_and_nothing_else() -> None:
    n_dead = 9
    _, grads = _auxk_gradients(n_dead)
    live, dead = slice(0, F - n_dead), slice(F - n_dead, F)
    norms = {
        "W_enc": np.abs(grads["W_enc"]).sum(0),
        "b_enc": np.abs(grads["b_enc"]),
        "W_dec": np.abs(grads["W_dec"]).sum(1),
    }
    for name, norm_F in norms.items():
        assert (norm_F[live] == 0).all(), f"AuxK moves {name} of a live latent"
        assert (norm_F[dead] > 0).sum() >= 6, f"AuxK leaves {name} of the dead where it is"
    assert not grads["b_dec"].any()


def test_auxk_without_dead_latents_is_exactly_nothing() -> None:
    value, grads = _auxk_gradients(0)
    assert value == 0
    assert not any(g.any() for g in grads.values())


def test_encode_is_differentiable_in_x() -> None:
    p, x_BD, coder = _params(), _batch()["x"], _coder()
    c_BF = jnp.asarray(np.random.default_rng(5).normal(size=(B, F)), jnp.float32)

    def dense(x: jax.Array) -> jax.Array:
        pre = (x - p["b_dec"][None]) @ p["W_enc"] + p["b_enc"][None]
        kth_B1 = jnp.sort(pre, axis=1)[:, -K][:, None]
        return (c_BF * jax.nn.relu(pre) * (pre >= kth_B1)).sum()

    got = jax.jit(jax.grad(lambda x: (c_BF * coder.encode(p, x).dense()).sum()))(x_BD)
    want = jax.jit(jax.grad(dense))(x_BD)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# --- loss terms against NumPy ------------------------------------------------------------------------------


def _context(n_dead: int = 0) -> tuple[Context, dict[str, np.ndarray]]:
    coder, p, x_BD = _coder(), _params(), _batch()["x"]
    pre_BF = coder.topology.pre_activations(p, x_BD)
    stats, relu = _stats(n_dead), Relu()

    def keep(at: jax.Array) -> jax.Array:
        return jnp.take_along_axis(pre_BF, at, axis=1)

    latents = relu(pre_BF, keep, p, STEP)
    y_hat_BD = coder.decode(p, latents)
    dead_F = stats["tokens_since_fired"] >= DEAD_AFTER
    context = Context(coder.topology, relu, p, x_BD, x_BD, y_hat_BD, pre_BF, keep, latents, dead_F, stats, STEP)
    arrays = {"y": x_BD, "y_hat": y_hat_BD, "pre": pre_BF, "dead": dead_F} | p
    return context, _f64(arrays)


def test_mse_fvu_and_l1_equal_numpy() -> None:
    context, a = _context()
    error = ((a["y"] - a["y_hat"]) ** 2).sum()
    f = np.maximum(a["pre"], 0)
    want_l1 = (f * np.linalg.norm(a["W_dec"], axis=1)).sum(1).mean()
    assert float(Mse()(context)) == pytest.approx(error / B, rel=1e-5)
    assert float(Fvu()(context)) == pytest.approx(error / ((a["y"] - a["y"].mean(0)) ** 2).sum(), rel=1e-5)
    assert float(NormWeightedL1()(context)) == pytest.approx(want_l1, rel=1e-5)


def test_l1_weight_rises_to_its_coefficient_and_stays() -> None:
    term = NormWeightedL1(Ramp(0.0, 3.0, 4))
    weights = [float(term.coefficient(jnp.int32(step))) for step in range(6)]
    assert weights == pytest.approx([0.75, 1.5, 2.25, 3.0, 3.0, 3.0])
    assert float(NormWeightedL1(Ramp.constant(3.0)).coefficient(jnp.int32(0))) == 3.0


@pytest.mark.parametrize(("n_dead", "k"), [(0, 4), (2, 4), (9, 4), (9, F), (F, 4), (F, F)])
def test_auxk_equals_numpy(n_dead: int, k: int) -> None:
    context, a = _context(n_dead)
    want = 0.0
    if n_dead:
        e, e_hat = a["y"] - a["y_hat"], np.zeros((B, D))
        dead = np.flatnonzero(a["dead"])
        for b in range(B):
            for latent in sorted(dead, key=lambda i: -a["pre"][b, i])[:k]:
                e_hat[b] += max(a["pre"][b, latent], 0) * a["W_dec"][latent]
        want = ((e - e_hat) ** 2).sum() / ((e - e.mean(0)) ** 2).sum()
    assert float(AuxK(k=k)(context)) == pytest.approx(want, rel=1e-5)


def test_auxk_of_a_perfect_reconstruction_is_finite() -> None:
    context, _ = _context(9)
    perfect = dataclasses.replace(context, y=context.y_hat)
    assert np.isfinite(float(AuxK(k=4)(perfect)))


def test_loss_is_the_weighted_sum_of_its_terms() -> None:
    (loss, (metrics, _)), _ = _value_and_grad(_coder("topk"))(_params(), _batch(), _stats(9), STEP)
    assert float(loss) == pytest.approx(float(metrics["fvu"] + 0.5 * metrics["auxk"]), rel=1e-6)
    assert float(metrics["fve"]) == pytest.approx(1 - float(metrics["fvu"]), abs=1e-6)
    (loss, (metrics, _)), _ = _value_and_grad(_coder("standard"))(_params(), _batch(), _stats(9), STEP)
    assert float(loss) == pytest.approx(float(metrics["mse"] + 0.5 * 0.4 * metrics["l1"]), rel=1e-6)
    assert int(metrics["dead"]) == 9


# --- sparsity ----------------------------------------------------------------------------------------------


def _topk(pre: Any, k: int) -> Latents:
    pre_BF = jnp.asarray(pre, jnp.float32)
    return TopK(Ramp.constant(k))(pre_BF, lambda i: jnp.take_along_axis(pre_BF, i, axis=1), {}, STEP)


def test_topk_keeps_exactly_k_and_ties_go_to_the_lower_index() -> None:
    latents = _topk([[1, 5, 5, 5, 0], [2, 2, 2, 2, 2], [-1, -2, 3, -4, -5]], 2)
    assert np.sort(latents.indices, axis=1).tolist() == [[1, 2], [0, 1], [0, 2]]
    # Kept but negative becomes 0, and does not count as active.
    assert latents.dense().tolist() == [[0, 5, 5, 0, 0], [2, 2, 0, 0, 0], [0, 0, 3, 0, 0]]
    assert latents.active().sum(-1).tolist() == [2, 2, 1]
    assert latents.counts().tolist() == [1, 2, 2, 0, 0]
    assert latents.fired().tolist() == [True, True, True, False, False]


def test_topk_dense_equals_its_definition_and_counts_agree() -> None:
    pre_BF = np.random.default_rng(2).normal(size=(50, F)).astype(np.float32)
    latents = _topk(pre_BF, K)
    want = np.where(pre_BF >= np.sort(pre_BF, axis=1)[:, -K, None], np.maximum(pre_BF, 0), 0)
    np.testing.assert_array_equal(latents.dense(), want)
    np.testing.assert_array_equal(latents.counts(), (want != 0).sum(0))
    np.testing.assert_array_equal(latents.fired(), (want != 0).any(0))
    assert latents.values.shape == (50, K) and latents.d_sae == F


def test_relu_is_dense_and_counts_agree() -> None:
    pre_BF = jnp.asarray([[1.0, -1.0, 0.0], [2.0, -3.0, 4.0]])
    latents = Relu()(pre_BF, lambda i: i, {}, STEP)
    assert latents.indices is None
    assert latents.dense().tolist() == [[1, 0, 0], [2, 0, 4]]
    assert latents.counts().tolist() == [2, 0, 1]
    assert latents.fired().tolist() == [True, False, True]
    assert latents.active().sum() == 3


def test_sparse_and_dense_latents_decode_alike() -> None:
    p, coder = _params(), _coder()
    latents = coder.encode(p, _batch()["x"])
    dense = Latents(latents.dense(), None, F)
    np.testing.assert_allclose(coder.decode(p, latents), coder.decode(p, dense), rtol=1e-5, atol=1e-5)


# --- statistics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_tokens_since_fired_counts_tokens_and_resets(preset: str) -> None:
    p, batch, coder = _params(), _batch(), _coder(preset)
    p["b_enc"] = p["b_enc"].at[:5].set(-100)  # these never fire
    fired_F = np.asarray(coder.encode(p, batch["x"]).fired())
    stats = coder.init_stats()
    for n in (1, 2, 3):
        (_, (_, stats)), _ = _value_and_grad(coder)(p, batch, stats, STEP)
        np.testing.assert_array_equal(stats["tokens_since_fired"], np.where(fired_F, 0, n * B))
    assert not fired_F[:5].any() and fired_F.any()
    assert stats["tokens_since_fired"].dtype == jnp.int32


def test_tokens_since_fired_cannot_overflow() -> None:
    p, batch, coder = _params(), _batch(), _coder()
    p["b_enc"] = p["b_enc"].at[0].set(-100)
    stats = {"tokens_since_fired": jnp.full(F, 2**30, jnp.int32)}
    for _ in range(3):
        (_, (_, stats)), _ = _value_and_grad(coder)(p, batch, stats, STEP)
    assert int(stats["tokens_since_fired"][0]) == 2**30


def test_dead_means_dead_before_the_batch() -> None:
    """A dead latent that fires in this batch still has its AuxK share now, and is alive from the next on."""
    p, batch, coder = _params(), _batch(), _coder()
    p["b_enc"] = p["b_enc"].at[F - 1].set(10)
    (_, (metrics, stats)), _ = _value_and_grad(coder)(p, batch, _stats(1), STEP)
    assert int(metrics["dead"]) == 1 and float(metrics["auxk"]) > 0
    assert int(stats["tokens_since_fired"][F - 1]) == 0
    # And one that reaches the limit in this batch is dead only from the next.
    p["b_enc"] = p["b_enc"].at[0].set(-100)
    (_, (metrics, stats)), _ = _value_and_grad(coder)(p, batch, _stats(0), STEP)
    assert int(metrics["dead"]) == 0
    (_, (metrics, _)), _ = _value_and_grad(coder)(p, batch, stats, STEP)
    assert int(metrics["dead"]) >= 1


@pytest.mark.parametrize("preset", PRESETS)
def test_loss_is_pure(preset: str) -> None:
    args = (_params(), _batch(), _stats(9), STEP)
    before = jax.tree.map(np.array, args)
    loss = _value_and_grad(_coder(preset))
    first, second = loss(*args), loss(*args)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, before, args)


# --- parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "norm"), [("topk", 1.0), ("standard", 0.1)])
def test_init(preset: str, norm: float) -> None:
    coder = _coder(preset)
    p = coder.init(jax.random.key(0))
    assert {name: v.shape for name, v in p.items()} == {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,)}
    assert all(v.dtype == jnp.float32 for v in p.values())
    np.testing.assert_allclose(np.linalg.norm(p["W_dec"], axis=1), norm, rtol=1e-5)
    np.testing.assert_array_equal(p["W_enc"], p["W_dec"].T)
    assert not p["b_enc"].any() and not p["b_dec"].any()
    assert not np.allclose(p["W_dec"], coder.init(jax.random.key(1))["W_dec"])
    assert coder.logical_axes().keys() == p.keys() | coder.init_stats().keys()


def test_unit_decoder_is_projected_and_constrained() -> None:
    coder, p, g = _coder("topk"), _params(0), _params(1)
    projected = coder.project_gradients(p, g)
    np.testing.assert_allclose((projected["W_dec"] * p["W_dec"]).sum(1), 0, atol=1e-5)
    removed = np.asarray(g["W_dec"] - projected["W_dec"])  # only what lies along the rows
    np.testing.assert_allclose(
        np.abs((removed * p["W_dec"]).sum(1)),
        np.linalg.norm(removed, axis=1) * np.linalg.norm(p["W_dec"], axis=1),
        rtol=1e-4,
    )
    constrained = coder.constrain(p, STEP)
    np.testing.assert_allclose(np.linalg.norm(constrained["W_dec"], axis=1), 1, rtol=1e-6)
    cosines = (constrained["W_dec"] * p["W_dec"]).sum(1) / jnp.linalg.norm(p["W_dec"], axis=1)
    np.testing.assert_allclose(cosines, 1, rtol=1e-5)
    for name in ("W_enc", "b_enc", "b_dec"):
        np.testing.assert_array_equal(projected[name], g[name])
        np.testing.assert_array_equal(constrained[name], p[name])


def test_standard_decoder_is_free() -> None:
    coder, p, g = _coder("standard"), _params(0), _params(1)
    jax.tree.map(np.testing.assert_array_equal, coder.project_gradients(p, g), g)
    jax.tree.map(np.testing.assert_array_equal, coder.constrain(p, STEP), p)


@pytest.mark.parametrize("preset", PRESETS)
def test_fold_moves_the_scale_into_the_weights(preset: str) -> None:
    scale, coder, p, raw_BD = 0.37, _coder(preset), _params(), _batch()["x"] * 5
    folded = coder.topology.fold(p, (scale,), (scale,))
    scaled_latents, latents = coder.encode(p, raw_BD * scale), coder.encode(folded, raw_BD)
    np.testing.assert_allclose(latents.dense(), scaled_latents.dense(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        coder.decode(folded, latents), coder.decode(p, scaled_latents) / scale, rtol=1e-4, atol=1e-4
    )


# --- configuration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"preset": "topkk"}, ["coder.preset", "'topkk'", "Did you mean 'topk'"]),
        ({"preset": "zzz"}, ["coder.preset", "standard, p_anneal, ghost, gated, topk"]),
        ({"normalize": "mean"}, ["coder.normalize", "'mean_norm'"]),
        ({"matmul_dtype": "float16"}, ["coder.matmul_dtype", "float16", "bfloat16"]),
        ({"k": 0}, ["coder.k is 0", "at least 1"]),
        ({"expansion": 0}, ["coder.expansion is 0", "at least 1"]),
        ({"dead_after_tokens": -1}, ["coder.dead_after_tokens is -1", "between 0 and"]),
        ({"dead_after_tokens": 2**30 + 1}, ["coder.dead_after_tokens", f"between 0 and {2**30}"]),
        ({"d_sae": -1}, ["coder.d_sae is -1", "0 or more"]),
        ({"l1_coefficient": -0.1}, ["coder.l1_coefficient is -0.1", "negative"]),
        ({"l1_coefficient": float("nan")}, ["coder.l1_coefficient is nan", "finite"]),
        ({"auxk_coefficient": float("inf")}, ["coder.auxk_coefficient is inf", "finite"]),
        ({"auxk_coefficient": -1.0}, ["coder.auxk_coefficient is -1.0", "negative"]),
        ({"auxk_k": -1}, ["coder.auxk_k is -1", "0 or more"]),
        ({"sparsity_warmup_fraction": -0.5}, ["coder.sparsity_warmup_fraction is -0.5", "between 0 and 1"]),
        ({"sparsity_warmup_fraction": 1.5}, ["coder.sparsity_warmup_fraction is 1.5", "between 0 and 1"]),
        ({"d_sae": 8, "k": 9}, ["coder.k is 9", "8 latents", "raise d_sae"]),
        ({"d_sae": 8, "k": 2, "auxk_k": 9}, ["coder.auxk_k is 9", "8 latents", "lower"]),
    ],
)
def test_a_bad_configuration_is_refused_by_name(changes: Tree, named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build(CoderConfig(**changes), D, steps=10)
    for words in named:
        assert words in str(error.value)


def test_width_and_what_a_preset_ignores() -> None:
    assert CoderConfig(expansion=4).width(6) == 24
    assert CoderConfig(d_sae=10, expansion=4).width(6) == 10
    # k belongs to topk: its default of 32 must not stand in the way of a narrow standard coder.
    assert build(CoderConfig(preset="standard", d_sae=8), D, steps=10).topology.d_sae == 8
    assert [t.name for t in _coder(auxk_coefficient=0.0).terms] == ["fvu"]
    assert _coder(auxk_k=0).terms[1] == AuxK(Ramp.constant(0.5), D // 2)
    assert _coder("standard").terms[1] == NormWeightedL1(Ramp(0.0, 0.5, 10))


# --- bfloat16 and compilation ------------------------------------------------------------------------------


def _traced(preset: str, dtype: str) -> Any:
    """The program of the loss and its gradients, of a coder of one site or two."""
    stacked = preset.startswith("clt") or "crosscoder" in preset
    config = CoderConfig(preset, d_sae=F, k=K, auxk_k=4, dead_after_tokens=DEAD_AFTER, matmul_dtype=dtype)
    coder = build(config, [D] * (1 + stacked), 100, neighbours=2)
    shapes = {"x": coder.topology.in_shape, "y": coder.topology.out_shape}
    batch = {name: jax.ShapeDtypeStruct((2 * B, *shape), jnp.float32) for name, shape in shapes.items()}
    params = jax.eval_shape(coder.init, jax.random.key(0))
    return jax.make_jaxpr(jax.value_and_grad(coder.loss, has_aux=True))(params, batch, coder.init_stats(), STEP)


@pytest.mark.parametrize("preset", RECIPES)
def test_gradients_are_float32_in_every_family(preset: str) -> None:
    """Nothing comes back from bfloat16 to float32: what does has been rounded."""
    program = _traced(preset, "bfloat16")
    for one in equations(program):
        assert one.primitive.name != "convert_element_type" or one.invars[0].aval.dtype != jnp.bfloat16, one
    forward, backward = ("bfloat16", Precision.DEFAULT), {("float32", Precision.HIGH), ("float32", Precision.HIGHEST)}
    assert {forward} <= set(products(program)) <= {forward} | backward


@pytest.mark.parametrize("preset", ["decorrelated", "gated", "clt"])
def test_float32_is_float32_in_every_product(preset: str) -> None:
    assert set(products(_traced(preset, "float32"))) == {("float32", Precision.HIGHEST)}


@pytest.mark.parametrize("preset", ["standard", "batchtopk"])
def test_gradients_of_bfloat16_products_are_no_bfloat16_numbers(preset: str) -> None:
    coder = _coder(preset, matmul_dtype="bfloat16")
    grads = _value_and_grad(coder)(_params(), _batch(), coder.init_stats(), STEP)[1]
    for name in ("W_enc", "W_dec"):
        rounded = grads[name].astype(jnp.bfloat16).astype(jnp.float32)
        assert float((rounded != grads[name]).mean()) > 0.5 * float((grads[name] != 0).mean()), name


def test_bfloat16_operands_accumulate_in_float32() -> None:
    width = 4096
    config = CoderConfig(d_sae=8, k=2, matmul_dtype="bfloat16")
    bf16, f32 = (build(dataclasses.replace(config, matmul_dtype=t), width, 10) for t in ("bfloat16", "float32"))
    p, x_BD = bf16.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (4, width))
    got, want = bf16.topology.pre_activations(p, x_BD), f32.topology.pre_activations(p, x_BD)
    assert got.dtype == jnp.float32
    relative = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    assert 1e-4 < relative < 1e-2
    # Rounded operands, exact sums: what is left is float32 noise.
    rounded = [np.asarray(v.astype(jnp.bfloat16), np.float64) for v in (x_BD, p["W_enc"])]
    _assert_relative(got, rounded[0] @ rounded[1], 1e-5)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_program_multiplies_in_the_dtype_asked_for(preset: str) -> None:
    def dots(dtype: str) -> list[str]:
        coder = _coder(preset, matmul_dtype=dtype)
        text = _value_and_grad(coder).lower(_params(), _batch(), _stats(2), STEP).as_text()
        return [line for line in text.splitlines() if "dot_general" in line and "xbf16" in line]

    assert any(line.rstrip().endswith(f"tensor<{B}x{F}xf32>") for line in dots("bfloat16"))
    assert not dots("float32")


def test_value_and_grad_compiles_once() -> None:
    coder, traces = _coder(), 0

    def loss(*args: Any) -> Any:
        nonlocal traces
        traces += 1
        return coder.loss(*args)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    p, stats = _params(), _stats(0)
    for i in range(4):
        (_, (_, stats)), grads = step(p, _batch(i), stats, jnp.int32(i))
        p = jax.tree.map(lambda v, g: v - 0.1 * g, p, grads)
    assert traces == 1 and step._cache_size() == 1


def test_topk_gradient_never_builds_dense_latents() -> None:
    """Pre-activations are [B, F], but no product takes anything of that shape as an operand. (Blocks of AuxK may.)"""
    text = _value_and_grad(_coder(auxk_coefficient=0.0)).lower(_params(), _batch(), _stats(2), STEP).as_text()
    products = [line.split("->")[0] for line in text.splitlines() if "dot_general" in line]
    assert products
    assert not [line for line in products if f"tensor<{B}x{F}x" in line]


# --- what training does ------------------------------------------------------------------------------------


def _train(coder: Coder, p: Tree, stats: Tree, sample: Any, lr: float, steps: int) -> tuple[Tree, Tree, Tree]:
    """Adam under a cosine, one compiled scan -> (params, stats, metrics of the last step)."""
    optimizer = optax.adam(optax.cosine_decay_schedule(lr, steps, 0.1))

    def step(carry: Any, i: jax.Array) -> Any:
        p, opt_state, stats = carry
        x_BD = sample(jax.random.fold_in(jax.random.key(9), i))
        gradient = jax.value_and_grad(coder.loss, has_aux=True)
        (_, (metrics, stats)), g = gradient(p, {"x": x_BD, "y": x_BD}, stats, i)
        updates, opt_state = optimizer.update(coder.project_gradients(p, g), opt_state, p)
        return (coder.constrain(optax.apply_updates(p, updates), i), opt_state, stats), metrics

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps)))
    (p, _, stats), metrics = run((p, optimizer.init(p), stats))
    return p, stats, {name: values[-1] for name, values in metrics.items()}


N_FEATURES, WIDTH, MODEL, ACTIVE = 32, 64, 16, 3


def _unit_rows(rows: np.ndarray) -> jax.Array:
    return jnp.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), jnp.float32)


def _planted(seed: int) -> tuple[jax.Array, Any]:
    """32 unit features in 16 dimensions, 3 of them in a sample of 256 rows, magnitudes 0.5 to 1.5."""
    rng = np.random.default_rng(seed)
    truth_ND = _unit_rows(rng.normal(size=(N_FEATURES, MODEL)))

    def sample(key: jax.Array) -> jax.Array:
        which, size = jax.random.split(key)
        _, indices = jax.lax.top_k(jax.random.uniform(which, (256, N_FEATURES)), ACTIVE)
        return (jax.random.uniform(size, (256, ACTIVE, 1), minval=0.5, maxval=1.5) * truth_ND[indices]).sum(1)

    return truth_ND, sample


@pytest.mark.ci
@pytest.mark.parametrize(("preset", "least"), [("topk", 0.95), ("standard", 0.9)])
def test_training_finds_a_planted_dictionary(preset: str, least: float) -> None:
    """Width 64, k 3 or L1 0.5, Adam at 0.02 for 400 steps: mean of the best cosine 0.99 and 0.98."""
    truth_ND, sample = _planted(0)
    l1 = 0.5 if preset == "standard" else None
    config = CoderConfig(preset, d_sae=WIDTH, k=ACTIVE, l1_coefficient=l1, matmul_dtype="float32")
    coder = build(dataclasses.replace(config, dead_after_tokens=5000), MODEL, steps=400)
    start = coder.init(jax.random.key(0))
    p, _, metrics = _train(coder, start, coder.init_stats(), sample, lr=0.02, steps=400)

    def found(p: Tree) -> float:
        rows_FD = p["W_dec"] / jnp.linalg.norm(p["W_dec"], axis=1, keepdims=True)
        return float((truth_ND @ rows_FD.T).max(1).mean())

    assert found(start) < 0.75
    assert found(p) > least
    assert float(metrics["fve"]) > 0.8
    assert ACTIVE <= round(float(metrics["l0"]), 3) < 12


@pytest.mark.ci
def test_where_few_features_fire_the_start_loses_no_latents() -> None:
    """128 features of falling frequency, 1.6 at a time, k 6: mean of the best cosine 0.84, and none of 64 latents dead.

    From an encoder at a tenth it was 0.80, and 3 were dead.
    """
    features, model, steps, dead_after = 128, 32, 500, 10_000
    truth_ND = _unit_rows(np.random.default_rng(0).normal(size=(features, model)))
    chance_1N = 0.3 / np.arange(1, features + 1)[None]

    def sample(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, chance_1N, (256, features)).astype(jnp.float32) @ truth_ND

    coder = build(CoderConfig(d_sae=64, k=6, dead_after_tokens=dead_after, matmul_dtype="float32"), model, steps)
    p, stats, _ = _train(coder, coder.init(jax.random.key(0)), coder.init_stats(), sample, lr=0.01, steps=steps)
    assert float((p["W_dec"] @ truth_ND.T).max(1).mean()) > 0.82
    assert not (stats["tokens_since_fired"] >= dead_after).any()


@pytest.mark.ci
@pytest.mark.parametrize("auxk_coefficient", [1 / 32, 0.0])
def test_auxk_revives_the_dead(auxk_coefficient: float) -> None:
    """16 of 64 latents start too low ever to be among the 3 largest, a few sometimes above 0: 9 come back."""
    n_dead, dead_after = 16, 1000
    _, sample = _planted(0)
    config = CoderConfig(
        d_sae=WIDTH,
        k=ACTIVE,
        auxk_coefficient=auxk_coefficient,
        encoder_scale=1.0,
        encoder_centre=False,
        dead_after_tokens=dead_after,
        matmul_dtype="float32",
    )
    coder = build(config, MODEL, steps=100)
    p = coder.init(jax.random.key(0))
    p["b_enc"] = p["b_enc"].at[:n_dead].set(-1.3).at[n_dead:].set(0.5)
    stats = {"tokens_since_fired": jnp.zeros(WIDTH, jnp.int32).at[:n_dead].set(dead_after)}
    before = coder.encode(p, sample(jax.random.key(1))).fired()[:n_dead]
    assert not before.any()  # where no latent is above 0 for any token, AuxK has no gradient to give
    _, stats, _ = _train(coder, p, stats, sample, lr=0.01, steps=100)
    fired = int((stats["tokens_since_fired"][:n_dead] < dead_after).sum())
    assert fired == 0 if auxk_coefficient == 0 else fired >= 5
