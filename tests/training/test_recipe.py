"""The training recipe in the loop: optimizers, accumulation, averages, early stopping, the sample limit.

Schedules and single updates: test_optim.py. Resampling: test_resample.py.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import D_IN
from tiny.covering import rest_in
from tiny.trainings import CODERS, CONFIG, assert_same, final, run

from saejax.coders import RECIPES, TOPOLOGIES, Coder, CoderConfig, Sites, build
from saejax.core.errors import ConfigError
from saejax.core.metrics import read_metrics
from saejax.store import Batches, StoreReader
from saejax.training import TrainConfig
from saejax.training.optim import OPTIMIZERS
from saejax.training.start import geometric_median
from saejax.training.state import make_init
from saejax.training.step import default_hyper, make_step

SITES = Sites(("h",), ("h",), (0.7,), (0.7,))
SHORT = dataclasses.replace(CONFIG, tokens=16 * 128, checkpoint_every=50, validate_every=4)


# --- optimizers --------------------------------------------------------------------------------------------


# The one whose state is least like Adam's; the others in .ci/run.
@pytest.mark.parametrize("optimizer", rest_in("ci", OPTIMIZERS, ["schedule_free"]))
def test_every_optimizer_learns_and_continues_bitwise(store: Path, tmp_path: Path, optimizer: str) -> None:
    schedule = "constant" if optimizer == "schedule_free" else "cosine"
    config = dataclasses.replace(SHORT, optimizer=optimizer, schedule=schedule, warmup_fraction=0.0)
    assert run(store, tmp_path / "whole", config=config).finished
    run(store, tmp_path / "parts", config=config, stop_at=8)
    assert run(store, tmp_path / "parts", config=config).finished
    assert_same(final(tmp_path / "whole", 16), final(tmp_path / "parts", 16))
    losses = [r["train/loss"] for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "train/loss" in r]
    assert losses[-1] < losses[0]


# --- accumulation, averages --------------------------------------------------------------------------------


def _one_step(coder: Coder, config: TrainConfig, batches: np.ndarray, sites: Sites = SITES) -> tuple[Any, Any]:
    """(state, metrics) after a step on each of `batches`, plain SGD at 0.1."""
    optimizer = optax.with_extra_args_support(optax.sgd(0.1))
    state = make_init(coder, optimizer, config)(3)
    step = jax.jit(make_step(coder, optimizer, lambda _: 0.1, sites, config))
    for x in batches:
        state, metrics = step(state, {"h": jnp.asarray(x)}, default_hyper(3))
    return state, metrics


def _standard() -> Coder:
    return build(dataclasses.replace(CODERS["standard"], d_sae=24), D_IN, 10)


def _accumulating(preset: str, steps: int = 10, **changes: Any) -> Coder:
    changes = {"d_sae": 24, "k": 4, "dead_after_tokens": 40, "matmul_dtype": "float32"} | changes
    return build(CoderConfig(preset=preset, **changes), D_IN, steps)


# Their losses are sums over tokens, but for a variance, which is the whole batch's.
@pytest.mark.parametrize("preset", ["standard", "topk", "p_anneal"])
def test_accumulation_equals_the_whole_batch(preset: str) -> None:
    x = np.random.default_rng(0).normal(size=(4, 32, D_IN)).astype(np.float32)
    # No AuxK, whose residual has the variance of a part; latents of little use do not fire in every batch.
    # The slope of f^p near 0 makes roundings large, and least where the encoder sees x - b_dec.
    changes = {"auxk_coefficient": 0.0, "lp_after_fraction": 0.0, "lp_updates": 2, "encoder_centre": False}
    coder = _accumulating(preset, steps=4, **changes)
    config = TrainConfig(tokens=320, batch_size=32)
    whole, metrics = _one_step(coder, config, x)
    for n in (2, 16):
        parts, metrics_n = _one_step(coder, dataclasses.replace(config, accumulate=n), x)
        for name in ("loss", "fve", "l0", "dead"):
            assert float(metrics_n[name]) == pytest.approx(float(metrics[name]), rel=1e-5, abs=1e-6), name
        for name, want in whole.params.items():
            np.testing.assert_allclose(parts.params[name], want, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(parts.stats["tokens_since_fired"], whole.stats["tokens_since_fired"])
        if preset == "p_anneal":
            assert float(parts.stats["lp_scale"]) == pytest.approx(float(whole.stats["lp_scale"]), rel=1e-5)
            assert float(whole.stats["lp_scale"]) != 1


# Those that follow a number of their own; the others in the soak.
FOLLOWING = ("p_anneal", "batchtopk")


@pytest.mark.parametrize(
    "preset", [name if name in FOLLOWING else pytest.param(name, marks=pytest.mark.soak) for name in RECIPES]
)
def test_statistics_move_once_a_step_however_many_parts_a_batch_has(preset: str) -> None:
    """Of one batch repeated, every part sees the same as the whole: so must what follows it, in every family."""
    topology = TOPOLOGIES[CoderConfig(preset=preset).resolved().topology]
    n_sites = 2 if topology.stacked else 1
    settings: dict[str, Any] = {"d_sae": 24, "k": 4, "dead_after_tokens": 40, "matmul_dtype": "float32"}
    # A part has fewer tokens to contrast than the whole.
    settings |= {"contrastive_coefficient": 0.0}
    config = CoderConfig(preset=preset, **settings, lp_after_fraction=0.0, lp_updates=2)
    coder = build(config, (D_IN,) * n_sites, 3, (D_IN,) * n_sites)
    sites = Sites(("h",) * n_sites, ("h",) * n_sites, (0.7,) * n_sites, (0.7,) * n_sites, topology.stacked)
    x = np.random.default_rng(1).normal(size=(8, D_IN)).astype(np.float32)
    # Rows b, b + parts, ... are a part.
    batches = np.tile(np.repeat(x, 4, axis=0), (3, 1, 1))
    train = TrainConfig(tokens=320, batch_size=32)
    whole, _ = _one_step(coder, train, batches, sites)
    parts, _ = _one_step(coder, dataclasses.replace(train, accumulate=4), batches, sites)
    for name, want in whole.stats.items():
        np.testing.assert_allclose(parts.stats[name], want, rtol=1e-4, err_msg=name)


def test_the_batch_s_threshold_follows_the_mean_of_its_parts() -> None:
    coder = _accumulating("batchtopk", threshold_decay=0.9)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(32, D_IN)), jnp.float32)
    config = TrainConfig(tokens=320, batch_size=32, accumulate=4)
    params = make_init(coder, optax.sgd(0.1), config)(3).params
    smallest = []
    for part in range(4):
        latents = coder.encode(params, 0.7 * x[part::4]).values
        smallest.append(float(latents[latents > 0].min()))
    state, _ = _one_step(coder, config, np.asarray(x)[None])
    assert float(state.stats["threshold"]) == pytest.approx(np.mean(smallest), rel=1e-5)


def test_the_average_equals_numpy() -> None:
    x = np.random.default_rng(0).normal(size=(3, 32, D_IN)).astype(np.float32)
    config = TrainConfig(tokens=320, batch_size=32, ema_decay=0.3)
    states = [_one_step(_standard(), config, x[: i + 1])[0] for i in range(3)]
    optimizer = optax.with_extra_args_support(optax.sgd(0.1))
    want = np.asarray(make_init(_standard(), optimizer, config)(3).params["W_enc"], np.float64)
    for i, state in enumerate(states):
        decay = min(0.3, (1 + i) / (10 + i))
        want = decay * want + (1 - decay) * np.asarray(state.params["W_enc"], np.float64)
    np.testing.assert_allclose(states[-1].averaged["W_enc"], want, rtol=1e-5, atol=1e-7)
    assert np.abs(want - np.asarray(states[-1].params["W_enc"])).max() > 1e-6


# --- early stopping, validation, sample limit --------------------------------------------------------------


@pytest.mark.ci
def test_early_stopping_stops_at_the_same_step_whatever_interrupts(store: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(SHORT, tokens=60 * 128, early_stop_patience=2)

    def validate(params: Any, stats: Any) -> dict[str, float]:
        return {"fve": 0.5}

    whole = run(store, tmp_path / "whole", config=config, validate=validate)
    # Validations at 4, 8, 12: the second and third bring nothing.
    assert (whole.step, whole.finished) == (12, True)
    run(store, tmp_path / "parts", config=config, validate=validate, stop_at=9)
    parts = run(store, tmp_path / "parts", config=config, validate=validate)
    assert (parts.step, parts.finished) == (12, True)
    assert_same(final(tmp_path / "whole", 12), final(tmp_path / "parts", 12))
    again = run(store, tmp_path / "parts", config=config, validate=validate)
    assert (again.step, again.finished, again.tokens) == (12, True, 0)


def test_validation_by_shares_of_an_epoch() -> None:
    config = TrainConfig(tokens=10_000, batch_size=100, validate_epochs=0.25)
    assert config.validation_interval(4000) == 10
    assert dataclasses.replace(config, validate_epochs=0.0).validation_interval(4000) == 250


def test_the_sample_limit_uses_the_first_rows_alone(store: Path) -> None:
    reader = StoreReader.open(store)
    first = {row.tobytes() for row in reader.rows(0, 600)["h"]}
    batches = Batches(reader, 100, seed=1, block_chunks=2, max_rows=600)
    seen = [row.tobytes() for i in range(12) for row in batches.batch_at(i)["h"]]
    assert set(seen) == first and len(first) > 500


# --- where things begin, and what is refused ------------------------------------------------------------------


def test_the_geometric_median_is_where_the_unit_pulls_cancel() -> None:
    rows = np.random.default_rng(0).normal(size=(400, 5))
    rows[0] = 1e6
    median = geometric_median(rows)
    away = rows - median
    pull = (away / np.linalg.norm(away, axis=1, keepdims=True)).sum(0)
    assert np.linalg.norm(pull) < 1e-2 and np.linalg.norm(median) < 0.3 < np.linalg.norm(rows.mean(0))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"optimizer": "adma"}, "Did you mean 'adam"),
        ({"weight_decay": 0.1}, "adam has none; use adamw"),
        ({"optimizer": "schedule_free"}, "set train.schedule=constant"),
        ({"optimizer": "schedule_free", "schedule": "constant", "ema_decay": 0.9}, "set train.ema_decay=0"),
        ({"optimizer": "adafactor", "resample_every": 10}, "use adam, adamw, muon or lion"),
        ({"batch_size": 10, "accumulate": 3}, "not a multiple of accumulate 3"),
        ({"batch_size": 10, "accumulate": 10}, "parts of one activation"),
        ({"batch_size": 1}, "a part needs two"),
        ({"early_stop_patience": 1, "validate_every": 0}, "set train.validate_every"),
        ({"ema_decay": 1.0}, "must be below 1"),
        ({"max_rows": 10}, "less than one batch"),
        ({"decay_fraction": 1.5}, "between 0 and 1"),
    ],
)
def test_recipes_that_cannot_be_run_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**values)
