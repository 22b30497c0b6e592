"""What a run survives, and that nobody sees it afterwards: signals, which checkpoints stay, the record of sessions."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import ROOT, planted_experiment

import saejax
from benchmarks.reliability import PRESETS, halves
from saejax.app.experiment import Experiment
from saejax.app.stages import run_train
from saejax.app.workspace import Workspace
from saejax.checkpoints import Checkpoints
from saejax.coders import SPARSITIES, CoderConfig, build
from saejax.core import environment
from saejax.core.errors import ConfigError, DataError
from saejax.core.stopping import SIGNALS, Stopped, Stopping
from saejax.evals.heldout import heldout_rows, make_validation
from saejax.parallel import ParallelConfig, make_mesh, replicated, tree_shardings
from saejax.trained import make_sites
from saejax.training import TrainConfig
from saejax.training.memory import Memory
from saejax.training.preemption import Preemption

CUT = ("standard", "gated", "topk", "abs_topk", "batchtopk", "jumprelu")


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_asks_and_is_handed_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Preemption() as preemption:
        assert preemption.signal is None
        os.kill(os.getpid(), number)
        assert preemption.signal == number and preemption.agreed()
    assert signal.getsignal(number) == before


def test_a_signal_before_an_error_goes_on_to_the_command() -> None:
    """A trial that has seen enough ends its training by an error of its own, which its caller handles."""
    for number in SIGNALS:
        with pytest.raises(Stopped) as caught, Stopping(), contextlib.suppress(LookupError), Preemption():
            os.kill(os.getpid(), number)
            raise LookupError
        assert caught.value.number == number


# --- which checkpoints stay --------------------------------------------------------------------------------------


def steps_of(folder: Path) -> list[int]:
    with Checkpoints(folder / "checkpoints") as checkpoints:
        return checkpoints.steps()


def test_what_is_asked_for_stays_however_old(tmp_path: Path) -> None:
    items = {"params": {"x": jnp.ones(3)}}
    with Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_every=4) as checkpoints:
        for step in range(1, 11):
            checkpoints.save(step, items, {}, keep=(3,) if step < 9 else (5,))
    assert steps_of(tmp_path) == [4, 8, 9, 10]


def test_the_best_is_what_its_metric_says() -> None:
    configs = {metric: TrainConfig(keep_best=metric) for metric in ("val/fve", "val/relative_error", "val/r2", "")}
    high, low, other, none = (Memory(config) for config in configs.values())
    for step, value in enumerate((0.2, 0.5, float("nan"), 0.4, 0.5)):
        high, low = high.validated(step, {"fve": value}), low.validated(step, {"relative_error": value})
    assert (high.best, high.best_step) == (0.5, 1) and (low.best, low.best_step) == (0.2, 0)
    assert high.to_meta()["best"] == {"metric": "val/fve", "value": 0.5, "step": 1}
    assert Memory.resumed(configs["val/fve"], json.loads(json.dumps(high.to_meta()))) == high
    assert Memory.resumed(configs["val/r2"], high.to_meta()) == other
    assert none.validated(3, {"fve": 1.0}) == none and "best" not in none.to_meta()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"keep_best": "val/fv"}, "Did you mean 'val/fve'"),
        ({"keep_best": "val/l0"}, "keep_best"),
        ({"keep_best": "val/fve", "validate_every": 0}, "needs validations"),
        ({"keep_every": -1}, "keep_every"),
    ],
)
def test_policies_that_cannot_be_kept_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**values)


# --- whole runs, small ------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A run of 40 steps whose fve was best after 10."""
    fves = iter([0.0, 0.3, 0.5, 0.4, 0.2, 0.1, 0.1, 0.0, 0.0])
    policy: dict[str, Any] = {"keep_checkpoints": 1, "keep_best": "val/fve", "keep_every": 15}
    e = planted_experiment(tmp_path_factory.mktemp("kept"), "kept", checkpoint_every=3, validate_every=5, **policy)
    with pytest.raises(DataError, match="does not exist"):
        saejax.load(e.run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "saejax.fit.coders.make_validation", lambda *a: lambda params, stats: {"fve": next(fves), "l0": 1.0}
        )
        assert run_train(Workspace(e)) == 0
    return e


def test_a_run_keeps_its_best_and_every_mth_and_says_where_each_session_began(kept: Experiment) -> None:
    e = kept
    assert steps_of(e.run_dir) == [10, 15, 30, 40]
    best = saejax.load(e.run_dir, step="best")
    assert best.step == 10 and not best.finished and saejax.load(e.run_dir).step == 40
    np.testing.assert_array_equal(best.params["W_enc"], saejax.load(e.run_dir, step=10).params["W_enc"])
    with pytest.raises(DataError, match=r"no checkpoint of step 7; it has: 10, 15, 30, 40"):
        saejax.load(e.run_dir, step=7)
    written = json.loads((e.run_dir / "environment.json").read_text())
    session = written.pop("sessions")
    assert session == [written] and written["from_step"] == 0 and written["mesh"] == [1, 1]
    assert {"seed", "coder_seed", "command", "git", "variables"} <= set(written)


@pytest.mark.ci
def test_damage_to_the_newest_checkpoint_does_not_hide_the_best(kept: Experiment, tmp_path: Path) -> None:
    """One flipped bit in each of its files in turn, and each of them gone."""
    folder = tmp_path / "kept"
    shutil.copytree(kept.run_dir, folder)
    newest = folder / "checkpoints" / "000000040"
    warned = set()
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        raw = path.read_bytes()
        for damage in (bytes([raw[0] ^ 1]) + raw[1:] if raw else b"x", None):
            path.unlink() if damage is None else path.write_bytes(damage)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert saejax.load(folder, step="best").step == 10, path
            warned |= {
                path.relative_to(newest).parts[0]
                for w in caught
                if "checkpoint 40 cannot be restored" in str(w.message)
            }
            path.write_bytes(raw)
    assert warned >= {"meta", "integrity.json"} and "params" not in warned
    # The best is looked at itself; and where nobody's word is intact it is not guessed.
    for step, message in (
        ("000000010", r"checkpoint 10 cannot be restored"),
        (None, r"None of the checkpoints of .*kept"),
    ):
        for path in (folder / "checkpoints").glob(f"{step or '*'}/{'params/d/*' if step else 'meta/metadata'}"):
            path.write_bytes(b"x")
        with warnings.catch_warnings(), pytest.raises(DataError, match=message):
            warnings.simplefilter("ignore")
            saejax.load(folder, step="best")


def test_a_validation_looks_at_as_much_as_a_step_does_or_at_little() -> None:
    wide, narrow, layers = (
        build(CoderConfig(preset, d_sae=d_sae), [8] * n, 10)
        for preset, d_sae, n in (("batchtopk", 131_072, 1), ("topk", 512, 1), ("clt", 32_768, 12))
    )
    step = {"batch_size": 8192, "tokens": 8192}
    parts, small = TrainConfig(**step, accumulate=32), TrainConfig(batch_size=48, tokens=48)
    # [rows, latents] of a step's part; where that is less than 64 MB, of 64 MB; at most 4,096 rows.
    assert [heldout_rows(coder, parts) for coder in (wide, narrow, layers)] == [256, 4096, 256]
    assert [heldout_rows(coder, small) for coder in (wide, narrow, layers)] == [128, 4096, 48]
    assert heldout_rows(wide, TrainConfig(**step)) == 4096
    # A multiple of the devices along data; the members of a sweep's program share the 64 MB.
    assert heldout_rows(narrow, small, devices=3) == 4095 and heldout_rows(layers, small, devices=64) == 64
    assert heldout_rows(narrow, small, members=16) == 2048


def test_a_validation_says_the_same_however_many_rows_it_takes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workspace(planted_experiment(tmp_path, "rows"))
    reader, coder = work.reader("heldout"), work.build()
    sites = make_sites(work.experiment.coder, coder.topology, *work.sites, reader.statistics)
    params, stats = coder.init(jax.random.key(0)), coder.init_stats()
    found = []
    for shape, rows in (((1, 1), 4096), ((1, 1), 7), ((4, 2), 64)):
        monkeypatch.setattr("saejax.evals.heldout.heldout_rows", lambda *_, rows=rows: rows)
        mesh = make_mesh(ParallelConfig(shape))
        placed = jax.device_put(params, tree_shardings(mesh, params, coder.logical_axes()))
        validate = make_validation(coder, reader, sites, mesh, work.experiment.train)
        found.append(validate(placed, jax.device_put(stats, replicated(mesh))))
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found) and found[0]["l0"] > 1


def test_no_best_was_kept(tmp_path: Path) -> None:
    e = planted_experiment(tmp_path, "plain", keep_checkpoints=1)
    assert run_train(Workspace(e)) == 0
    with pytest.raises(DataError, match=r"keeps no best checkpoint: train with train.keep_best.*steps: 40"):
        saejax.load(e.run_dir, step="best")


# --- the record -------------------------------------------------------------------------------------------------


def test_sessions_are_added(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    for step in (7, 9):
        environment.append_session(path, environment.session_record(from_step=step))
    found = json.loads(path.read_text())
    assert [session.get("from_step") for session in found["sessions"]] == [7, 9] and found["from_step"] == 9
    path.write_text("{")
    environment.append_session(path, environment.session_record())
    assert len(json.loads(path.read_text())["sessions"]) == 1


def test_the_record_names_flags_and_neither_machine_nor_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_nothing")
    monkeypatch.setattr("sys.argv", [str(Path.cwd() / "launch" / "train.py"), "--config=x"])
    found = environment.session_record()
    assert found["variables"]["XLA_FLAGS"].endswith("--xla_dump_nothing")
    assert found["command"][1:] == [os.path.join("launch", "train.py"), "--config=x"]
    text = json.dumps(found)
    for private in (os.uname().nodename, str(Path.home()), str(Path.cwd())):
        assert len(private) < 3 or private not in text, private


# --- cut in two, and faults in real processes ------------------------------------------------------------------


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder whose fsync costs nothing, where there is one: dozens of checkpoints are quick there on a busy disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "preset", [name if name in ("topk", "batchtopk") else pytest.param(name, marks=pytest.mark.soak) for name in CUT]
)
def test_a_run_cut_at_any_step_ends_the_same(preset: str, in_memory: Path) -> None:
    """Every step of 6 was saved in the background; continued from each, with moments, averages and resampling."""
    assert halves(in_memory, preset, 6) == (5, 5)


def test_every_sparsity_is_cut_in_two() -> None:
    for presets in (CUT, PRESETS):  # here, and by `make reliability`
        assert {CoderConfig(preset=name).resolved().sparsity for name in presets} == set(SPARSITIES)


@pytest.mark.soak
@pytest.mark.parametrize(("part", "row"), [("kills", "kill -9"), ("signals", "SIGTERM")])
def test_one_kill_and_one_signal_leave_no_trace(part: str, row: str) -> None:
    """A short form of `make reliability`: its command ends with 1 when one of the faults is not survived."""
    words = (f"--{part}=1", "--steps=60", f"--only={part}")
    command = [sys.executable, "-m", "benchmarks.reliability", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    table = {
        name: counts for name, *counts in re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| (\d+) \|", done.stdout, re.M)
    }
    assert table[row] == ["1"] * 3 and len(table) == 2
