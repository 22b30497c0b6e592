"""What settings leave open: the largest batch that fits and the usual learning rate, found once and kept by the run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import planted_experiment

import saejax
from saejax.app.experiment import to_run_json
from saejax.app.sweep.config import SweepConfig
from saejax.app.sweep.members import members
from saejax.app.sweep.run import run_sweep, with_rates
from saejax.app.training_folders import as_begun
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, DataError
from saejax.core.host import available_memory
from saejax.fit.resolve import resolve, with_numbers
from saejax.training import TrainConfig
from saejax.training.batch_size import find
from saejax.training.optim import usual_rate

MUCH = 10**9


def test_the_largest_that_fits_is_found_with_few_compilations() -> None:
    """Against all sizes one by one, for steps of 1,000 bytes and 10 more for each activation."""
    for room in (500, 3_559, 3_560, 10**4, 10**5, 10**6):
        for tokens, rows in ((MUCH, MUCH), (5 * 10**6, MUCH), (MUCH, 10**5), (3000, 3000)):
            for parts, shares in ((1, 1), (4, 2), (1024, 1)):
                tried: list[int] = []

                def needs(size: int, tried: list[int] = tried) -> int:
                    tried.append(size)
                    return 1000 + 10 * size

                sizes = [2**i for i in range(8, 17) if 2**i >= 2 * parts]
                allowed = [s for s in sizes if s <= tokens // 1000 and s <= rows // 8] or sizes[:1]
                fitting = [s for s in allowed if 1000 + 10 * s <= room]
                if fitting:
                    assert find(tokens, rows, parts, shares, needs, room)[0] == fitting[-1]
                else:
                    with pytest.raises(ConfigError, match="takes more than"):
                        find(tokens, rows, parts, shares, needs, room)
                assert len(tried) <= 5 and len(set(tried)) == len(tried)


def test_what_has_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="divides into 3 parts"):
        find(MUCH, MUCH, 3, 1, lambda size: 1, 10)
    with pytest.raises(ConfigError, match="there are 200 activations"):
        find(MUCH, 200, 1, 1, lambda size: 1, 10)
    why = find(MUCH, MUCH, 1, 1, lambda size: 10**6, 2 * 10**6)[1]
    assert why == "its step takes 1.0 of 2.0 MB of a device; saejax looks no further"


def test_settings_wait_for_a_size() -> None:
    open_ = TrainConfig(batch_size=0, accumulate=3)
    with pytest.raises(ConfigError, match="no training has found a size"):
        _ = open_.steps
    with pytest.raises(ConfigError, match="not a multiple of accumulate"):
        dataclasses.replace(open_, batch_size=256)


def test_a_run_keeps_the_size_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is really compiled: 256 of the 4,096 rows, since more leave fewer than 1,000 steps."""
    x = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    how: dict[str, Any] = {"d_sae": 16, "batch_size": 0, "tokens": 1024, "run": tmp_path / "run"}
    assert saejax.train(x, "standard", **how, progress=False).origin.step == 4
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["train"]["batch_size"] == 256

    def unknown(devices: Any) -> int:
        raise AssertionError("it is looked for again")

    monkeypatch.setattr("saejax.fit.resolve.room_on", unknown)
    assert saejax.train(x, "standard", **how, progress=False).origin.step == 4
    assert saejax.train(x, "standard", **{**how, "batch_size": 256}, progress=False).origin.step == 4


def test_a_run_keeps_the_rate_that_was_usual(tmp_path: Path) -> None:
    """Training without a rate is training at the usual one; a run that was begun with another goes on with that."""
    x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    how: dict[str, Any] = {"d_sae": 16, "batch_size": 64, "tokens": 256, "progress": False}
    told = saejax.train(x, "standard", lr=0.03, **how)
    in_folder = saejax.train(x, "standard", run=tmp_path / "run", **how)
    assert in_folder.fingerprint() == saejax.train(x, "standard", **how).fingerprint() == told.fingerprint()
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    assert config["train"]["lr"] == 0.03
    config["train"]["lr"] = 3e-4
    path.write_text(json.dumps(config))
    assert saejax.train(x, "standard", run=tmp_path / "run", **how).fingerprint() == in_folder.fingerprint()
    with pytest.raises(DataError, match=r"train\.lr: 0.0003 -> 0.5"):
        saejax.train(x, "standard", run=tmp_path / "run", lr=0.5, **how)


def test_each_member_of_a_sweep_has_the_usual_rate_of_its_coder(tmp_path: Path) -> None:
    e = planted_experiment(tmp_path, "sweep", lr=0.0, tokens=10**7)
    e = dataclasses.replace(e, sweep=SweepConfig(points=("A: coder.d_sae=16", "B: coder.d_sae=64", "C: train.lr=0.5")))
    a, b, c = with_rates(Workspace(e), members(e))
    assert a.experiment.train.lr == a.unscaled.train.lr == usual_rate(e.train, 16, 16)
    assert b.experiment.train.lr == usual_rate(e.train, 16, 64) and c.experiment.train.lr == 0.5
    e.run_dir.mkdir(parents=True)
    begun = dataclasses.replace(a.experiment, train=dataclasses.replace(a.experiment.train, lr=0.25))
    (e.run_dir / "sweep_config.json").write_text(json.dumps({"A": to_run_json(begun)}))
    assert with_rates(Workspace(e), members(e))[0].experiment.train.lr == 0.25


def test_an_experiment_s_size_is_found_from_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    e = planted_experiment(tmp_path, "open", batch_size=0, tokens=10**6)
    monkeypatch.setattr("saejax.fit.resolve.room_on", lambda devices: 10**9)
    found = resolve(Workspace(e), {}, print).materials.experiment
    assert found.train.batch_size == 512  # an eighth of 4,096 rows
    assert "batch size 512: its step takes" in capsys.readouterr().out
    e.run_dir.mkdir(parents=True)
    (e.run_dir / "config.json").write_text(json.dumps({"train": {"batch_size": 1024}}))
    assert as_begun(e).train.batch_size == 1024 and as_begun(found) is found


def test_what_cannot_be_looked_for_is_refused(tmp_path: Path) -> None:
    e = planted_experiment(tmp_path, "open", batch_size=0)
    several = dataclasses.replace(e, parallel=dataclasses.replace(e.parallel, processes="0/2", coordinator="here:1"))
    with pytest.raises(ConfigError, match="one process"):
        resolve(Workspace(several), {}, print)
    with pytest.raises(ConfigError, match="share a batch"):
        run_sweep(Workspace(dataclasses.replace(e, parallel=dataclasses.replace(e.parallel, mesh=()))))
    with pytest.raises(ConfigError, match="iterable"):
        saejax.train(iter([np.eye(4, dtype=np.float32)]), "topk", batch_size=0, tokens=1000, progress=False)


def test_memory_of_the_machine_or_of_the_group(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert available_memory(proc, groups) == 0
    for folder in (proc, groups / "memory"):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_memory(proc, groups) == 5000 * 1024
    (groups / "memory.max").write_text("max\n")
    (groups / "memory.current").write_text("7\n")
    assert available_memory(proc, groups) == 5000 * 1024
    (groups / "memory.max").write_text("1007\n")
    assert available_memory(proc, groups) == 1000
    (groups / "memory" / "memory.limit_in_bytes").write_text("907\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text("7\n")
    assert available_memory(proc, groups) == 900


def test_a_begun_run_gives_only_what_is_left_open() -> None:
    begun = {"batch_size": 256, "lr": 0.25}
    assert with_numbers(TrainConfig(batch_size=0, lr=0.0), begun) == TrainConfig(batch_size=256, lr=0.25)
    chosen = TrainConfig(batch_size=128, lr=0.5)
    assert with_numbers(chosen, begun) == chosen
