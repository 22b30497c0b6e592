"""Optimizers and schedules against points computed by hand, and what a step does with them."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny.covering import rest_in

from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.core.errors import ConfigError
from saejax.parallel import ParallelConfig, check_divides, make_mesh
from saejax.store import ArrayRows, Batches
from saejax.trained import make_sites
from saejax.training import TrainConfig, TrainState, program_of_one
from saejax.training.memory import Memory
from saejax.training.optim import OPTIMIZERS, make_optimizer, make_schedule, steps_taken, usual_bias_rate, usual_rate
from saejax.training.start import read_spread
from saejax.training.state import abstract_state, init_state, make_init
from saejax.training.step import compile_step, default_hyper, make_step

B, D, F = 32, 8, 24
SITES = Sites(("h",), ("h",), (1.0,), (1.0,))


def _config(optimizer: str = "adam", **values: Any) -> TrainConfig:
    """A constant rate of 0.1 from the first step on, nothing clipped."""
    own: dict[str, Any] = {"schedule": "constant", "warmup_fraction": 0.0, "lr": 0.1, "clip_norm": 0.0}
    return TrainConfig(tokens=100 * B, batch_size=B, optimizer=optimizer, **(own | values))


def test_the_usual_rate() -> None:
    """Falls with the square roots of steps and width and the fourth root of latents, rises with that of the batch."""
    config = TrainConfig(tokens=1_024_000, batch_size=1024)
    assert usual_rate(config, 100, 10_000) == 0.00632  # 20 / sqrt(1,000 x 100 x 100)
    slower = dataclasses.replace(config, tokens=4_096_000)
    assert usual_rate(config, 400, 10_000) == usual_rate(config, 100, 160_000) == usual_rate(slower, 100, 10_000)
    assert usual_rate(slower, 100, 10_000) == 0.00316
    assert usual_rate(dataclasses.replace(config, batch_size=16 * 1024, tokens=16_384_000), 100, 10_000) == 0.0126
    assert usual_rate(dataclasses.replace(config, optimizer="lion"), 100, 10_000) == 0.000632
    assert usual_rate(dataclasses.replace(config, tokens=1024), 8, 16) == 0.03
    for make in (make_schedule, make_optimizer):
        with pytest.raises(ConfigError, match=r"set train\.lr"):
            make(config)


def test_the_usual_rate_of_biases() -> None:
    """In a short training so many times the learning rate that steps x rate x times is what 7 / rate steps would give;
    between the least that is said and 20."""
    config = TrainConfig(tokens=1_024_000, batch_size=1024)
    assert usual_bias_rate(config, 100, 10_000, 2.0) == 2.2  # 7 / (1,000 x 0.00632) = 1.107
    assert usual_bias_rate(dataclasses.replace(config, tokens=256_000), 100, 10_000, 2.0) == 4.4
    assert usual_bias_rate(dataclasses.replace(config, tokens=2_048_000), 100, 10_000, 5.0) == 5.0
    assert usual_bias_rate(dataclasses.replace(config, tokens=10_240), 100, 10_000, 2.0) == 20.0
    assert usual_bias_rate(dataclasses.replace(config, optimizer="lion"), 100, 10_000, 2.0) == 2.2
    assert usual_bias_rate(dataclasses.replace(config, lr=1.0), 100, 10_000, 2.0) == 2.2


@pytest.mark.parametrize(
    ("preset", "spread", "times"),
    rest_in(
        "ci",
        [
            *(("topk", (), 4.7), ("gated", (), 4.7), ("standard", (), 12.0), ("jumprelu", (), 1.0)),
            *(("topk", (0.25,), 4.7 * 0.25), ("jumprelu", (0.25,), 1.0)),
        ],
        [("standard", (), 12.0), ("topk", (0.25,), 4.7 * 0.25), ("jumprelu", (0.25,), 1.0)],
    ),
)
def test_where_the_rate_of_biases_is_open_it_is_the_usual_one(
    preset: str, spread: tuple[float, ...], times: float
) -> None:
    """Of 100 steps at 0.03, of the coder, and of the spread of what it reads: relu's are faster, and one without a
    centre has the learning rate."""
    mesh = make_mesh(ParallelConfig((1, 1)))
    moved = {}
    for told in (1.0, None):
        config = _config(b_enc_rate=told, b2=0.99)
        coder = build(CoderConfig(preset, d_sae=16, k=4, target_l0=4.0), 8, config.steps)
        program = program_of_one(coder, config, SITES, lambda params: params, mesh, seed=0, spread=spread)
        before = program.start()
        b_enc = np.asarray(before.params["b_enc"])
        x = jax.random.normal(jax.random.key(0), (B, 8))
        moved[told] = np.asarray(program.step(before, {"h": x}, program.hyper)[0].params["b_enc"]) - b_enc
    assert np.abs(moved[1.0]).max() > 0
    np.testing.assert_allclose(moved[None], times * moved[1.0], rtol=1e-4, atol=1e-6)


def test_each_group_of_latents_has_the_spread_of_its_own_site() -> None:
    params = {"W_enc": jnp.ones((2, 4, 8)), "b_enc": jnp.ones((2, 8)), "centre": jnp.zeros((2, 4))}
    config = _config(b2=0.99)
    first = {}
    for spread in ((), (0.5, 0.01)):
        optimizer = make_optimizer(config, 2.0, spread)
        first[spread] = optimizer.update(params, optimizer.init(params), params, value=jnp.float32(1))[0]["b_enc"]
    np.testing.assert_allclose(first[0.5, 0.01], np.array([[0.5], [0.01]]) * first[()], rtol=1e-6)


@pytest.mark.parametrize(("preset", "groups"), [("topk", 1), ("crosscoder", 1), ("clt", 2)])
def test_the_spread_is_what_is_left_without_the_mean(preset: str, groups: int) -> None:
    """Of all that one latent reads together, in the training's scales, in float64."""
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(500, 4)) + 7, "b": 20 * rng.normal(size=(500, 4)) + 1}
    names = ("a",) if preset == "topk" else ("a", "b")
    coder = build(CoderConfig(preset, d_sae=16, k=4), [4] * len(names), 100, [4] * len(names))
    statistics = ArrayRows({name: x[name].astype(np.float32) for name in names}).statistics
    sites = make_sites(CoderConfig(preset), coder.topology, names, names, statistics)
    scales = dict(zip(names, sites.read_scales, strict=True))
    scaled = [x[name].astype(np.float32) * np.float64(scales[name]) for name in names]
    read = [np.concatenate(scaled, axis=1)] if groups == 1 else scaled
    want = [np.sqrt(np.square(z - z.mean(0)).sum() / np.square(z).sum()) for z in read]
    np.testing.assert_allclose(read_spread(coder, sites, statistics), want, rtol=1e-6)
    assert min(want) < (0.2 if preset != "crosscoder" else 0.8)


def _first_update(config: TrainConfig, params: dict[str, jax.Array], grads: dict[str, jax.Array]) -> Any:
    optimizer = make_optimizer(config)
    update = jax.jit(lambda p, g: optimizer.update(g, optimizer.init(p), p, value=jnp.float32(1))[0])
    return jax.device_get(update(params, grads))


@pytest.mark.parametrize("optimizer", ["adam", "lion", "schedule_free"])
def test_biases_of_a_coder_with_a_centre_are_faster(optimizer: str) -> None:
    """And of no other coder, nor where the optimizer averages: its average would be of other weights."""
    params = {name: jnp.ones(3) for name in ("W_enc", "b_enc", "b_dec")}
    grads = {name: jnp.array([1.0, -2.0, 3.0]) for name in params}
    zero = {"centre": jnp.zeros(3)}

    def updates(rate: float, extra: dict[str, jax.Array]) -> Any:
        return _first_update(_config(optimizer, b2=0.99, b_enc_rate=rate), params | extra, grads | extra)

    slow, fast, none = updates(1.0, zero), updates(4.0, zero), updates(4.0, {})
    for name in params:
        times = 4 if name == "b_enc" and optimizer != "schedule_free" else 1
        np.testing.assert_allclose(fast[name], times * slow[name], rtol=1e-6)
        np.testing.assert_allclose(none[name], slow[name], rtol=1e-6)
    np.testing.assert_array_equal(fast["centre"], 0)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon", "lion", "schedule_free"])
@pytest.mark.parametrize(("extra", "b2"), [({"centre": jnp.zeros(3)}, 0.99), ({}, 0.999)])
def test_b2_is_chosen_by_the_centre(optimizer: str, extra: dict[str, jax.Array], b2: float) -> None:
    """Three steps by the open setting are those by the number that it stands for, and not those by another."""
    params = {"W_enc": jnp.eye(3), "b_enc": jnp.ones(3)} | extra
    grads = [{name: scale * jnp.cos(5 * p + 1) for name, p in params.items()} for scale in (1.0, -3.0, 0.25)]

    def three(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
        state = rule.init(params)
        for g in grads:
            updates, state = rule.update(g, state, params, value=jnp.float32(1))
            params = optax.apply_updates(params, updates)
        return params

    ends = {}
    for told in (None, b2, 0.9):
        rule = make_optimizer(_config(optimizer, b2=told))
        ends[told] = jax.device_get(three(params))
    for name in params:
        np.testing.assert_array_equal(ends[None][name], ends[b2][name])
    assert any(np.any(ends[0.9][name] != ends[b2][name]) for name in params)


# --- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "points"),
    [
        ({"schedule": "constant"}, {50: 1.0, 100: 2.0, 999: 2.0}),
        ({"schedule": "linear"}, {50: 1.0, 100: 2.0, 550: 1.25, 1000: 0.5}),
        ({"schedule": "decay", "decay_fraction": 0.5}, {100: 2.0, 500: 2.0, 750: 1.25, 1000: 0.5}),
        ({"schedule": "plateau"}, {50: 1.0, 100: 2.0, 999: 2.0}),
        # Cycles of 225, 450 and 900 steps, the last of them cut; a third of a cosine is (1 + 1/2) / 2.
        (
            {"schedule": "cosine_restarts", "restart_period": 0.25, "restart_multiplier": 2.0},
            {
                50: 1.0,
                100: 2.0,
                175: 0.5 + 1.5 * 0.75,
                325: 2.0,
                550: 1.25,
                775: 2.0,
                1000: 0.5 + 0.75 * (1 + 0.5**0.5),
            },
        ),
        ({"schedule": "cosine_restarts", "restart_period": 1.0}, {100: 2.0, 550: 1.25}),
        # Cycles of one step each: always at the start of one.
        ({"schedule": "cosine_restarts", "restart_period": 1e-6, "restart_multiplier": 1.0}, {100: 2.0, 1000: 2.0}),
    ],
)
def test_schedules_by_hand(values: dict[str, Any], points: dict[int, float]) -> None:
    config = TrainConfig(tokens=2000, batch_size=2, lr=2.0, warmup_fraction=0.1, final_lr_fraction=0.25, **values)
    rates = jax.vmap(make_schedule(config))(jnp.array(list(points)))
    assert np.asarray(rates) == pytest.approx(list(points.values()), rel=1e-4)


# --- one update --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"muon"}))
def test_the_first_update_is_the_sign_of_the_gradient(optimizer: str) -> None:
    """Of all but muon: the moments' first values are the gradient itself and its square."""
    params = {"W_dec": jnp.full((3, 2), 0.5), "b_dec": jnp.full(2, 0.5)}
    grads = {"W_dec": jnp.array([[1.0, -2.0], [0.1, 3.0], [-5.0, 0.5]]), "b_dec": jnp.array([-0.3, 0.2])}
    updates = _first_update(_config(optimizer), params, grads)
    for name, grad in grads.items():
        np.testing.assert_allclose(updates[name], -0.1 * np.sign(grad), rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_says_how_far_it_is_on_its_schedule(optimizer: str) -> None:
    chain = make_optimizer(_config(optimizer, warmup_fraction=0.1))
    params = {"W_dec": jnp.ones((3, 2)), "b_dec": jnp.ones(2)}

    @jax.jit
    def taken(params: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before = chain.init(params)
        after = chain.update(params, before, params, value=jnp.float32(1))[1]
        return steps_taken(before, jnp.int32(-1)), steps_taken(after, jnp.int32(-1))

    assert [int(steps) for steps in taken(params)] == [0, 1]
    assert steps_taken(make_optimizer(_config("schedule_free")).init(params), 7) == 7


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_weight_decay_is_for_weights_and_not_for_biases_and_thresholds(optimizer: str) -> None:
    params = {"W_enc": jnp.ones((2, 3)), "W_dec_1": jnp.ones((3, 2, 2)), "b_dec": jnp.ones(2), "threshold": jnp.ones(3)}
    updates = _first_update(_config(optimizer, weight_decay=0.3), params, jax.tree.map(jnp.zeros_like, params))
    for name, update in updates.items():
        np.testing.assert_allclose(update, -0.03 if name.startswith("W") else 0, atol=1e-7, err_msg=name)


@pytest.mark.parametrize(
    ("shapes", "site"),
    [
        ({"W_enc": (D, F), "W_dec": (F, D), "b_enc": (F,), "b_dec": (D,)}, {}),
        # Crosscoder and cross-layer transcoder: each site is a matrix; biases [sites, D] are none.
        ({"W_enc": (3, D, F), "W_dec": (F, 3, D), "b_enc": (F,), "b_dec": (3, D)}, {"W_enc": 0, "W_dec": 1}),
        ({"W_enc": (2, D, F), "W_dec_0": (F, 2, D), "W_dec_1": (F, 1, D), "b_enc": (2, F), "b_dec": (2, D)},
         {"W_enc": 0, "W_dec_0": 1, "W_dec_1": 1}),
    ],
)  # fmt: skip
def test_muon_makes_the_update_of_each_weight_orthogonal(
    shapes: dict[str, tuple[int, ...]], site: dict[str, int]
) -> None:
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))
    grads = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    updates = _first_update(_config("muon"), jax.tree.map(jnp.zeros_like, grads), grads)
    for name, update in updates.items():
        if not name.startswith("W"):
            # Adam with Nesterov's momentum: 0.9 x 0.1 / (1 - 0.9^2) + 1 times the sign.
            sign = np.sign(grads[name]) * (0.09 / 0.19 + 1)
            np.testing.assert_allclose(update, -0.1 * sign, rtol=1e-4, err_msg=name)
            continue
        matrices = np.moveaxis(update, site[name], 0) if name in site else update[None]
        singular = np.linalg.svd(matrices, compute_uv=False) / (
            0.1 * max(1, matrices.shape[2] / matrices.shape[1]) ** 0.5
        )
        # Newton-Schulz brings singular values near 1, not to it; those of the gradient lie between 2 and 9.
        assert singular.min() > 0.5 and singular.max() < 1.5, name


def test_gradients_are_clipped_to_the_global_norm_before_the_optimizer() -> None:
    params = {"W_dec": jnp.zeros((2, 2)), "b_dec": jnp.zeros(2)}
    grads = {"W_dec": jnp.full((2, 2), 6.0), "b_dec": jnp.full(2, 8.0)}
    optimizer = make_optimizer(_config(clip_norm=2.0, b1=0.75))
    _, state = optimizer.update(grads, optimizer.init(params), params, value=jnp.float32(1))
    mu = optax.tree.get(state, "mu")
    # Of norm sqrt(4 x 36 + 2 x 64); a quarter of the clipped gradient is what the first moment takes.
    np.testing.assert_allclose(mu["W_dec"], 0.25 * 6 * 2 / 272**0.5, rtol=1e-5)
    np.testing.assert_allclose(mu["b_dec"], 0.25 * 8 * 2 / 272**0.5, rtol=1e-5)


# --- a step ------------------------------------------------------------------------------------------------


def _coder(**values: Any) -> Coder:
    own = {"l1_coefficient": 0.3} | values
    return build(CoderConfig("standard", d_sae=F, matmul_dtype="float32", **own), D, steps=100)


def _batch(i: int = 0) -> dict[str, jax.Array]:
    return {"h": jnp.asarray(np.random.default_rng(i).normal(size=(B, D)), jnp.float32)}


def _steps(
    config: TrainConfig, n: int, coder: Coder | None = None, same: bool = False, **hyper: float
) -> tuple[list[TrainState], list[dict[str, float]]]:
    """States and metrics of n steps, from the state at the start on."""
    coder = coder or _coder()
    optimizer = make_optimizer(config)
    step = jax.jit(make_step(coder, optimizer, make_schedule(config), SITES, config))
    states, rows = [jax.jit(make_init(coder, optimizer, config))(0)], []
    for i in range(n):
        told = default_hyper(0) | {name: jnp.float32(value) for name, value in hyper.items()}
        state, metrics = step(states[-1], _batch(0 if same else i), told)
        states.append(state)
        rows.append({name: float(value) for name, value in metrics.items()})
    return states, rows


def test_the_plateau_halves_the_rate_that_is_logged_and_used() -> None:
    """Windows of 2 steps: the first is the best so far; after 3 that are no better the rate is halved."""
    config = _config(schedule="plateau", lr=1e-9, plateau_window=2, plateau_patience=3, plateau_factor=0.5)
    states, rows = _steps(config, 15, same=True)
    assert [row["lr"] for row in rows] == pytest.approx([1e-9] * 7 + [5e-10] * 6 + [2.5e-10] * 2, rel=1e-5)
    assert np.asarray(optax.tree.get(states[-1].opt_state, "scale")) == 0.25


def test_a_factor_of_the_rate_is_another_rate_and_of_sparsity_another_coefficient() -> None:
    (_, factor), rows = _steps(_config(), 1, lr=0.5, sparsity=2.0)
    (_, own), own_rows = _steps(_config(lr=0.05), 1, _coder(l1_coefficient=0.6))
    assert rows[0]["loss"] == pytest.approx(own_rows[0]["loss"], rel=1e-6)
    assert rows[0]["lr"] == own_rows[0]["lr"] == pytest.approx(0.05)
    for name, value in own.params.items():
        np.testing.assert_allclose(factor.params[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


def test_schedule_free_evaluates_the_mean_of_what_it_steps() -> None:
    """At a constant rate x is the plain mean of z_1 ... z_t. (Defazio et al. 2024, eq. 3)"""
    states, _ = _steps(_config("schedule_free"), 4)
    z = np.stack([np.asarray(state.opt_state[1].z["W_enc"], np.float64) for state in states[1:]])
    np.testing.assert_allclose(states[-1].evaluated()["W_enc"], z.mean(0), rtol=1e-4, atol=1e-5)
    assert np.abs(z.mean(0) - np.asarray(states[-1].params["W_enc"])).max() > 1e-3


def test_averaged_decoder_rows_have_length_1_where_the_trained_ones_have() -> None:
    states, _ = _steps(_config(ema_decay=0.9), 3, _coder(unit_decoder_every=1, decoder_norm=1.0))
    averaged = states[-1].evaluated()["W_dec"]
    np.testing.assert_allclose(np.linalg.norm(averaged, axis=1), 1, rtol=1e-5)
    assert np.abs(averaged - states[-1].params["W_dec"]).max() > 1e-3


# --- meshes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [_config("adafactor"), _config("muon"), _config("lion", accumulate=2, ema_decay=0.5)],
    ids=lambda config: config.optimizer,
)
def test_every_optimizer_takes_the_same_step_on_a_mesh(config: TrainConfig) -> None:
    """Latents over 4 devices, rows over 2; adafactor factors what is at least 128 wide, and has placeholders."""
    coder = build(CoderConfig("standard", d_sae=128, l1_coefficient=0.3, matmul_dtype="float32"), 128, steps=100)
    optimizer = make_optimizer(config)
    ends = []
    for shape in ((1, 1), (2, 4)):
        mesh, init = make_mesh(ParallelConfig(shape)), make_init(coder, optimizer, config)
        abstract = abstract_state(coder, init, mesh)
        step = compile_step(make_step(coder, optimizer, make_schedule(config), SITES, config), abstract, mesh)
        rows = {"h": np.random.default_rng(0).normal(size=(B, 128)).astype(np.float32)}
        state, metrics = step(init_state(init, 0, abstract), rows, default_hyper(0))
        assert state.params["W_dec"].sharding.shard_shape((128, 128)) == (128 // shape[1], 128)
        ends.append(jax.device_get((state.params, metrics["loss"])))
    for name, value in ends[0][0].items():
        # A gradient whose sign is a matter of rounding may go either way.
        agree = np.isclose(ends[1][0][name], value, rtol=1e-3, atol=1e-4)
        assert agree.mean() > 0.999, name
    assert ends[1][1] == pytest.approx(ends[0][1], rel=1e-5)


def test_latents_that_do_not_divide_are_refused_with_a_number_that_does() -> None:
    mesh = make_mesh(ParallelConfig((2, 4)))
    check_divides(mesh, 64)
    with pytest.raises(ConfigError, match=r"66 latents cannot be split over the 4 .*set coder\.d_sae=68"):
        check_divides(mesh, 66)


# --- what stops, and what is refused -----------------------------------------------------------------------


def test_early_stopping_waits_for_more_than_min_delta_and_remembers() -> None:
    config = _config(early_stop_patience=2, early_stop_min_delta=0.05)
    memory = Memory.resumed(config, {})
    stopped = []
    for step, fve in enumerate((0.5, 0.54, 0.56, 0.6, 0.61)):
        # As if interrupted after every validation.
        memory = Memory.resumed(config, memory.validated(step, {"fve": fve}).to_meta())
        stopped.append((memory.fve, memory.waited, memory.stopped))
        assert memory.to_meta()["stopped_early"] is (memory.stopped is not None) is not memory.going
    assert stopped == [(0.5, 0, None), (0.5, 1, None), (0.56, 0, None), (0.56, 1, None), (0.56, 2, 4)]
    never = Memory.resumed(_config(), {}).validated(0, {"fve": 0.5}).validated(1, {"fve": 0.1})
    assert never.going and never.to_meta()["stopped_early"] is False


@pytest.mark.parametrize("seed", range(20))
def test_validations_that_are_not_finite_are_never_the_best(seed: int) -> None:
    """Against a plain reading of the rule, over sequences with NaN and both infinities, resumed at every step."""
    rng = np.random.default_rng(seed)
    patience, delta = int(rng.integers(1, 5)), float(rng.choice([0.0, 0.05, 0.5]))
    early = {"early_stop_patience": patience, "early_stop_min_delta": delta}
    configs = [_config(keep_best=metric, **early) for metric in ("val/fve", "val/relative_error")]
    broken = rng.choice([np.nan, np.inf, -np.inf], 30)
    fves = np.where(rng.random(30) < rng.choice([0.3, 0.9]), broken, rng.normal(size=30))
    memories = [Memory.resumed(config, {}) for config in configs]
    best, waited = -np.inf, 0
    for step, fve in enumerate(map(float, fves)):
        memories = [memory.validated(step, {"fve": fve, "relative_error": fve}) for memory in memories]
        metas = [json.loads(json.dumps(memory.to_meta())) for memory in memories]
        best, waited = (fve, 0) if np.isfinite(fve) and fve > best + delta else (best, waited + 1)
        for memory, meta in zip(memories, metas, strict=True):
            assert (memory.fve, memory.waited) == (best if np.isfinite(best) else None, waited), step
            assert meta["stopped_early"] == (waited >= patience) and (memory.stopped == step) == (waited >= patience)
        memories = [Memory.resumed(config, meta) for config, meta in zip(configs, metas, strict=True)]
    if np.isfinite(fves).any():
        finite = np.where(np.isfinite(fves), fves, np.nan)
        assert [memory.best_step for memory in memories] == [np.nanargmax(finite), np.nanargmin(finite)]
    else:
        assert [memory.best_step for memory in memories] == [None, None]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"plateau_factor": 1.0}, r"train\.plateau_factor is 1\.0; it must be above 0 and below 1"),
        ({"restart_period": 0.0}, r"train\.restart_period is 0\.0; it must be above 0 and at most 1"),
        ({"restart_multiplier": 0.5}, r"train\.restart_multiplier is 0\.5; it must be at least 1"),
        ({"b1": 1.0}, r"train\.b1 is 1\.0; it must be below 1"),
        ({"eps": 0.0}, r"train\.eps is 0\.0; it must be positive"),
        ({"eps": 1e-50}, r"train\.eps is 1e-50; it must be positive and finite in float32"),
        ({"lr": 1e300}, r"train\.lr is 1e\+300; it must be finite, not negative in float32"),
        ({"b2": 1 - 1e-9}, r"train\.b2 is 0\.999999999; it must be below 1, not negative in float32"),
        ({"resample_every": 2**40}, r"train\.resample_every is 1099511627776; it must be at most 2147483647"),
        ({"tokens": 2**40, "batch_size": 1}, r"train\.steps is 1099511627776; it must be at most 2147483647"),
        ({"lr": float("inf")}, r"train\.lr is inf; it must be finite, not negative"),
        ({"warmup_fraction": float("nan")}, r"train\.warmup_fraction is nan"),
        ({"optimizer": "schedule_free", "schedule": "constant", "b1": 0.0}, r"divides by train\.b1"),
        ({"optimizer": "schedule_free", "schedule": "constant", "resample_every": 5}, r"use adam, adamw, muon or lion"),
    ],
)
def test_values_that_would_divide_by_zero_or_never_end_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**values)


def test_a_negative_sample_limit_is_refused() -> None:
    reader: Any = dataclasses.make_dataclass("Reader", [])()
    with pytest.raises(ConfigError, match=r"max_rows=-1: give the number of rows to use, or 0"):
        Batches(reader, 10, seed=0, max_rows=-1)
