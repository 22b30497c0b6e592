"""`train.init_from`: a run starts from another dictionary, goes on by its own checkpoints, and says what it is from."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import ROOT, planted_experiment, replaced

import saejax
from saejax.app.experiment import Experiment
from saejax.app.stages import run_pipeline, run_train
from saejax.app.sweep.config import SweepConfig
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.checkpoints import Checkpoints
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json
from saejax.core.metrics import read_metrics
from saejax.store import StoreReader

WIDTH = 8
# One step at a learning rate of 0: the warm-up's first.
FIRST: dict[str, Any] = {"tokens": 64, "warmup_fraction": 1.0}
HOW: dict[str, Any] = {
    "k": 3,
    "d_sae": 32,
    "tokens": 20 * 64,
    "batch_size": 64,
    "lr": 3e-3,
    "mesh": (1, 1),
    "matmul_dtype": "float32",
    "progress": False,
}


def activations(rows: int = 600, seed: int = 0, size: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(9).normal(size=(16, WIDTH))
    return (size * (((rng.random((rows, 16)) < 0.1) * rng.exponential(1, (rows, 16))) @ directions + 0.3)).astype("f4")


def same(one: saejax.TrainedCoder, other: saejax.TrainedCoder) -> bool:
    return all(one.params[name].tobytes() == other.params[name].tobytes() for name in one.params)


def close(found: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(found - want).max() <= 1e-5 * np.abs(want).max())


@pytest.fixture(scope="module")
def source() -> saejax.TrainedCoder:
    return saejax.train(activations(), "topk", **HOW | {"tokens": 200 * 64})


# --- from Python -----------------------------------------------------------------------------------------------


def test_the_first_step_leaves_the_source_s_latents(source: saejax.TrainedCoder, tmp_path: Path) -> None:
    """Its learning rate is 0. On activations of three times the size, which have another scale: latents do not."""
    x = activations(200, 5)
    source.save(tmp_path / "saved")
    for data, given in ((activations(), source), (activations(size=3), tmp_path / "saved")):
        first = saejax.train(data, "topk", init_from=given, **HOW | FIRST)
        assert close(first.encode(x), source.encode(x)) and close(first.params["W_dec"], source.params["W_dec"])
    assert first.config.train.init_from == str(tmp_path / "saved")
    # A whole training from it is ahead of one that begins fresh, of the same length.
    warm, cold = (saejax.train(activations(), "topk", init_from=given, **HOW) for given in (source, ""))
    error = [np.square(x - sae.decode(sae.encode(x))).sum() for sae in (warm, cold)]
    assert error[0] < 0.7 * error[1] and warm.config.train.init_from.startswith("sha256:")


def test_nothing_that_begins_a_fresh_coder_is_asked_for(
    source: saejax.TrainedCoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("a warm start has the source's biases")

    monkeypatch.setattr("saejax.fit.beginning.make_prepare", asked)
    monkeypatch.setattr("saejax.training.start.geometric_median", asked)
    first = saejax.train(activations(), "topk", init_from=source, **HOW | FIRST)
    assert close(first.params["b_dec"], source.params["b_dec"])


@pytest.mark.parametrize(
    ("preset", "key", "value", "moved"),
    [
        ("topk", "firing_rate_init", 0.1, "b_enc"),
        ("topk", "b_dec_init", "geometric_median", "b_dec"),
        ("jumprelu", "target_l0_start", 3.0, "b_enc"),
    ],
)
def test_settings_of_a_fresh_start_are_refused(
    source: saejax.TrainedCoder, preset: str, key: str, value: Any, moved: str
) -> None:
    with pytest.raises(ConfigError, match=rf"coder.{key}={value} moves {moved}, .* Leave coder.{key} at "):
        saejax.train(activations(), preset, init_from=source, **HOW | {key: value})


def test_a_target_l0_moves_no_bias_that_the_source_brings(tmp_path: Path) -> None:
    """A fresh jumprelu's b_enc is drawn to its first L0; one that starts warm has the source's, less the centre's."""
    how = {key: value for key, value in HOW.items() if key != "k"} | {"encoder_centre": True}
    source, x = saejax.train(activations(), "jumprelu", **how), activations(200, 5)
    first = saejax.train(activations(), "jumprelu", init_from=source, run=tmp_path / "run", **how | FIRST)
    assert close(first.encode(x), source.encode(x))
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        items, meta = checkpoints.restore_numpy(1, names=("params",))
    mean = activations().astype(np.float64).mean(0) * meta["read_scales"][0]
    np.testing.assert_allclose(items["params"]["centre"], mean, rtol=1e-5)


@pytest.mark.ci
def test_a_batchtopk_goes_on_with_its_threshold_and_a_wider_one_adds_latents(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, how = (
        activations(200, 5),
        HOW | FIRST | {"progress": True, "threshold_decay": 0.9999999, "threshold_warmed": False},
    )
    source = saejax.train(activations(), "batchtopk", **HOW | {"tokens": 200 * 64})
    want = source.encode(x)
    assert close(saejax.train(activations(), "batchtopk", init_from=source, **how).encode(x), want)
    found = saejax.train(activations(), "batchtopk", init_from=source, **how | {"d_sae": 40}).encode(x)
    assert found.shape == (200, 40) and close(found[:, :32], want) and found[:, 32:].max() <= 1e-5 * want.max()
    assert "(32 latents of x) and 8 new ones" in capsys.readouterr().out


def test_what_cannot_start_is_refused_and_leaves_no_run(source: saejax.TrainedCoder, tmp_path: Path) -> None:
    for changes, message in (
        ({"preset": "standard"}, "relu needs thresholds"),
        ({"d_sae": 16}, "Set coder.d_sae=32 or more"),
        ({"init_from": tmp_path / "nowhere"}, "nowhere does not exist"),
    ):
        how = {"preset": "topk", "init_from": source, "run": tmp_path / "run"} | HOW | changes
        with pytest.raises((ConfigError, DataError), match=message):
            saejax.train(activations(), **how)
        assert not list((tmp_path / "run").glob("*.json"))


# --- runs ------------------------------------------------------------------------------------------------------


def experiment(folder: Path, name: str, init_from: str = "", **train: Any) -> Experiment:
    e = planted_experiment(folder, name, init_from=init_from, **train)
    return replaced(e, "coder", preset="topk", d_sae=64, k=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, and a run to start from."""
    folder = tmp_path_factory.mktemp("warm")
    assert run_train(Workspace(experiment(folder, "source"))) == 0
    return folder


@pytest.mark.ci
def test_a_run_says_what_it_is_from_and_needs_it_no_more(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "source"
    shutil.copytree(folder / "runs" / "source", there)
    e = experiment(folder, "from-source", str(there), keep_every=1)
    assert run_train(Workspace(e)) == 0
    assert f"starts from {there} (64 latents of h)" in capsys.readouterr().out
    assert read_json(e.run_dir / "config.json")["train"]["init_from"] == str(there)
    said = read_json(e.run_dir / "provenance.json")["init"]
    assert said["source"] == str(there) and len(said["sha256"]) == 64
    rows = [row for row in read_metrics(e.run_dir / "metrics.jsonl") if "val/fve" in row]
    before = [row for row in read_metrics(folder / "runs" / "source" / "metrics.jsonl") if "val/fve" in row]
    assert rows[0]["val/fve"] == pytest.approx(before[-1]["val/fve"], abs=1e-5) and before[0]["val/fve"] < 0.5
    # Cut at every tenth step, its source gone: the same bits.
    shutil.rmtree(there)
    half = tmp_path / "runs" / e.name
    shutil.copytree(e.run_dir, half)
    for step in (40, 30):
        shutil.rmtree(half / "checkpoints" / f"{step:09d}", ignore_errors=True)
    cut = dataclasses.replace(e, runs_dir=str(half.parent))
    assert saejax.load(half).step < 40
    assert run_train(Workspace(cut)) == 0 and same(saejax.load(half), saejax.load(e.run_dir))
    with pytest.raises(DataError, match=r"train.init_from: .* -> 'another'"):
        run_train(Workspace(replaced(cut, "train", init_from="another")))


@pytest.mark.ci
def test_a_run_without_a_checkpoint_begins_with_the_same_source_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "source"
    shutil.copytree(folder / "runs" / "source", there)
    e = dataclasses.replace(experiment(folder, "early", str(there)), runs_dir=str(tmp_path / "runs"))
    assert run_train(Workspace(e)) == 0
    whole = saejax.load(e.run_dir)
    shutil.rmtree(e.run_dir / "checkpoints")
    assert run_train(Workspace(e)) == 0 and same(saejax.load(e.run_dir), whole)
    shutil.rmtree(e.run_dir / "checkpoints")
    shutil.rmtree(there / "checkpoints" / "000000040")  # its newest is now another
    with pytest.raises(DataError, match=r"made from something else:\n +init\.sha256: "):
        run_train(Workspace(e))
    shutil.rmtree(there)
    with pytest.raises(DataError, match="does not exist"):
        run_train(Workspace(e))


@pytest.mark.ci
def test_a_wider_run_from_a_run_in_other_units(folder: Path, tmp_path: Path) -> None:
    """Free decoder rows, a width that is not the source's and a latent scale: what is saved is loaded back."""
    e = replaced(experiment(folder, "wide", str(folder / "runs" / "source")), "coder", d_sae=80, normalize="none")
    e = dataclasses.replace(e, runs_dir=str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saejax.training.step.optax.apply_updates", lambda params, updates: params)
        assert run_train(Workspace(e)) == 0
    x = StoreReader.open(folder / "stores" / "planted" / "heldout").rows(0, 200)["h"].astype(np.float32)
    want, found = saejax.load(folder / "runs" / "source").encode(x), saejax.load(e.run_dir).encode(x)
    assert found.shape == (200, 80) and close(found[:, :64], want) and found[:, 64:].max() <= 1e-5 * want.max()
    (scale,) = {one["latent_scale"] for one in metas(e.run_dir)}
    assert scale == pytest.approx(1 / saejax_scale(folder), rel=1e-5) and scale != 1


def metas(run: Path) -> list[dict[str, Any]]:
    with Checkpoints(run / "checkpoints") as checkpoints:
        return [checkpoints.restore_numpy(step, names=())[1] for step in checkpoints.steps()]


def saejax_scale(folder: Path) -> float:
    """What the source's training multiplied activations by; its rows have length 1 there."""
    return float(metas(folder / "runs" / "source")[-1]["write_scales"][0])


def test_a_pipeline_refuses_before_it_captures(folder: Path, tmp_path: Path) -> None:
    e = experiment(folder, "narrow", str(folder / "runs" / "source"))
    e = dataclasses.replace(replaced(e, "coder", d_sae=32), stores_dir=str(tmp_path))
    shutil.copytree(folder / "stores" / "planted", tmp_path / "planted")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match=r"Set coder.d_sae=64 or more"):
        patch.setattr("saejax.app.stages.pipeline.run_capture", lambda work: pytest.fail("captured"))
        run_pipeline(Workspace(e))
    assert not e.run_dir.exists()


@pytest.mark.soak
def test_the_members_of_a_sweep_start_from_it(folder: Path) -> None:
    """Each is what a single run gives, narrow and wide."""
    e = experiment(folder, "sweep", str(folder / "runs" / "source"), tokens=6 * 128)
    e = dataclasses.replace(e, sweep=SweepConfig(seeds=(1, 2), d_saes=(64, 80)))
    assert run_sweep(Workspace(e)) == 0
    assert (
        read_json(e.run_dir / "provenance.json")["init"]
        == read_json(e.run_dir / "d80-seed1" / "provenance.json")["init"]
    )
    for name, seed, width in [("d80-seed2", 2, 80)]:
        alone = experiment(folder, f"alone-{name}", str(folder / "runs" / "source"), tokens=6 * 128)
        alone = dataclasses.replace(replaced(alone, "coder", d_sae=width), coder_seed=seed)
        assert run_train(Workspace(alone)) == 0
        one, other = saejax.load(alone.run_dir), saejax.load(e.run_dir / name)
        assert all(close(other.params[key], one.params[key]) for key in one.params)


# --- kill -9 ---------------------------------------------------------------------------------------------------


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder whose fsync costs nothing, where there is one: checkpoints are many."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)


def killed(tmp_path: Path, kills: int, steps: int) -> None:
    """A process that calls `saejax.train` is killed after each of its first checkpoints; its source goes with it."""
    code = textwrap.dedent(f"""
        import sys
        sys.path[:0] = [{str(ROOT / "tests")!r}, {str(ROOT / "tests" / "app")!r}]
        import saejax
        from test_warm_start import HOW, activations
        saejax.train(activations(), "topk", run=sys.argv[1], init_from=sys.argv[2],
                     **HOW | {{"tokens": {steps} * 64, "checkpoint_every": 5, "d_sae": 40}})
    """)
    source, run = tmp_path / "source", tmp_path / "killed"
    saejax.train(activations(), "topk", **HOW).save(source)
    how = HOW | {"tokens": steps * 64, "checkpoint_every": 5, "d_sae": 40}
    whole = saejax.train(activations(), "topk", init_from=source, run=tmp_path / "whole", **how)

    def reached() -> int:
        # One that is on its way out is called 000000005.removed.
        names = (at.parent.name for at in run.glob("checkpoints/*/integrity.json"))
        return max((int(name) for name in names if name.isdigit()), default=0)

    for _ in range(kills):
        before = reached()
        child = subprocess.Popen([sys.executable, "-c", code, str(run), str(source)], cwd=ROOT)
        try:
            end = time.monotonic() + 120
            while reached() == before and child.poll() is None and time.monotonic() < end:
                time.sleep(0.005)
        finally:
            child.kill()
            assert child.wait() == -9, "it must be killed at work"
        assert before < reached() < steps
        shutil.rmtree(source, ignore_errors=True)
    assert same(saejax.train(activations(), "topk", init_from=source, run=run, **how), whole)


@pytest.mark.ci
def test_a_killed_run_continues_to_the_same_bits_without_its_source(in_memory: Path) -> None:
    killed(in_memory, kills=1, steps=80)


@pytest.mark.soak
def test_a_run_that_is_killed_again_and_again_ends_the_same(in_memory: Path) -> None:
    killed(in_memory, kills=6, steps=800)
