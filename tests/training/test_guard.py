"""Steps that are not taken: nothing moves but the count, in every form that a step has; too many in a row end it."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import planted_experiment, planted_store

from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
from saejax.coders import CoderConfig, Sites, build
from saejax.core.errors import ConfigError, DataError
from saejax.core.metrics import read_metrics
from saejax.fit.stacked import for_all
from saejax.store import ArrayRows, Batches, StoreReader
from saejax.training import TrainConfig, TrainState
from saejax.training.guard import is_sound, judge, start_losses
from saejax.training.memory import Memory
from saejax.training.optim import make_optimizer, make_schedule
from saejax.training.state import make_init
from saejax.training.step import default_hyper, make_step

HOOK = "h"
SITES = Sites(("h",), ("h",), (1.0,), (1.0,))
KINDS: dict[str, dict[str, Any]] = {
    "adam": {},
    "accumulated, schedule_free": {"accumulate": 2, "optimizer": "schedule_free", "schedule": "constant"},
    "plateau, average, resampled": {
        **{"schedule": "plateau", "ema_decay": 0.9, "resample_every": 2, "resample_until_fraction": 1.0}
    },
}


STANDARD = CoderConfig(preset="standard", d_sae=32, matmul_dtype="float32")
# With a threshold and an auxiliary loss, which remember something from step to step.
BATCHTOPK = CoderConfig(preset="batchtopk", d_sae=32, k=4, matmul_dtype="float32", auxk_coefficient=0.03)


def made(config: TrainConfig, coder_config: CoderConfig = STANDARD) -> tuple[Callable[..., Any], TrainState]:
    coder = build(coder_config, 16, 100)
    optimizer = make_optimizer(config)
    step = make_step(coder, optimizer, make_schedule(config), SITES, config)
    return step, jax.jit(make_init(coder, optimizer, config))(3)


def rows(i: int) -> dict[str, np.ndarray]:
    return {"h": np.random.default_rng(i).normal(size=(32, 16)).astype(np.float32)}


def everything(state: TrainState) -> list[bytes]:
    """All but the step's number and the memory of losses, as bytes."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(dataclasses.replace(state, step=0, recent={}))[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_not_finite_moves_nothing_but_the_count(kind: str) -> None:
    config = TrainConfig(tokens=32 * 50, batch_size=32, lr=1e-3, warmup_fraction=0.2, **KINDS[kind])
    step, state = made(config, BATCHTOPK if kind == "adam" else STANDARD)
    step = jax.jit(step)
    for i in range(3):
        state, metrics = step(state, rows(i), default_hyper(0))
        assert metrics["skipped"] == 0
    before = everything(state)
    # NaN, infinity, and numbers whose squares are too large: the loss or the gradient's norm says each.
    for bad in (np.nan, np.inf, 1e30):
        batch = rows(9)
        batch["h"][5, 3] = bad
        number = int(state.step)
        state, metrics = step(state, batch, default_hyper(0))
        assert metrics["skipped"] == 1 and int(state.step) == number + 1
        assert everything(state) == before
    state, metrics = step(state, rows(10), default_hyper(0))
    assert metrics["skipped"] == 0 and everything(state) != before and is_sound(state)
    # The rate that is written is the one that was used: the schedule stood still meanwhile.
    assert float(metrics["lr"]) == pytest.approx(float(make_schedule(config)(3)))


def test_a_member_of_a_sweep_stands_still_alone() -> None:
    """As accelerators have it, where the members are one vmapped step (in turn: tests/test_sweep.py)."""
    config = TrainConfig(tokens=32 * 50, batch_size=32, lr=1e-3, resample_every=2)
    coder = build(STANDARD, 16, 100)
    init = make_init(coder, make_optimizer(config), config)
    stacked = jax.jit(jax.vmap(init, out_axes=TrainState(None, 0, 0, 0, 0, 0)))(jnp.uint32([1, 2]))
    one = make_step(coder, make_optimizer(config), make_schedule(config), SITES, config)
    step = jax.jit(for_all(one, "gpu"))
    # The second member's parameters are no longer finite, so that its loss is not.
    params = stacked.params | {"W_dec": stacked.params["W_dec"].at[1].set(jnp.nan)}
    state = dataclasses.replace(stacked, params=params)
    hyper = {"lr": np.float32([1, 1]), "sparsity": np.float32([1, 1]), "seed": np.uint32([1, 2])}
    for i in range(2):
        state, metrics = step(state, rows(i), hyper)
        assert metrics["skipped"].tolist() == [0, 1]
    moved = [not np.array_equal(state.params["W_enc"][m], stacked.params["W_enc"][m]) for m in (0, 1)]
    assert moved == [True, False]


def test_a_spike_is_not_taken_and_a_loss_that_stays_high_is() -> None:
    config = TrainConfig(tokens=32 * 99, batch_size=32, spike_factor=3)

    def told(losses: list[float]) -> list[bool]:
        recent, taken = start_losses(config), []
        for loss in losses:
            ok, recent = judge(config, recent, jnp.float32(loss), jnp.float32(1))
            taken.append(bool(ok))
        return taken

    # Until half of the window is known, nothing is a spike.
    assert told([1.0, 99.0] + [1.0] * 16 + [2.9, 3.1, np.nan, 1.0]) == [True] * 19 + [False, False, True]
    # The median follows: of 32 losses 16 are high, and it lies half way.
    assert told([1.0] * 32 + [9.0] * 17) == [True] * 32 + [False] * 16 + [True]


def test_a_spike_s_memory_is_part_of_the_state() -> None:
    config = TrainConfig(tokens=32 * 99, batch_size=32, lr=1e-3, spike_factor=2)
    step, state = made(config)
    step = jax.jit(step)
    before = everything(state)
    low = dataclasses.replace(state, recent={"losses": jnp.full(32, 1e-6, jnp.float32)})
    after, metrics = step(low, rows(20), default_hyper(0))
    assert metrics["skipped"] == 1 and np.isfinite(metrics["loss"]) and everything(after) == before
    assert float(after.recent["losses"][-1]) == float(metrics["loss"])
    after, metrics = step(state, rows(20), default_hyper(0))
    assert metrics["skipped"] == 0 and everything(after) != before
    again = TrainState.from_items(after.to_items())
    assert jax.tree.structure(again) == jax.tree.structure(after)
    assert again.recent["losses"].tolist() == after.recent["losses"].tolist()


def test_skipped_steps_are_counted_over_sessions() -> None:
    config = TrainConfig()
    memory = Memory.resumed(config, {})
    for taken in (False, True, False, False):
        memory = memory.stepped(taken)
    assert Memory.resumed(config, json.loads(json.dumps(memory.to_meta()))) == memory
    assert memory == Memory(config, skipped=3, in_a_row=2) and memory.to_meta()["skipped"] == memory.counts()["skipped"]


@pytest.mark.parametrize(
    "values", [{"max_skipped_steps": 0}, {"spike_factor": 1.0}, {"spike_factor": 0.5}, {"spike_factor": float("nan")}]
)
def test_settings_that_would_take_no_step_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        TrainConfig(**values)


def test_what_is_sound() -> None:
    assert is_sound({"x": jnp.ones(3), "n": jnp.int32(2), "best": jnp.float32(jnp.inf)}) and is_sound({})
    assert not is_sound({"x": jnp.array([1.0, jnp.inf])})
    assert not is_sound({"x": jnp.ones(3), "best": jnp.float32(jnp.nan)})


def test_places_are_where_the_batches_come_from() -> None:
    batches = Batches(ArrayRows({"h": np.ones((1000, 1), np.float32)}), 100, seed=5, block_chunks=4)
    seen = np.concatenate([batches.places(step)["row"] for step in range(20)])
    for epoch in range(2):
        assert sorted(seen[epoch * 1000 : (epoch + 1) * 1000]) == list(range(1000))


@pytest.mark.parametrize(("shares", "rows"), [(1, None), (1, (16, 40)), (4, None), (4, (16, 40))])
def test_the_batches_say_where_their_rows_lie(tmp_path: Path, shares: int, rows: tuple[int, int] | None) -> None:
    planted_store(tmp_path / "s", rows=1000)
    reader = StoreReader.open(tmp_path / "s")
    batches = Batches(reader, 64, seed=3, block_chunks=4, rows=rows, shares=shares)
    every = reader.rows(0, reader.n_tokens)["h"]
    for step in (0, 7, 40):
        np.testing.assert_array_equal(every[batches.places(step)["row"]], batches.batch_at(step)["h"])


# --- a whole run -------------------------------------------------------------------------------------------------


def poisoned(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> None:
    """Row 7 of these batches of every training is no number, whatever the store says."""
    original = Batches.iterate

    def iterate(self: Batches, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
        for step, batch in enumerate(original(self, start_step), start_step):
            no_number = np.where(np.arange(len(batch[HOOK])) == 7, np.nan, 1).astype(np.float32)[:, None]
            bad_rows = {name: (values * no_number).astype(values.dtype) for name, values in batch.items()}
            yield bad_rows if step in bad else batch

    monkeypatch.setattr(Batches, "iterate", iterate)


def test_a_few_bad_batches_cost_their_steps_and_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, {3, 17, 18})
    e = planted_experiment(tmp_path, "few", max_skipped_steps=3)
    assert run_train(Workspace(e)) == 0
    written = read_metrics(e.run_dir / "metrics.jsonl")
    assert {r["step"]: r["train/skipped"] for r in written if set(r) == {"step", "train/skipped"}} == {
        4: 1,
        18: 2,
        19: 3,
    }
    assert all(np.isfinite(value) for row in written for value in row.values())
    assert [row["train/skipped"] for row in written if "train/loss" in row][-1] == 3
    assert not (e.run_dir / "bad_batch.json").exists()


def test_too_many_in_a_row_stop_and_say_which_rows_they_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned(monkeypatch, set(range(25, 40)))
    e = planted_experiment(tmp_path, "many", max_skipped_steps=3)
    with pytest.raises(DataError, match=r"loss of step 28 is nan.*last of 3 in a row.*last: step 20.*bad_batch\.json"):
        run_train(Workspace(e))
    said = json.loads((e.run_dir / "bad_batch.json").read_text())
    assert (said["step"], said["batch"], said["skipped"]) == (28, 27, {"total": 3, "in_a_row": 3})
    assert said["rows_not_finite"] == 1 and said["loss"] is None
    bad = said["worst"][0]
    reader = StoreReader.open(e.store_dir("train"), [HOOK])
    stored = reader.rows(bad["row"], bad["row"] + 1, metadata=True)
    assert {name: int(stored[name][0]) for name in ("token_id", "document", "position")} == {
        name: bad[name] for name in ("token_id", "document", "position")
    }
    batch = Batches(reader, e.train.batch_size, e.seed, e.train.block_chunks).batch_at(27)[HOOK]
    stored_rows = reader.rows(0, reader.n_tokens)[HOOK]
    np.testing.assert_array_equal(batch, stored_rows[said["all"]["row"]])
    assert bad["row"] == said["all"]["row"][7]
    # The same command stops at the same step: the skipped ones before the last checkpoint were counted by it.
    with pytest.raises(DataError, match=r"loss of step 28 is nan.*last: step 20"):
        run_train(Workspace(e))
