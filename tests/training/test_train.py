"""Training: it learns, it is the same after any interruption and on any mesh, and it never saves a broken state."""

import dataclasses
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.trainings import CODERS, CONFIG, assert_same, final, run

from saejax.checkpoints import Checkpoints
from saejax.core.errors import ConfigError, DataError
from saejax.core.metrics import read_metrics
from saejax.training import TrainConfig
from saejax.training.optim import make_schedule

Undisturbed = Callable[[str], Path]


@pytest.fixture(scope="module")
def undisturbed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """preset -> the folder of a run that nothing disturbed; each is made once."""

    @functools.cache
    def make(preset: str) -> Path:
        folder = tmp_path_factory.mktemp(f"undisturbed-{preset}")
        outcome = run(store, folder, preset)
        assert (outcome.step, outcome.finished, outcome.tokens) == (CONFIG.steps, True, CONFIG.tokens)
        return folder

    return make


@pytest.mark.parametrize("preset", CODERS)
def test_training_learns_and_writes_every_row(undisturbed: Undisturbed, preset: str) -> None:
    folder = undisturbed(preset)
    rows = read_metrics(folder / "metrics.jsonl")
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert list(losses) == list(range(1, 31))
    assert np.mean([losses[i] for i in range(26, 31)]) < 0.8 * losses[1]
    assert [row["step"] for row in rows if "val/norm" in row] == [0, 10, 20, 30]
    assert all(np.isfinite(v) for row in rows for v in row.values())
    seconds = [row["time/seconds"] for row in rows if "time/seconds" in row]
    assert len(seconds) == 1 and seconds[0] > 0


def test_two_fresh_runs_are_the_same(undisturbed: Undisturbed, store: Path, tmp_path: Path) -> None:
    run(store, tmp_path)
    assert_same(final(undisturbed("topk")), final(tmp_path))


@pytest.mark.parametrize("preset", CODERS)
def test_a_stopped_run_continues_bitwise(undisturbed: Undisturbed, store: Path, tmp_path: Path, preset: str) -> None:
    """Stopped by signals at several moments, each time no step is lost and the end is the same to the last bit."""
    folder = undisturbed(preset)
    done = 0
    for stop_at, number in ((0, signal.SIGTERM), (13, signal.SIGUSR1)):
        outcome = run(store, tmp_path, preset, stop_at=stop_at, stop_by=number)
        assert not outcome.finished and outcome.step == stop_at + 1
        assert outcome.tokens == (outcome.step - done) * 128
        done = outcome.step
    assert run(store, tmp_path, preset).finished
    assert_same(final(folder), final(tmp_path))
    rows = {r["step"]: r["train/loss"] for r in read_metrics(tmp_path / "metrics.jsonl") if "train/loss" in r}
    wanted = {r["step"]: r["train/loss"] for r in read_metrics(folder / "metrics.jsonl") if "train/loss" in r}
    assert rows == wanted


@pytest.mark.ci
def test_another_mesh_continues_the_same_run(store: Path, tmp_path: Path) -> None:
    """Eight devices as data x latent, then one: the same batches, parameters within 1e-5 after 150 steps.

    Over three meshes: `python -m benchmarks.reliability --only=meshes`.
    """
    config = dataclasses.replace(CONFIG, tokens=150 * 128, checkpoint_every=100, validate_every=0)
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    assert run(store, alone, config=config).finished
    run(store, moved, config=config, mesh=(2, 4), stop_at=49)
    assert run(store, moved, config=config, mesh=(1, 1)).finished
    params, others = ({n: v for n, v in final(f, 150).items() if "params" in n} for f in (alone, moved))
    assert_same(params, others, tolerance=1e-5)
    # The losses of each step are those of its batch: in another order they would differ by percents.
    losses = [
        [row["train/loss"] for row in read_metrics(f / "metrics.jsonl") if "train/loss" in row] for f in (alone, moved)
    ]
    assert len(losses[0]) == 150
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_a_damaged_checkpoint_costs_one_interval_not_the_run(
    undisturbed: Undisturbed, store: Path, tmp_path: Path
) -> None:
    run(store, tmp_path, stop_at=20)
    newest = sorted((tmp_path / "checkpoints").glob("0*"))[-1]
    victim = max((p for p in (newest / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 4
    victim.write_bytes(raw)
    with pytest.warns(UserWarning, match=victim.name):
        assert run(store, tmp_path).finished
    assert_same(final(undisturbed("topk")), final(tmp_path))


def test_a_loss_that_is_not_finite_stops_and_is_never_saved(store: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, max_skipped_steps=1)
    with pytest.raises(DataError, match=r"loss of step 17 is nan.*last: step 14"):
        run(store, tmp_path, config=config, poison=16)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [7, 14]
    assert all(np.isfinite(value).all() for value in final(tmp_path, 14).values())


def test_a_finished_run_does_nothing_more(undisturbed: Undisturbed, store: Path) -> None:
    folder = undisturbed("topk")
    before = (folder / "metrics.jsonl").read_bytes()
    again = run(store, folder)
    assert (again.step, again.finished, again.tokens) == (30, True, 0)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_schedules_start_peak_and_end_where_they_say() -> None:
    config = TrainConfig(
        tokens=2000, batch_size=2, lr=2.0, schedule="cosine", warmup_fraction=0.1, final_lr_fraction=0.25
    )
    cosine = make_schedule(config)
    assert float(cosine(0)) == 0 and float(cosine(100)) == pytest.approx(2.0)
    # Half way down the cosine: the mean of the peak and the end.
    assert float(cosine(550)) == pytest.approx((2.0 + 0.5) / 2)
    assert float(cosine(1000)) == pytest.approx(0.5)
    constant = make_schedule(TrainConfig(tokens=2000, batch_size=2, lr=2.0, schedule="constant"))
    assert float(constant(25)) == pytest.approx(1.0) and float(constant(999)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"batch_size": -1}, r"train\.batch_size is -1"),
        ({"tokens": 10, "batch_size": 100}, "less than one batch"),
        ({"lr": -1.0}, r"train\.lr"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**values)
