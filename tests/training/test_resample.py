"""Resampling: dead latents start anew from badly reconstructed tokens, and nothing else moves."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import D_IN
from tiny.trainings import CODERS as PRESETS
from tiny.trainings import CONFIG, assert_same, final, run

from saejax.coders import Coder, CoderConfig, Sites, build
from saejax.coders.config import LONG_AGO
from saejax.core.rng import stream
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import Batches, StoreReader
from saejax.training import TrainConfig, TrainState
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.resample import ENCODER_SHARE, resample
from saejax.training.state import abstract_state, make_init
from saejax.training.step import default_hyper, make_step

B, D, F = 32, 6, 16
EVERY = 10
# Not fired for half of EVERY steps.
IDLE = EVERY * B // 2
CONFIG_OF = {
    name: TrainConfig(tokens=100 * B, batch_size=B, optimizer=name, lr=3e-4, resample_every=EVERY, ema_decay=ema)
    for name, ema in (("adam", 0.9), ("lion", 0.0), ("muon", 0.0))
}
CODERS = {
    "topk": ("adam", {"preset": "topk"}, 1),
    "free decoder": ("lion", {"preset": "standard"}, 1),
    "gated": ("adam", {"preset": "gated"}, 1),
    "jumprelu": ("muon", {"preset": "jumprelu", "threshold_init": 0.25}, 1),
    "transcoder": ("adam", {"preset": "skip_transcoder"}, 1),
    "crosscoder": ("muon", {"preset": "crosscoder"}, 3),
    "clt": ("adam", {"preset": "clt_jumprelu"}, 3),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A coder before and after resampling, as numpy."""

    coder: Coder
    batch: dict[str, jax.Array]
    before: TrainState
    after: TrainState
    dead: np.ndarray


@functools.cache
def case(name: str) -> Case:
    """A third of the latents are dead by a hair, the others alive by a hair; every number of the state is its own."""
    optimizer_name, settings, sites = CODERS[name]
    config = CONFIG_OF[optimizer_name]
    coder = build(CoderConfig(d_sae=F, k=3, auxk_k=4, matmul_dtype="float32", **settings), [D] * sites, steps=100)
    rng = np.random.default_rng(0)
    optimizer = make_optimizer(config)
    state = jax.jit(make_init(coder, optimizer, config))(0)

    def noisy(leaf: jax.Array) -> jax.Array:
        noise = jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
        return leaf + noise if leaf.dtype == jnp.float32 and leaf.ndim else leaf

    params = jax.tree.map(noisy, state.params)
    params = params | {d: jax.tree.map(_unit, params[d]) for d in coder.topology.decoders if coder.unit_decoder_every}
    shape = coder.topology.latent_shape
    dead = rng.permutation(np.arange(np.prod(shape)) % 3 == 0).reshape(shape)
    state = TrainState(
        step=jnp.int32(2 * EVERY),
        params=params,
        opt_state=jax.tree.map(noisy, state.opt_state),
        stats=state.stats | {"tokens_since_fired": jnp.where(dead, IDLE, IDLE - 1)},
        averaged=jax.tree.map(noisy, state.averaged),
    )
    x, y = (jnp.asarray(rng.normal(size=(B, *s)), jnp.float32) for s in (coder.topology.in_shape,) * 2)
    batch = {"x": x, "y": x if coder.topology.tied else y}
    after = jax.jit(functools.partial(resample, coder, config))(state, batch, jnp.uint32(7))
    return Case(coder, batch, jax.device_get(state), jax.device_get(after), dead)


def _unit(rows: jax.Array) -> jax.Array:
    return rows / jnp.linalg.norm(rows.reshape(len(rows), -1), axis=1).reshape(-1, *[1] * (rows.ndim - 1))


def latents_first(c: Case, name: str, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(value with one row for each latent, which of them are dead): of parameter `name`, whatever its layout."""
    dead = c.dead.reshape(-1, F)
    if name in c.coder.topology.decoders:
        return value, dead[c.coder.topology.decoders.index(name)]
    if c.dead.ndim == 2:
        return np.moveaxis(value, -1, 1).reshape(c.dead.size, -1), c.dead.reshape(-1)
    return np.moveaxis(value, -1, 0), dead[0]


def of_latents(c: Case) -> list[str]:
    return [name for name, axes in c.coder.logical_axes().items() if "latent" in axes and name in c.before.params]


def lengths(rows: np.ndarray) -> np.ndarray:
    return np.linalg.norm(rows.reshape(len(rows), -1), axis=1)


@pytest.mark.parametrize("name", CODERS)
def test_live_latents_and_everything_without_latents_stay_as_they_are(name: str) -> None:
    c = case(name)
    shared = set(c.before.params) - set(of_latents(c))
    assert "b_dec" in shared and 0 < c.dead.sum() < c.dead.size
    for before, after in ((c.before.params, c.after.params), (c.before.averaged, c.after.averaged)):
        assert before.keys() == after.keys()
        for key in before:
            if key in shared:
                assert before[key].tobytes() == after[key].tobytes(), key
                continue
            (old, dead), (new, _) = (latents_first(c, key, tree[key]) for tree in (before, after))
            assert old[~dead].tobytes() == new[~dead].tobytes(), key
            assert (old[dead] != new[dead]).any(), key
    since = c.after.stats["tokens_since_fired"]
    assert (since == np.where(c.dead, 0, IDLE - 1)).all() and c.after.step == c.before.step


@pytest.mark.parametrize("name", CODERS)
def test_moments_of_the_dead_are_zero_and_those_of_the_living_stay(name: str) -> None:
    c, seen = case(name), set()
    flat = zip(
        jax.tree_util.tree_flatten_with_path(c.before.opt_state)[0], jax.tree.leaves(c.after.opt_state), strict=True
    )
    for (path, old), new in flat:
        key = next((p.key for p in reversed(path) if isinstance(p, jax.tree_util.DictKey)), "")
        if key not in of_latents(c):
            np.testing.assert_array_equal(old, new)
            continue
        (old_rows, dead), (new_rows, _) = (latents_first(c, key, v) for v in (old, new))
        assert (old_rows[dead] != 0).all() and not new_rows[dead].any(), path
        assert old_rows[~dead].tobytes() == new_rows[~dead].tobytes(), path
        seen.add(key)
    assert seen == set(of_latents(c))


@pytest.mark.parametrize("name", CODERS)
def test_the_dead_have_the_lengths_that_are_published(name: str) -> None:
    c = case(name)
    topology = c.coder.topology
    old, dead = latents_first(c, "W_enc", c.before.params["W_enc"])
    new, _ = latents_first(c, "W_enc", c.after.params["W_enc"])
    np.testing.assert_allclose(lengths(new)[dead], ENCODER_SHARE * lengths(old)[~dead].mean(), rtol=1e-5)
    for decoder in topology.decoders:
        old, dead = latents_first(c, decoder, c.before.params[decoder])
        want = 1 if c.coder.unit_decoder_every else lengths(old)[~dead].mean()
        np.testing.assert_allclose(lengths(c.after.params[decoder])[dead], want, rtol=1e-5)
    starts = {"b_enc": 0.0} | c.coder.sparsity.parameters()
    for key, value in starts.items():
        assert (c.after.params[key][c.dead] == np.float32(value)).all(), key


@pytest.mark.parametrize("name", CODERS)
def test_encoder_and_decoder_of_a_dead_latent_point_at_one_token(name: str) -> None:
    c = case(name)
    x = np.asarray(c.batch["x"], np.float64)
    y = np.asarray(c.batch["y"], np.float64) - c.after.params["b_dec"]
    params = c.after.params
    if "centre" in params or name in ("gated", "jumprelu"):  # the encoder sees it without this
        x = x - params["centre" if "centre" in params else "b_dec"]
    encoders = c.after.params["W_enc"]
    groups = c.dead.shape[0] if c.dead.ndim == 2 else 1
    for group, dead in enumerate(c.dead.reshape(groups, F)):
        read, written = (x[:, group], y[:, group:]) if c.dead.ndim == 2 else (x, y)
        encoder = encoders[group] if c.dead.ndim == 2 else encoders
        decoder = c.after.params[c.coder.topology.decoders[group]]
        for latent in np.flatnonzero(dead):
            tokens = [_aimed_at(encoder[..., latent], read), _aimed_at(decoder[latent], written)]
            assert tokens[0] == tokens[1], (group, latent, tokens)


def _aimed_at(direction: np.ndarray, tokens: np.ndarray) -> int:
    """The token that `direction` points at exactly."""
    flat = tokens.reshape(len(tokens), -1)
    cosine = flat @ direction.reshape(-1) / np.linalg.norm(flat, axis=1) / np.linalg.norm(direction)
    assert cosine.max() > 1 - 1e-5 and np.partition(cosine, -2)[-2] < 1 - 1e-3
    return int(cosine.argmax())


def _drawn(norms: np.ndarray, n: int) -> np.ndarray:
    """For each of n dead latents the token that it drew, of tokens with these errors: nothing is reconstructed."""
    coder = build(CoderConfig("standard", d_sae=n, l1_coefficient=0.1, matmul_dtype="float32"), D, steps=100)
    config = TrainConfig(tokens=100 * D, batch_size=D, lr=1e-3, resample_every=1)
    state = jax.jit(make_init(coder, make_optimizer(config), config))(0)
    state = dataclasses.replace(
        state,
        step=jnp.int32(1),
        params=state.params | {"W_dec": jnp.zeros((n, D))},
        stats=state.stats | {"tokens_since_fired": jnp.full(n, 100)},
    )
    x = jnp.diag(jnp.asarray(norms, jnp.float32))
    after = jax.jit(functools.partial(resample, coder, config))(state, {"x": x, "y": x}, jnp.uint32(0))
    return np.abs(after.params["W_dec"]).argmax(1)


def test_tokens_are_drawn_in_proportion_to_the_square_of_their_squared_error() -> None:
    n, norms = 8192, np.array([0.0, 1.0, 0.0, 1.5, 2.0, 0.0])
    drawn = np.bincount(_drawn(norms, n), minlength=D) / n
    want = norms**4 / (norms**4).sum()
    assert not drawn[norms == 0].any()
    # Within five standard deviations.
    np.testing.assert_allclose(drawn, want, atol=5 * float(np.sqrt(want * (1 - want) / n).max()))


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2**-24, 4)])
def test_the_least_and_the_largest_number_draw_tokens_with_an_error(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.full(shape, number, jnp.float32))
    norms = np.array([0.0, 1.0, 0.0, 1.5, 2.0, 0.0])
    assert set(_drawn(norms, F)) == {token}


def test_errors_whose_fourth_power_is_not_finite_can_still_be_drawn() -> None:
    c = case("topk")
    scale = jnp.where(jnp.arange(B) == 5, 1e13, 1.0)[:, None]
    batch = {name: value * scale for name, value in c.batch.items()}
    after = jax.jit(functools.partial(resample, c.coder, CONFIG_OF["adam"]))(c.before, batch, jnp.uint32(7))
    rows = np.asarray(after.params["W_dec"])[c.dead]
    assert {_aimed_at(row, np.asarray(batch["y"]) - c.before.params["b_dec"]) for row in rows} == {5}


@pytest.mark.parametrize(("step", "due"), [(EVERY, True), (EVERY + 1, False), (5 * EVERY, True), (6 * EVERY, False)])
def test_it_happens_every_so_many_steps_up_to_a_share_of_training(step: int, due: bool) -> None:
    c = case("topk")
    state = dataclasses.replace(c.before, step=jnp.int32(step))
    after = jax.jit(functools.partial(resample, c.coder, CONFIG_OF["adam"]))(state, c.batch, jnp.uint32(7))
    moved = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)]
    assert any(moved) == due


def test_intervals_beyond_what_the_counters_count_still_find_the_dead() -> None:
    """The counters stop at LONG_AGO, and int32 stops soon after."""
    c = case("topk")
    config = dataclasses.replace(CONFIG_OF["adam"], tokens=2**40, batch_size=2**20, resample_every=2**14)
    stats = c.before.stats | {"tokens_since_fired": jnp.where(c.dead, LONG_AGO, LONG_AGO - 1)}
    state = dataclasses.replace(c.before, step=jnp.int32(2**14), stats=stats)
    after = jax.jit(functools.partial(resample, c.coder, config))(state, c.batch, jnp.uint32(7))
    assert ((np.asarray(after.stats["tokens_since_fired"]) == 0) == c.dead).all()


@pytest.mark.parametrize("name", ["topk", "clt"])
def test_a_mesh_resamples_the_same(name: str) -> None:
    c = case(name)
    config = CONFIG_OF[CODERS[name][0]]
    mesh = make_mesh(ParallelConfig((2, 4)))
    abstract = abstract_state(c.coder, make_init(c.coder, make_optimizer(config), config), mesh)
    state = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), c.before, abstract)
    after = jax.jit(functools.partial(resample, c.coder, config))(state, c.batch, jnp.uint32(7))
    assert not after.params["W_enc"].sharding.is_fully_replicated
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), jax.device_get(after), c.after)


def test_the_draw_depends_on_seed_and_step_alone() -> None:
    keys = [stream(jnp.uint32(seed), "resample", jnp.int32(step)) for seed, step in ((7, 20), (7, 30), (8, 20))]
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 3
    c = case("topk")
    again = jax.jit(functools.partial(resample, c.coder, CONFIG_OF["adam"]))
    same, other = (jax.device_get(again(c.before, c.batch, jnp.uint32(seed))) for seed in (7, 8))
    assert same.params["W_dec"].tobytes() == c.after.params["W_dec"].tobytes() != other.params["W_dec"].tobytes()


# --- in training -------------------------------------------------------------------------------------------


def _trained(store: Path, resample_every: int) -> TrainState:
    """60 steps on planted data, from a coder half of whose latents cannot fire."""
    config = TrainConfig(
        tokens=60 * 128, batch_size=128, lr=3e-3, resample_every=resample_every, resample_until_fraction=0.75
    )
    coder = build(CoderConfig("standard", d_sae=64, l1_coefficient=0.1, matmul_dtype="float32"), D_IN, config.steps)
    optimizer = make_optimizer(config)
    sites = Sites(("h",), ("h",), (0.7,), (0.7,))
    step = jax.jit(make_step(coder, optimizer, make_schedule(config), sites, config))
    state: Any = jax.jit(make_init(coder, optimizer, config))(0)
    state.params["b_enc"] = state.params["b_enc"].at[:32].set(-1e3)
    batches = Batches(StoreReader.open(store), 128, seed=1, block_chunks=4)
    for i in range(config.steps):
        state, metrics = step(state, batches.batch_at(i), default_hyper(0))
        assert np.isfinite(metrics["loss"])
    return state


def test_dead_latents_fire_again_on_planted_data(store: Path) -> None:
    silent = [_trained(store, every).stats["tokens_since_fired"][:32] >= 10 * 128 for every in (0, 15)]
    assert silent[0].all() and silent[1].sum() <= 2


@pytest.mark.ci
def test_a_resampled_run_continues_bitwise(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between two resamplings; the last one is at the last step."""
    wide = CoderConfig("topk", d_sae=512, k=1, auxk_coefficient=0.0, matmul_dtype="float32")
    monkeypatch.setitem(PRESETS, "wide", wide)
    config = dataclasses.replace(
        CONFIG, tokens=10 * 128, resample_every=2, resample_until_fraction=1.0, ema_decay=0.5, validate_every=0
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(store, whole, "wide", config).finished
    assert not run(store, parts, "wide", config, stop_at=4).finished
    assert run(store, parts, "wide", config).finished
    assert_same(final(whole, 10), final(parts, 10))
    # No batch of 128 tokens reaches 512 latents: without resampling some would be idle for a batch and longer.
    assert final(whole, 10)["['stats']['tokens_since_fired']"].max() < 128
