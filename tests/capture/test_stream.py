"""Activations straight into training: the same batches however often it is stopped, and the rows that a store has."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_experiment

from saejax.app.stages import run_capture, run_train
from saejax.app.sweep.config import SweepConfig
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.capture import ActivationStream, CaptureConfig, stream
from saejax.capture.stream import Journal, Place, endless
from saejax.checkpoints import Checkpoints
from saejax.core.errors import ConfigError, DataError
from saejax.fit.devices import lm_mesh, training_mesh
from saejax.lm import LanguageModel
from saejax.parallel import on_mesh
from saejax.parallel.mesh import MODES
from saejax.store.layout import BF16

SIZES = [5, 0, 13, 1, 8, 21, 2]  # rows of the batches of text in an epoch: 50
FRESH = {"epochs": [0], "batches": [0]}


def numbered(cursor: dict[str, Any] | None, counted: dict[str, list[int]] = FRESH) -> Generator[tuple[Any, Any]]:
    """An epoch whose rows are their own numbers, [n, 1]."""
    counted["epochs"][0] += 1
    start = cursor["batch"] if cursor else 0
    for batch in range(start, len(SIZES)):
        counted["batches"][0] += 1
        low = sum(SIZES[:batch])
        rows = np.arange(low, low + SIZES[batch], dtype=np.float32)[:, None]
        yield {"h": rows.astype(BF16), "g": -rows.astype(BF16)}, {"batch": batch}


def made(path: Path, batch: int = 4, buffer: int = 16, limit: int = 1000, seed: int = 0) -> ActivationStream:
    journal = Journal(path, {"seed": seed})
    return ActivationStream(endless(numbered, limit), {"h": 1, "g": 1}, batch, buffer, min(limit, 50), seed, journal)


def taken(of: ActivationStream, start: int, count: int) -> np.ndarray:
    with contextlib.closing(of.iterate(start)) as batches:
        found = [next(batches) for _ in range(count)]
    for batch in found:
        np.testing.assert_array_equal(batch["h"], -batch["g"])  # rows stay aligned
    return np.stack([batch["h"][:, 0].astype(int) for batch in found])


@settings(deadline=None, max_examples=15)
@given(
    batch=st.integers(1, 40),
    buffer=st.integers(1, 60),
    limit=st.integers(1, 60),
    starts=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_batches_are_those_of_an_undisturbed_stream_from_any_step(
    tmp_path_factory: Any, batch: int, buffer: int, limit: int, starts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    whole = taken(made(folder / "whole", batch, buffer, limit), 0, 25)
    for start in starts:  # every start a new process with the journal of those before it
        again = taken(made(folder / "again", batch, buffer, limit), start, 5)
        np.testing.assert_array_equal(again, whole[start : start + 5])
    flat, epoch = whole.reshape(-1), min(limit, 50)
    rows = np.resize(np.arange(epoch), -(-len(flat) // buffer) * buffer)
    for low in range(0, len(flat) - buffer + 1, buffer):
        assert sorted(flat[low : low + buffer]) == sorted(rows[low : low + buffer])


def test_the_order_is_shuffled_and_follows_the_seed(tmp_path: Path) -> None:
    one, other = (taken(made(tmp_path / str(seed), 10, 50, seed=seed), 0, 10) for seed in (0, 1))
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[:5].reshape(-1), np.arange(50))
    assert not np.array_equal(one[:5], one[5:])  # the second epoch has an order of its own


@pytest.mark.parametrize("damage", ["lost", "torn", "garbled", "one line"])
def test_a_damaged_journal_costs_time_and_no_batch(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal"
    whole = taken(made(path), 0, 30)
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    if damage == "lost":
        path.unlink()
    elif damage == "torn":
        path.write_text(text[: len(text) // 2])
    elif damage == "garbled":
        path.write_text(lines[0] + lines[1] + "\x00{]\n" + "".join(lines[3:]))
    else:
        path.write_text(lines[0])
    again = made(path)
    np.testing.assert_array_equal(taken(again, 22, 8), whole[22:])
    np.testing.assert_array_equal(taken(made(path), 22, 8), whole[22:])
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_continued_stream_computes_its_block_again_and_not_those_before(tmp_path: Path) -> None:
    counted: dict[str, list[int]] = {"epochs": [0], "batches": [0]}

    def flow(place: Place) -> Any:
        return endless(lambda cursor: numbered(cursor, counted), 1000)(place)

    def again() -> ActivationStream:
        return ActivationStream(flow, {"h": 1, "g": 1}, 4, 16, 50, 0, Journal(tmp_path / "journal", {}))

    taken(again(), 0, 200)
    before = counted["batches"][0]
    taken(again(), 180, 1)
    assert counted["batches"][0] - before < 20  # two blocks of 16 rows, seven batches of text to 50 rows


def test_statistics_are_those_of_the_first_block_and_are_kept(tmp_path: Path) -> None:
    first = made(tmp_path / "journal", 4, 50)
    assert first.statistics["h"].mean == pytest.approx(np.arange(50).mean())
    assert first.statistics["h"].mean_squared_norm == pytest.approx(np.square(np.arange(50.0)).mean())
    again = made(tmp_path / "journal", 4, 50)
    assert again._first is None  # nothing was computed for them
    assert again.statistics["h"].mean == first.statistics["h"].mean
    np.testing.assert_array_equal(again.whole_batch_at(0)["h"], first.whole_batch_at(0)["h"])
    np.testing.assert_array_equal(again.whole_batch_at(14)["h"], first.whole_batch_at(14)["h"])


def test_another_stream_s_journal_is_refused_and_so_is_text_without_a_row(tmp_path: Path) -> None:
    made(tmp_path / "journal", seed=0)
    with pytest.raises(DataError, match="seed: there 0, here 1"):
        made(tmp_path / "journal", seed=1)

    def nothing(cursor: dict[str, Any] | None) -> Generator[tuple[Any, Any]]:
        yield {"h": np.empty((0, 1), BF16)}, {"batch": 0}

    with pytest.raises(DataError, match="not one activation"):
        ActivationStream(endless(nothing, 10), {"h": 1}, 4, 16, 10, 0, Journal(tmp_path / "other", {}))


# --- with the language model ---------------------------------------------------------------------------------------


def streamed(folder: Path, **sections: Any) -> Any:
    capture = {"into": "training", "buffer_rows": 1024} | sections.pop("capture", {})
    return tiny_experiment(folder, capture=capture, **sections)


def final(e: Any) -> dict[str, np.ndarray]:
    with Checkpoints(e.run_dir / "checkpoints") as checkpoints:
        items, _ = checkpoints.restore_numpy(e.train.steps, names=("params", "stats"))
    return items["params"] | items["stats"]


def test_an_epoch_of_the_stream_is_what_the_store_holds(tmp_path: Path) -> None:
    stored = Workspace(tiny_experiment(tmp_path / "stored"))
    run_capture(stored)
    reader = stored.reader("train")
    want = reader.rows(0, reader.n_tokens)["blocks.1.resid_post"].astype(np.float32)
    e = streamed(tmp_path, capture={"buffer_rows": 3000}, train={"batch_size": 3000, "tokens": 6000})
    found = Workspace(e).training()
    assert found.epoch_rows == reader.n_tokens == 3000
    with contextlib.closing(found.iterate(0)) as batches:
        for _ in range(2):
            got = next(batches)["blocks.1.resid_post"].astype(np.float32)
            np.testing.assert_array_equal(got[np.lexsort(got.T)], want[np.lexsort(want.T)])
    statistics = reader.statistics["blocks.1.resid_post"]
    assert found.statistics["blocks.1.resid_post"].mean_norm == pytest.approx(statistics.mean_norm, rel=1e-6)
    assert not (tmp_path / "stores" / "tiny" / "train").exists()


@pytest.mark.ci
def test_a_training_that_dies_ends_as_one_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"tokens": 28 * 128}
    whole = streamed(tmp_path / "whole", train=steps)
    # The one that dies has its language model on another device, which changes no number either.
    killed = streamed(tmp_path / "killed", train=steps, capture={"mesh": (1, 1)})
    for e in (whole, killed):
        run_capture(Workspace(e))
    assert run_train(Workspace(whole)) == 0
    iterate = ActivationStream.iterate

    def dying(self: ActivationStream, start_step: int = 0) -> Any:
        for i, batch in enumerate(iterate(self, start_step), start_step):
            if i == start_step + 17:
                raise KeyboardInterrupt
            yield batch

    monkeypatch.setattr(stream.ActivationStream, "iterate", dying)
    for _ in range(2):  # at steps 17 and 27, so that saved blocks are the first and a later one
        with pytest.raises(KeyboardInterrupt):
            run_train(Workspace(killed))
    monkeypatch.undo()
    assert run_train(Workspace(killed)) == 0
    for name, value in final(whole).items():
        np.testing.assert_array_equal(final(killed)[name], value, err_msg=name)
    rows = [json.loads(line) for line in (whole.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert any("val/fve" in row for row in rows)
    assert all(0 <= row["train/data_wait"] <= 1 for row in rows if "train/data_wait" in row)


def test_on_a_device_of_its_own_the_model_works_while_a_step_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first forward pass after step 1 waits, inside its program, until a step is inside its own."""
    begun, step_began, apply, devices = threading.Event(), threading.Event(), LanguageModel.apply, {}
    met: list[bool] = []

    def in_forward(_: Any) -> None:
        if begun.is_set() and not met:
            step_began.clear()
            met.append(step_began.wait(30))

    def forward(self: LanguageModel, params: Any, *rows: Any, **names: Any) -> Any:
        jax.debug.callback(in_forward, rows[0][0, 0])
        return apply(self, params, *rows, **names)

    def step(function: Any, mesh: Any) -> Any:
        def stepping(*arguments: Any) -> Any:
            jax.debug.callback(lambda _: (begun.set(), step_began.set()), arguments[0].step)
            return function(*arguments)

        devices["step"] = set(mesh.devices.flat)
        return on_mesh(stepping, mesh)

    monkeypatch.setattr(LanguageModel, "apply", forward)
    monkeypatch.setitem(MODES, "jit", step)
    e = streamed(tmp_path, capture={"mesh": (1, 1)}, train={"tokens": 12 * 128, "validate_every": 0})
    assert set(lm_mesh(e).devices.flat).isdisjoint(training_mesh(e).devices.flat)
    run_capture(Workspace(e))
    assert run_train(Workspace(e)) == 0
    assert met == [True]
    assert devices["step"] == set(training_mesh(e).devices.flat)


def test_devices_that_are_not_there_or_not_for_this_are_refused(tmp_path: Path) -> None:
    for mesh, what in (((8, 1), "none is left to train on"), ((5, 2), "there are 8")):
        with pytest.raises(ConfigError, match=what):
            training_mesh(streamed(tmp_path, capture={"mesh": mesh}))
    with pytest.raises(ConfigError, match=r"parallel.mesh=4,1 needs 4 devices; there are 2"):
        training_mesh(streamed(tmp_path, capture={"mesh": (3, 2)}, parallel={"mesh": (4, 1)}))
    with pytest.raises(ConfigError, match=r"capture.mesh is \(2,\)"):
        CaptureConfig(into="training", mesh=(2,))
    with pytest.raises(ConfigError, match=r"set capture.into=training"):
        CaptureConfig(mesh=(1, 1))


@pytest.mark.soak
def test_a_sweep_s_members_share_one_stream_and_are_what_single_runs_give(tmp_path: Path) -> None:
    relu = {"preset": "standard", "l1_coefficient": 0.5}  # its latents do not flip with the last bit as a TopK's do
    single = streamed(tmp_path, coder=relu, train={"tokens": 12 * 128}, top={"store": "tiny"})
    together = dataclasses.replace(single, name="sweep", sweep=SweepConfig(lrs=(1e-3, 3e-3)))
    assert run_sweep(Workspace(together)) == 0
    assert run_train(Workspace(single)) == 0
    (member,) = [
        path for path in together.run_dir.glob("*/config.json") if json.loads(path.read_text())["train"]["lr"] == 1e-3
    ]
    with Checkpoints(member.parent / "checkpoints") as checkpoints:
        items, _ = checkpoints.restore_numpy(12, names=("params",))
    for name, value in items["params"].items():
        np.testing.assert_allclose(value, final(single)[name], atol=1e-5 * np.abs(value).max(), err_msg=name)
    assert (together.run_dir / "stream.jsonl").is_file()
    assert not (tmp_path / "stores" / "tiny" / "train").exists()


def test_on_eight_devices_the_batches_are_the_same(tmp_path: Path) -> None:
    found = []
    for shape in ((1, 1), (4, 2)):
        work = Workspace(streamed(tmp_path / str(shape[0]), parallel={"mesh": shape}))
        W_E = work.lm.params["W_E"]  # the language model itself is spread over "latent" when it is read
        assert W_E.sharding.shard_shape(W_E.shape) == (W_E.shape[0] // shape[1], W_E.shape[1])
        with contextlib.closing(work.training().iterate(9)) as batches:
            found.append(next(batches)["blocks.1.resid_post"].astype(np.float32))
    np.testing.assert_allclose(found[0], found[1], rtol=2e-2, atol=1e-2)  # rounding to bfloat16 may tip over


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"capture.into is 'disk'. There are: store, training"):
        CaptureConfig(into="disk")
    with pytest.raises(ConfigError, match="buffer_rows"):
        CaptureConfig(buffer_rows=0)
