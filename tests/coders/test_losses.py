"""Every loss term, ramp and straight-through gradient against its definition in NumPy float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saejax.coders import SPARSITIES, Autoencoder, CrossLayerTranscoder, Latents
from saejax.coders.ramp import Ramp
from saejax.coders.reconstruction import Fvu, Matryoshka, Mse
from saejax.coders.sparsity.abs_topk import AbsTopK
from saejax.coders.sparsity.base import Sparsity
from saejax.coders.sparsity.batchtopk import BatchTopK
from saejax.coders.sparsity.gated import Gated
from saejax.coders.sparsity.jumprelu import JumpRelu
from saejax.coders.sparsity.relu import Relu
from saejax.coders.sparsity.topk import TopK
from saejax.coders.term import Context, Term
from saejax.coders.terms.auxk import AuxK
from saejax.coders.terms.decorrelation import Decorrelation
from saejax.coders.terms.ghost import GhostGradients
from saejax.coders.terms.lift import Lift
from saejax.coders.terms.penalties import L0, AnnealedLp, FiringFrequency, NormWeightedL1, PreActivation, Tanh, TargetL0
from saejax.coders.terms.second_reconstructions import GateReconstruction, MultiTopK

B, D, F, K, G, EPS = 7, 5, 12, 3, 2, 1.0

Tree = dict[str, Any]
Arrays = dict[str, np.ndarray]


@pytest.fixture(autouse=True)
def _operation_by_operation() -> Iterator[None]:
    """Nothing here is worth a compilation."""
    with jax.disable_jit():
        yield


def _params(seed: int = 0) -> Tree:
    rng = np.random.default_rng(seed)
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, D), "b_dec": (D,), "r_mag": (F,), "b_mag": (F,)}
    params = {name: rng.normal(size=shape) * 0.7 for name, shape in shapes.items()}
    params["threshold"] = np.abs(rng.normal(size=F)) * 0.5
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def _context(sparsity: Sparsity | None = None, n_dead: int = 0, p: Tree | None = None, **fields: Any) -> Context:
    """Of an autoencoder on a random batch; the last `n_dead` latents are dead."""
    sparsity, p = sparsity or Relu(), p or _params()
    topology = Autoencoder(D, F, matmul_dtype="float32")
    x = jnp.asarray(np.random.default_rng(1).normal(size=(B, D)), jnp.float32)
    step = fields.pop("step", jnp.int32(3))
    pre = topology.pre_activations(p, x)

    def keep(at: jax.Array) -> jax.Array:
        return jnp.take_along_axis(pre, at, axis=-1)

    latents = sparsity(pre, keep, p, step)
    dead = jnp.arange(F) >= F - n_dead
    c = Context(topology, sparsity, p, x, x, topology.decode(p, latents, x), pre, keep, latents, dead, {}, step)
    return dataclasses.replace(c, **fields)


def _f64(c: Context) -> Arrays:
    fields = {"x": c.x, "y": c.y, "y_hat": c.y_hat, "pre": c.pre, "f": c.latents.dense(), "dead": c.dead}
    arrays = {name: np.array(value, np.float64) for name, value in (fields | c.params).items()}
    return arrays | {"norms": np.linalg.norm(arrays["W_dec"], axis=1), "theta": arrays["threshold"]}


def _fvu(y: np.ndarray, y_hat: np.ndarray) -> float:
    return float(((y - y_hat) ** 2).sum() / ((y - y.mean(0)) ** 2).sum())


def _gradient(term: Term, sparsity: Sparsity, n_dead: int = 0, p: Tree | None = None) -> Arrays:
    gradient = jax.grad(lambda p: term(_context(sparsity, n_dead, p)))(p or _params())
    return {name: np.asarray(value, np.float64) for name, value in gradient.items()}


def _close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(np.abs(want).max(), 1e-9))


# --- reconstruction ----------------------------------------------------------------------------------------


def test_mse_and_fvu() -> None:
    c = _context()
    a = _f64(c)
    _close(Mse()(c), ((a["y"] - a["y_hat"]) ** 2).sum() / B)
    _close(Fvu()(c), _fvu(a["y"], a["y_hat"]))


def test_fvu_of_a_batch_without_variance_is_large_and_finite() -> None:
    y = jnp.ones((B, D))
    assert 1e6 < float(Fvu()(_context(y=y))) < np.inf


@pytest.mark.parametrize("prefixes", [(F,), (4, F), (1, 2, 3, F)])
@pytest.mark.parametrize("error", [Mse(), Fvu()], ids=["mse", "fvu"])
@pytest.mark.parametrize("sparsity", [Relu(), TopK(Ramp.constant(K))], ids=["dense", "sparse"])
def test_matryoshka_is_the_mean_over_prefixes(sparsity: Sparsity, error: Any, prefixes: tuple[int, ...]) -> None:
    c = _context(sparsity)
    a, errors = _f64(c), []
    for m in prefixes:
        y_hat = a["f"][:, :m] @ a["W_dec"][:m] + a["b_dec"]
        errors.append(_fvu(a["y"], y_hat) if isinstance(error, Fvu) else ((a["y"] - y_hat) ** 2).sum() / B)
    _close(Matryoshka(error=error, prefixes=prefixes)(c), np.mean(errors))


@pytest.mark.parametrize("sparsity", [Relu(), TopK(Ramp.constant(K))], ids=["dense", "sparse"])
def test_a_detached_prefix_teaches_its_own_latents(sparsity: Sparsity) -> None:
    taught = {2: range(2), 5: range(2, 5), 9: range(5, 9), F: range(F)}
    term, c = Matryoshka(prefixes=tuple(taught), detached=True), _context(sparsity)
    _close(term(c), Matryoshka(prefixes=tuple(taught))(c))
    a, g = _f64(c), _gradient(term, sparsity)
    to_f, want = np.zeros((B, F)), {name: np.zeros(np.shape(g[name])) for name in ("W_dec", "b_dec")}
    for m, latents in taught.items():
        error = 2 / B / len(taught) * (a["f"][:, :m] @ a["W_dec"][:m] + a["b_dec"] - a["y"])
        to_f[:, latents] += error @ a["W_dec"][latents].T
        want["W_dec"][latents] += a["f"][:, latents].T @ error
        want["b_dec"] += error.sum(0) if m in (2, F) else 0
    to_pre = to_f * (a["f"] > 0)
    _close(g["W_dec"], want["W_dec"])
    _close(g["b_enc"], to_pre.sum(0))
    _close(g["W_enc"], (a["x"] - a["b_dec"]).T @ to_pre)
    _close(g["b_dec"], want["b_dec"] - (to_pre @ a["W_enc"].T).sum(0))


def test_the_gate_reconstructs_with_everything_else_frozen() -> None:
    c = _context(Gated())
    a = _f64(c)
    want = ((a["y"] - np.maximum(a["pre"], 0) @ a["W_dec"] - a["b_dec"]) ** 2).sum() / B
    _close(GateReconstruction()(c), want)
    g = _gradient(GateReconstruction(), Gated())
    error = 2 / B * (np.maximum(a["pre"], 0) @ a["W_dec"] + a["b_dec"] - a["y"])
    to_pre = (error @ a["W_dec"].T) * (a["pre"] > 0)
    _close(g["b_enc"], to_pre.sum(0))
    _close(g["W_enc"], (a["x"] - a["b_dec"]).T @ to_pre, 1e-4)
    _close(g["b_dec"], -(to_pre @ a["W_enc"].T).sum(0), 1e-4)  # what the encoder reads, not what the decoder adds
    assert not g["W_dec"].any() and not g["r_mag"].any() and not g["b_mag"].any()


@pytest.mark.parametrize("kind", [TopK, AbsTopK, BatchTopK])
def test_multi_topk_is_a_second_reconstruction_with_more(kind: Any) -> None:
    sparsity = kind(Ramp.constant(K), 0.9) if kind is BatchTopK else kind(Ramp.constant(K))
    c = _context(sparsity)
    a, k = _f64(c), 2 * K
    score = np.abs(a["pre"]) if kind is AbsTopK else np.maximum(a["pre"], 0)
    border = np.sort(score.ravel())[-k * B] if kind is BatchTopK else np.sort(score, axis=1)[:, -k, None]
    f = np.where(score >= border, a["pre"] if kind is AbsTopK else score, 0)
    _close(MultiTopK(factor=2)(c), _fvu(a["y"], f @ a["W_dec"] + a["b_dec"]))


# --- sparsity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSITIES)
def test_l1_and_tanh_weigh_what_a_sparsity_penalises(name: str) -> None:
    k = Ramp.constant(K)
    made = {"topk": TopK(k), "abs_topk": AbsTopK(k), "batchtopk": BatchTopK(k, 0.9), "jumprelu": JumpRelu(0.1, EPS)}
    c = _context(made.get(name) or SPARSITIES[name]())
    a = _f64(c)
    penalised = np.maximum(a["pre"], 0) if name == "gated" else np.abs(a["f"])
    _close(NormWeightedL1()(c), (penalised * a["norms"]).sum() / B)
    _close(Tanh(scale=1.7)(c), np.tanh(1.7 * penalised * a["norms"]).sum() / B)


def test_l1_draws_at_the_decoders_length_too() -> None:
    """Else latents would shrink and rows grow."""
    a, g = _f64(_context()), _gradient(NormWeightedL1(), Relu())
    _close(g["W_dec"], a["f"].sum(0)[:, None] * a["W_dec"] / a["norms"][:, None] / B)
    _close(g["b_enc"], ((a["f"] > 0) * a["norms"]).sum(0) / B)


# p falls from 1 to 0.4 in 3 updates over 9 steps, after 4.
_LP = AnnealedLp(p=Ramp(1.0, 0.4, 9, 4), updates=3)


def test_the_power_is_held_between_updates() -> None:
    powers = [float(_LP._power(jnp.int32(step))) for step in range(16)]
    assert powers == pytest.approx([1.0] * 6 + [0.8] * 3 + [0.6] * 3 + [0.4] * 4)
    assert float(AnnealedLp()._power(jnp.int32(7))) == 1.0


@pytest.mark.parametrize(("step", "p"), [(0, 1.0), (6, 0.8), (12, 0.4)])
def test_lp_equals_numpy(step: int, p: float) -> None:
    c = _context(step=jnp.int32(step), stats={"lp_scale": jnp.float32(1.3)})
    a = _f64(c)
    w = a["f"] * a["norms"]
    _close(_LP(c), 1.3 * np.where(w > 0, np.where(w > 0, w, 1) ** p, 0).sum() / B)


def test_lp_does_not_jump_at_an_update_and_its_scale_rests_between() -> None:
    scale, values, scales = jnp.float32(_LP.statistics()["lp_scale"]), [], []
    for step in range(16):
        c = _context(step=jnp.int32(step), stats={"lp_scale": scale})
        values.append(float(_LP(c)))
        scales.append(float(scale))
        scale = _LP.follow(c.stats, _LP.seen(c))["lp_scale"]
    assert values == pytest.approx([values[0]] * 16, rel=1e-4)  # the same batch throughout: only p and the scale move
    changes = [step for step in range(1, 16) if scales[step] != scales[step - 1]]
    assert changes == [6, 9, 12]


def test_a_batch_of_zeros_at_an_update_leaves_the_scale_of_lp() -> None:
    p = _params() | {"b_enc": jnp.full(F, -1e3)}
    c = _context(p=p, step=jnp.int32(5), stats={"lp_scale": jnp.float32(1.3)})
    assert float(_LP.follow(c.stats, _LP.seen(c))["lp_scale"]) == np.float32(1.3)


def test_a_power_that_never_falls_is_1_at_every_step() -> None:
    """lp_end=1: the ramp has no length, but it has steps."""
    flat = AnnealedLp(p=Ramp(1.0, 1.0, 9, 4), updates=3)
    assert [float(flat._power(jnp.int32(step))) for step in range(16)] == [1.0] * 16


# Every term that looks at the length of a decoder row, with the sparsity it needs.
_ROW_TERMS: list[tuple[Term, Sparsity]] = [
    (NormWeightedL1(), Relu()),
    (dataclasses.replace(_LP, p=Ramp.constant(0.4)), Relu()),
    (Tanh(), Relu()),
    (PreActivation(), JumpRelu(0.0, EPS)),
    (Decorrelation(), Relu()),
    (GhostGradients(), Relu()),
    (AuxK(k=2), Relu()),
]


@pytest.mark.parametrize(("term", "sparsity"), _ROW_TERMS, ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize("zero", [slice(0, 2), slice(None)], ids=["some rows", "all rows"])
def test_decoder_rows_of_zero_have_a_finite_gradient(term: Term, sparsity: Sparsity, zero: slice) -> None:
    """Every length is 0 there, and the gradient of a length the least of its subgradients, which is 0."""
    p = _params()
    p["W_dec"] = p["W_dec"].at[zero].set(0)

    def value(p: Tree) -> Any:
        return term(_context(sparsity, 2, p, stats={"lp_scale": jnp.float32(1)}))

    found, gradient = jax.value_and_grad(value)(p)
    assert np.isfinite(found) and all(np.isfinite(g).all() for g in gradient.values())
    if term.name in ("l1", "lp", "tanh", "decorrelation"):
        np.testing.assert_array_equal(gradient["W_dec"][zero], 0)


def test_lp_has_a_finite_gradient_at_and_near_zero() -> None:
    p = _params()
    p["W_dec"] = p["W_dec"].at[0].set(1e-12)
    term = dataclasses.replace(_LP, p=Ramp.constant(0.4))
    g = jax.grad(lambda p: term(_context(p=p, stats={"lp_scale": jnp.float32(1)})))(p)
    assert all(np.isfinite(v).all() for v in g.values()) and np.abs(g["b_enc"]).max() > 0


# --- thresholds --------------------------------------------------------------------------------------------


def test_l0_counts_and_target_l0_is_its_square_distance() -> None:
    c = _context(JumpRelu(0.0, EPS))
    a = _f64(c)
    l0 = (a["pre"] > a["theta"]).sum() / B
    _close(L0()(c), l0)
    _close(TargetL0(target=4.0)(c), (l0 / 4 - 1) ** 2)
    _close(TargetL0(target=4.0, each=True)(c), ((((a["pre"] > a["theta"]).sum(1)) / 4 - 1) ** 2).mean())
    _close(FiringFrequency(scale=0.3)(c), ((a["pre"] > a["theta"]).mean(0) ** 2).sum() / 0.3)


@pytest.mark.parametrize("through_input", [False, True])
def test_gradients_of_l0_and_its_target(through_input: bool) -> None:
    sparsity = JumpRelu(0.0, EPS, through_input)
    a = _f64(_context(sparsity))
    rect = (np.abs(a["pre"] - a["theta"]) < EPS / 2) / EPS
    assert 5 < (rect > 0).sum() < rect.size - 5
    g, h = _gradient(L0(), sparsity), _gradient(TargetL0(target=4.0), sparsity)
    _close(g["threshold"], -rect.sum(0) / B)
    _close(g["b_enc"], through_input * rect.sum(0) / B)
    _close(g["W_enc"], through_input * (a["x"] - a["b_dec"]).T @ rect / B)
    l0 = (a["pre"] > a["theta"]).sum() / B
    for name in ("threshold", "b_enc", "W_enc"):
        _close(h[name], 2 * (l0 / 4 - 1) / 4 * g[name], 1e-4)
    of_token = _gradient(TargetL0(target=4.0, each=True), sparsity)
    counts = (a["pre"] > a["theta"]).sum(1, keepdims=True)
    _close(of_token["threshold"], -(2 * (counts / 4 - 1) / 4 * rect).sum(0) / B)
    of_frequency = _gradient(FiringFrequency(scale=0.3), sparsity)
    _close(of_frequency["threshold"], -2 * (a["pre"] > a["theta"]).mean(0) / 0.3 * rect.mean(0))


def _jump(pre: list[float], raw: float, of: str, through_input: bool = False) -> tuple[np.ndarray, ...]:
    """(values, d / d pre, d / d raw threshold of each) of the latents or of the soft count, element by element."""
    sparsity, pre_1N = JumpRelu(0.0, EPS, through_input), jnp.asarray([pre], jnp.float32)
    raw_N = jnp.full(len(pre), raw, jnp.float32)

    def value(pre_1N: jax.Array, raw_N: jax.Array) -> jax.Array:
        if of == "latents":
            return sparsity(pre_1N, lambda at: at, {"threshold": raw_N}, jnp.int32(0)).values
        return sparsity.soft_l0(pre_1N, {"threshold": raw_N})

    out, pull = jax.vjp(value, pre_1N, raw_N)
    to_pre, to_raw = pull(jnp.ones_like(out))
    return tuple(np.asarray(v).ravel() for v in (out, to_pre, to_raw))


def test_latents_jump_and_their_straight_through_gradient() -> None:
    """theta 0.5, window 1 wide: open at 0 and 1. At theta itself a latent is still 0."""
    pre = [-1.0, -0.05, 0.0, 0.01, 0.5, 0.51, 0.99, 1.0, 2.0]
    window = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0]) / EPS
    f, to_pre, to_theta = _jump(pre, 0.5, "latents")
    np.testing.assert_allclose(f, [0, 0, 0, 0, 0, 0.51, 0.99, 1, 2], rtol=1e-6)
    np.testing.assert_array_equal(to_pre, [0, 0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(to_theta, -0.5 * window, rtol=1e-6)
    soft, to_pre, to_theta = _jump(pre, 0.5, "count")
    np.testing.assert_array_equal(soft, [0, 0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(to_pre, 0)
    np.testing.assert_allclose(to_theta, -window, rtol=1e-6)
    _, to_pre, to_theta = _jump(pre, 0.5, "count", through_input=True)
    np.testing.assert_allclose(to_pre, window, rtol=1e-6)
    np.testing.assert_allclose(to_theta, -window, rtol=1e-6)


def test_a_negative_threshold_acts_as_zero_and_can_come_back() -> None:
    pre = [-0.5, -0.3, 0.0, 0.3, 0.5]
    f, to_pre, to_raw = _jump(pre, -0.2, "latents")
    np.testing.assert_allclose(f, [0, 0, 0, 0.3, 0.5], rtol=1e-6)
    np.testing.assert_array_equal(to_pre, [0, 0, 0, 1, 1])
    assert not to_raw.any()
    soft, _, to_raw = _jump(pre, -0.2, "count")
    np.testing.assert_array_equal(soft, [0, 0, 0, 1, 1])
    np.testing.assert_allclose(to_raw, -np.array([0, 1, 1, 1, 0]) / EPS, rtol=1e-6)


@pytest.mark.parametrize("dead_only", [False, True])
def test_pre_activation_draws_encoder_thresholds_and_rows(dead_only: bool) -> None:
    term, sparsity, n_dead = PreActivation(dead_only=dead_only), JumpRelu(0.0, EPS), 5
    c = _context(sparsity, n_dead)
    a = _f64(c)
    chosen = a["dead"] if dead_only else np.ones(F)
    _close(term(c), (np.maximum(a["theta"] - a["pre"], 0) * a["norms"] * chosen).sum() / B)
    g = _gradient(term, sparsity, n_dead)
    _close(g["b_enc"], -((a["pre"] < a["theta"]) * a["norms"] * chosen).sum(0) / B)
    _close(g["threshold"], ((a["pre"] < a["theta"]) * a["norms"] * chosen).sum(0) / B)
    distance = (np.maximum(a["theta"] - a["pre"], 0) * chosen).sum(0) / B
    _close(g["W_dec"], distance[:, None] * a["W_dec"] / a["norms"][:, None])


# --- dead latents ------------------------------------------------------------------------------------------


def _of_groups(p: Tree, x: jax.Array, y: jax.Array, dead: jax.Array) -> Context:
    """Context of a cross-layer transcoder with two groups."""
    topology, sparsity, step = CrossLayerTranscoder(D, F, sites=G, matmul_dtype="float32"), Relu(), jnp.int32(0)
    pre = topology.pre_activations(p, x)

    def keep(at: jax.Array) -> jax.Array:
        return jnp.take_along_axis(pre, at, axis=-1)

    latents = sparsity(pre, keep, p, step)
    y_hat = topology.decode(p, latents, x)
    return Context(topology, sparsity, p, x, y, y_hat, pre, keep, latents, dead, {}, step)


def _groups(dead: list[list[int]]) -> tuple[Context, Arrays, np.ndarray]:
    """With random parameters and tokens; the latents named are dead."""
    rng, is_dead = np.random.default_rng(2), np.zeros((G, F), bool)
    shapes = {"W_enc": (G, D, F), "b_enc": (G, F), "W_dec_0": (F, 2, D), "W_dec_1": (F, 1, D), "b_dec": (G, D)}
    p = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, y = (jnp.asarray(rng.normal(size=(B, G, D)), jnp.float32) for _ in range(2))
    for group, latents in enumerate(dead):
        is_dead[group, latents] = True
    c = _of_groups(p, x, y, jnp.asarray(is_dead))
    arrays = {"pre": c.pre, "e": c.y - c.y_hat} | p
    return c, {name: np.array(value, np.float64) for name, value in arrays.items()}, is_dead


@functools.cache
def _auxk_of_three() -> Any:
    """Compiled once: which latents are dead is data."""

    def value(p: Tree, x: jax.Array, y: jax.Array, dead: jax.Array) -> jax.Array:
        return AuxK(k=3)(_of_groups(p, x, y, dead))

    return jax.jit(jax.value_and_grad(value))


@pytest.mark.parametrize("dead", [[[0, 3], []], [[0, 3, 5, 7], [1]], [list(range(F)), [2, 4]]])
def test_auxk_takes_the_k_best_of_the_dead_in_each_group(dead: list[list[int]]) -> None:
    """k 3: groups with none, fewer and more dead than k side by side."""
    c, a, is_dead = _groups(dead)
    e_hat = np.zeros((B, G, D))
    for b, group in np.ndindex(B, G):
        best = sorted(np.flatnonzero(is_dead[group]), key=lambda i, b=b, group=group: -a["pre"][b, group, i])[:3]  # type: ignore[misc]
        for i in best:
            e_hat[b, group:] += max(a["pre"][b, group, i], 0) * a[f"W_dec_{group}"][i]
    with jax.disable_jit(False):
        value, g = _auxk_of_three()(c.params, c.x, c.y, c.dead)
    _close(value, ((a["e"] - e_hat) ** 2).sum() / ((a["e"] - a["e"].mean(0)) ** 2).sum())
    assert not g["b_dec"].any()
    for group in range(G):
        rows = np.abs(g[f"W_dec_{group}"]).sum((1, 2))
        assert not rows[~is_dead[group]].any() and not np.asarray(g["b_enc"])[group][~is_dead[group]].any()
        assert (rows[is_dead[group]] > 0).any() == bool(dead[group])


@pytest.mark.parametrize("sparsity", [Relu(), TopK(Ramp.constant(K)), JumpRelu(0.0, EPS), Gated()])
@pytest.mark.parametrize("n_dead", [0, 5, F])
def test_lift_raises_the_dead_that_no_token_makes_positive(sparsity: Sparsity, n_dead: int) -> None:
    p = _params()
    p["b_enc"] = p["b_enc"].at[F - 8 : F - 2].add(-20)
    p["threshold"] = p["threshold"].at[F - 2 :].add(20)
    a = _f64(_context(sparsity, n_dead, p))
    silent = (a["dead"] > 0) & (a["pre"] <= 0).all(0)
    assert (silent.sum() >= 3) == (n_dead > 0)
    highest, unreached = a["pre"].max(0), np.zeros(F, bool)
    if isinstance(sparsity, JumpRelu):
        unreached = (a["dead"] > 0) & (highest < a["theta"])
        assert unreached.sum() > silent.sum() or not n_dead
    wanted = ((a["theta"] - highest) * unreached).sum() - (highest * silent).sum()
    _close(Lift()(_context(sparsity, n_dead, p)), wanted)
    moved = {"b_enc": -1.0 * silent, "threshold": 1.0 * unreached}
    moved |= {"b_mag": -1.0 * silent} if isinstance(sparsity, Gated) else {}
    for name, gradient in _gradient(Lift(), sparsity, n_dead, p).items():
        np.testing.assert_array_equal(gradient, moved.get(name, np.zeros_like(gradient)), err_msg=name)


def _ghost(a: Arrays, e: np.ndarray) -> float:
    """A loss of the same size as the reconstruction error, whose ghosts are half as long as the residual."""
    g = (np.exp(a["pre"]) * a["dead"]) @ a["W_dec"]
    s = np.linalg.norm(e, axis=1, keepdims=True) / (2 * np.linalg.norm(g, axis=1, keepdims=True) + 1e-6)
    error = ((e - s * g) ** 2).sum() / B
    return float(error * ((e**2).sum() / B) / (error + 1e-6))


@pytest.mark.parametrize("n_dead", [0, 1, 5, F])
def test_ghosts_equal_numpy(n_dead: int) -> None:
    c = _context(n_dead=n_dead)
    a = _f64(c)
    value = float(GhostGradients()(c))
    assert value == pytest.approx(_ghost(a, a["y"] - a["y_hat"]) if n_dead else 0.0, rel=1e-5)
    if n_dead:
        assert value == pytest.approx(((a["y"] - a["y_hat"]) ** 2).sum() / B, rel=1e-4)


def test_ghosts_move_the_dead_alone_against_a_closed_form() -> None:
    """d / d g of a |e - s g|^2 with a and s held: -2 a s (e - s g)."""
    n_dead = 5
    a, got = _f64(_context(n_dead=n_dead)), _gradient(GhostGradients(), Relu(), n_dead)
    e, exp = a["y"] - a["y_hat"], np.exp(a["pre"]) * a["dead"]
    g = exp @ a["W_dec"]
    s = np.linalg.norm(e, axis=1, keepdims=True) / (2 * np.linalg.norm(g, axis=1, keepdims=True))
    np.testing.assert_allclose(np.linalg.norm(s * g, axis=1), np.linalg.norm(e, axis=1) / 2)
    weight = (e**2).sum() / ((e - s * g) ** 2).sum()
    to_g = -2 / B * weight * s * (e - s * g)
    to_pre = (to_g @ a["W_dec"].T) * exp
    _close(got["W_dec"], exp.T @ to_g, 1e-4)
    _close(got["b_enc"], to_pre.sum(0), 1e-4)
    _close(got["W_enc"], (a["x"] - a["b_dec"]).T @ to_pre, 1e-4)
    live = slice(0, F - n_dead)
    assert not got["W_dec"][live].any() and not got["b_enc"][live].any() and not got["W_enc"][:, live].any()


@pytest.mark.parametrize(("latent", "bias"), [(0, 1000.0), (F - 1, 1000.0), (slice(None), -1000.0)])
def test_ghosts_can_neither_overflow_nor_vanish(latent: Any, bias: float) -> None:
    """Latent 0 lives, the last is dead and large in this batch; or all are far below 0, where exp is 0 in float32."""
    p = _params()
    p["b_enc"] = p["b_enc"].at[latent].set(bias)
    g = _gradient(GhostGradients(), Relu(), 5, p)
    assert all(np.isfinite(v).all() for v in g.values()) and np.abs(g["W_dec"]).max() > 0


# --- shape of the decoder ----------------------------------------------------------------------------------


def _mean_squared_cosine(rows: np.ndarray) -> float:
    d = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    gram = d @ d.T
    return float((gram[~np.eye(len(d), dtype=bool)] ** 2).mean())


@pytest.mark.parametrize("n", [3, F], ids=["fewer latents than dimensions", "more"])
def test_decorrelation_equals_the_gram_matrix(n: int) -> None:
    c = _context()
    rows = np.asarray(c.params["W_dec"][:n], np.float64)
    c = dataclasses.replace(c, params=c.params | {"W_dec": c.params["W_dec"][:n]})
    _close(Decorrelation()(c), _mean_squared_cosine(rows))


def test_decorrelation_is_the_mean_over_groups_and_zero_where_rows_are_orthogonal() -> None:
    c, a, _ = _groups([[], []])
    rows = [a[name].reshape(F, -1) for name in ("W_dec_0", "W_dec_1")]
    _close(Decorrelation()(c), np.mean([_mean_squared_cosine(r) for r in rows]))
    orthogonal = dataclasses.replace(_context(), params=_params() | {"W_dec": 3 * jnp.eye(D)})
    assert float(Decorrelation()(orthogonal)) == pytest.approx(0, abs=1e-6)


# --- ramps -------------------------------------------------------------------------------------------------


def test_ramps() -> None:
    rising = Ramp(1.0, 3.0, over=4, after=2)
    assert [float(rising(step)) for step in range(8)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert float(Ramp(0.0, 2.0)(0)) == 2.0 and float(Ramp.constant(5.0)(jnp.int32(3))) == 5.0
    assert [r.largest for r in (Ramp(8, 3, 5), Ramp(3, 8, 5), Ramp(8, 3))] == [8, 8, 3]


@functools.cache
def _many() -> np.ndarray:
    """[B, F] pre-activations, all positive: nothing kept is 0."""
    return np.random.default_rng(3).uniform(0.1, 1, (B, F)).astype(np.float32)


@pytest.mark.parametrize("kind", [TopK, AbsTopK, BatchTopK])
def test_the_number_of_kept_latents_falls_to_k(kind: Any) -> None:
    """k from 10 to 3 over 7 steps: 9, 8, ... 3, 3; for a batch that number of each token on average."""
    ramp, pre = Ramp(10, K, 7), jnp.asarray(_many())
    sparsity = kind(ramp, 0.9) if kind is BatchTopK else kind(ramp)

    def kept(sparsity: Sparsity, step: int) -> Latents:
        return sparsity(pre, lambda at: jnp.take_along_axis(pre, at, axis=-1), {}, jnp.int32(step))

    for step, k in enumerate([9, 8, 7, 6, 5, 4, 3, 3, 3]):
        f = np.asarray(kept(sparsity, step).dense())
        assert (f > 0).sum() == k * B
        per_token = np.sort(_many(), axis=1)[:, -k, None]
        border = np.sort(_many().ravel())[-k * B] if kind is BatchTopK else per_token
        np.testing.assert_array_equal(f, np.where(_many() >= border, _many(), 0))
    if kind is not BatchTopK:
        after, _ = sparsity.inference({}, {}, (F,))
        assert kept(after, 0).values.shape == (B, K)  # no candidates beyond the last k


def test_a_fractional_k_of_a_batch_is_rounded_for_the_whole_batch() -> None:
    """Between k 4 and 3: 7 tokens keep 25 latents together, which no k of a token gives."""
    pre = jnp.asarray(_many())
    latents = BatchTopK(Ramp(4, 3, 7), 0.9)(pre, lambda at: at, {}, jnp.int32(2))
    assert int((latents.values > 0).sum()) == round((4 - 3 / 7) * B)


def test_the_threshold_of_a_batch_follows_the_smallest_kept() -> None:
    pre, sparsity = jnp.asarray(_many()), BatchTopK(Ramp.constant(K), 0.9)
    latents, late = sparsity(pre, lambda at: at, {}, jnp.int32(0)), 100
    smallest = np.sort(_many().ravel())[-K * B]
    start = {"threshold": jnp.float32(sparsity.statistics()["threshold"])}
    first = sparsity.follow(start, sparsity.seen(latents), 0)
    assert float(first["threshold"]) == pytest.approx(smallest)
    second = sparsity.follow({"threshold": jnp.float32(0.2)}, sparsity.seen(latents), late)
    assert float(second["threshold"]) == pytest.approx(0.9 * 0.2 + 0.1 * smallest)
    nothing = sparsity.seen(Latents(jnp.zeros((B, F)), None, F))
    assert float(sparsity.follow(second, nothing, late)["threshold"]) == float(second["threshold"])
    assert float(sparsity.follow(start, nothing, late)["threshold"]) == float(start["threshold"])


@pytest.mark.parametrize("warmed", [True, False])
def test_a_warmed_threshold_forgets_where_it_started(warmed: bool) -> None:
    """Against float64, of smallest values that rise as the square root of the step; it ends a tenth of the way back."""
    sparsity, theta, want = BatchTopK(Ramp.constant(K), 0.99, warmed), {"threshold": jnp.float32(-1)}, -1.0
    for step in range(200):
        smallest = np.sqrt(step + 1.0)
        seen = {"smallest": jnp.float32(2 * smallest), "selections": jnp.float32(2)}  # of two parts
        theta = sparsity.follow(theta, seen, jnp.int32(step))
        decay = min(0.99, (1 + step) / (10 + step)) if warmed else 0.99
        want = smallest if step == 0 else decay * want + (1 - decay) * smallest
        assert float(theta["threshold"]) == pytest.approx(want, rel=1e-5)
    assert (abs(float(theta["threshold"]) / np.sqrt(200 - 20.0) - 1) < 0.05) == warmed
