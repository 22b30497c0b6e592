"""`gates.retries`: what fails is trained again, the best is kept, and a stop at any moment loses nothing."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import SMALLER, one_device, replaced, tiny_experiment

import saejax
from saejax.app.experiment import Experiment
from saejax.app.run_coders import experiment_of
from saejax.app.stages import retries, run_evaluate, run_pipeline
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, DataError
from saejax.evals.attempts import Attempts
from saejax.reports import render
from saejax.runs import Run

# After 60 steps with 8 latents a token no attempt reaches the error; more latents a token come nearer.
BARS = {"retries": 1, "relative_error": 0.01, "r2": 0.0, "r2_step": 60, "loss_rise": 10.0, "gram_rms": 1.0}
BARS |= {"loss_recovered": 0.0}


def tried(folder: Path, **gates: Any) -> Experiment:
    return tiny_experiment(folder, gates=BARS | gates, train={"tokens": 60 * 128, "lr": 5e-3, "validate_every": 30})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with one retry, done."""
    folder = tmp_path_factory.mktemp("retries")
    assert run_pipeline(Workspace(tried(folder))) == 1
    return folder


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "copy")
    return tmp_path / "copy"


def told(run: Path) -> Any:
    return json.loads((run / "attempts.json").read_text())


@pytest.mark.ci
def test_the_best_is_kept_and_load_gives_it(done: Path) -> None:
    run = done / "runs" / "tiny"
    record = Attempts.read(Run(run))
    assert record is not None and record.kept == "attempt-1" and len(record.attempts) == 2
    (change,) = record.attempts[1].changes
    assert (change.key, change.before, change.after, change.gates) == ("coder.k", 8, 12, ("relative_error",))
    own, kept = saejax.load(run / "attempt-0"), saejax.load(run)
    # Both are TopK, which has k.
    assert own.coder.sparsity.k.end == 8 and kept.coder.sparsity.k.end == 12  # type: ignore[attr-defined]
    assert kept.origin.source == str(run / "attempt-1") and "attempt-1 of" in kept.origin.notes[0]
    assert kept.fingerprint() == saejax.load(run / "attempt-1").fingerprint() and not own.origin.notes
    assert kept.figures["relative_error"] < own.figures["relative_error"]
    e = experiment_of(run)
    assert (e.run_dir, e.coder.k, e.gates.retries, e.store) == (run / "attempt-1", 12, 0, "tiny")


@pytest.mark.ci
def test_the_page_and_the_escalation_say_what_was_tried(done: Path) -> None:
    run = done / "runs" / "tiny"
    page = (run / "report.html").read_text()
    assert '"kept":"attempt-1"' in page and '"key":"coder.k","before":8,"after":12' in page
    assert (run / "attempt-1" / "report.html").is_file() and (run / "attempt-1" / "features.sqlite").is_file()
    text = (run / "escalation.md").read_text()
    assert "coder.k 8 to 12" in text and "attempt-1 is kept" in text and "widen coder.expansion" in text
    assert (run / "escalation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
def test_a_stop_at_any_stage_continues_to_the_same(copy: Path, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copy / "runs" / "tiny"
    for name in ("attempts.json", "attempt-1", "escalation.md"):
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    own_train, own_evaluate, trained = retries.run_train, retries.run_evaluate, list[Workspace]()

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for name in ("run_train", "run_evaluate", "render", "_escalate"):
        with monkeypatch.context() as patched:
            patched.setattr(retries, name, stop)
            with pytest.raises(KeyboardInterrupt):
                run_pipeline(Workspace(tried(copy)))

    def counted(work: Workspace) -> int:
        trained.append(work)
        return own_train(work)

    monkeypatch.setattr(retries, "run_train", counted)
    assert run_pipeline(Workspace(tried(copy))) == 1
    assert told(run) == told(done / "runs" / "tiny") and own_evaluate is retries.run_evaluate
    metrics = [(folder / "runs/tiny/attempt-1/metrics.jsonl").read_text().count("val/") for folder in (copy, done)]
    assert len(trained) == 1 and metrics[0] == metrics[1], "a done attempt was trained again"


@pytest.mark.ci
def test_a_bar_that_is_passed_ends_it(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bars that move judge all attempts anew; the escalation goes when the best passes."""
    run = copy / "runs" / "tiny"
    error = 1 - saejax.load(run / "attempt-1").figures["fve"]
    e = tried(copy, relative_error=error * 1.001)
    run_evaluate(Workspace(e), redo=True)
    assert run_pipeline(Workspace(e)) == 0
    assert Run(run).counted().path.name == "attempt-1" and not (run / "escalation.md").exists()
    assert "attempt-1 is kept. It passes 6 of the 6" in capsys.readouterr().out


@pytest.mark.ci
def test_where_nothing_can_be_changed_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dictionary of 9 latents of which 8 fire: k cannot rise, and the rate is as high as it gets."""
    e = replaced(replaced(tried(tmp_path, zero_fraction=0.05), "coder", d_sae=9), "train", lr=1e-2)
    assert run_pipeline(Workspace(e)) == 1
    assert "Nothing more can be changed" in capsys.readouterr().out
    assert "Nothing more can be changed" in (e.run_dir / "escalation.md").read_text()
    assert not (e.run_dir / "attempt-1").exists() and e.run.counted() == e.run


def test_retries_need_a_store(tmp_path: Path) -> None:
    e = replaced(tried(tmp_path), "capture", into="training")
    with pytest.raises(ConfigError, match=r"gates\.retries=1 trains again from stored activations"):
        run_pipeline(Workspace(e))
    assert not e.run_dir.exists()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "damaged"),
        ('{"attempts": [], "kept": "../../secret", "why": ""}', "damaged"),
        ('{"attempts": 3, "kept": "attempt-0", "why": ""}', "damaged"),
        ('["attempt-1"]', "damaged"),
    ],
)
def test_a_damaged_record_is_named(copy: Path, content: str, says: str) -> None:
    run = copy / "runs" / "tiny"
    (run / "attempts.json").write_text(content)
    for read in (saejax.load, render):
        with pytest.raises(DataError, match=rf"attempts\.json is {says}"):
            read(run)


@pytest.mark.ci
def test_a_kept_attempt_that_is_gone_is_named(copy: Path) -> None:
    shutil.rmtree(copy / "runs" / "tiny" / "attempt-1")
    with pytest.raises(DataError, match="keeps attempt-1"):
        saejax.load(copy / "runs" / "tiny")


@pytest.mark.soak
def test_killed_again_and_again_it_comes_to_the_same(tmp_path: Path) -> None:
    """kill -9 at random moments, until the command ends by itself."""
    bars = ("--config.gates.retries=2", "--config.gates.relative_error=0.01")
    command = [sys.executable, "-m", "saejax", "pipeline", "--config=quickstart:tiny", *SMALLER, *bars]
    results = []
    for name, kills in (("whole", 0), ("killed", 8)):
        folder = tmp_path / name
        folder.mkdir()
        rng = random.Random(0)
        for number in range(kills + 1):
            process = subprocess.Popen(command, cwd=folder, env=one_device(), stdout=subprocess.DEVNULL)
            if number < kills:
                time.sleep(rng.uniform(8, 40))
                os.kill(process.pid, signal.SIGKILL)
            code = process.wait(timeout=600)
            if code in (0, 1):
                break
        assert code == 1
        results.append(told(folder / "runs" / "quickstart-tiny"))
    assert results[0] == results[1]
