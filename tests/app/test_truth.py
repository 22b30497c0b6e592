"""`saejax truth`: trained on planted features, stopped and continued to the same bits, scored, compared."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.app import experiments
from saejax.app.experiment import Experiment, experiment
from saejax.app.truth import run_truth
from saejax.coders import CoderConfig, Sites, build
from saejax.core.config import to_config_dict
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError
from saejax.evals.truth import PlantedBatches


def small(folder: Path, name: str = "truth", **sections: dict[str, Any]) -> Experiment:
    c = experiments.shipped("truth")
    c.name, c.runs_dir, c.parallel.mesh = name, str(folder), (1, 1)
    c.truth.update(n_features=48, d_in=16, roots=4, orthogonal_steps=20, p_min=0.02, score_samples=2000)
    c.coder.update(d_sae=24, k=4, dead_after_tokens=2000)
    c.train.update(tokens=40 * 64, batch_size=64, checkpoint_every=10, validate_every=20, log_every=5, lr=3e-3)
    for section, values in sections.items():
        c[section].update(values)
    return experiment(c)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    e = small(tmp_path_factory.mktemp("runs"))
    assert run_truth(e) == 0
    return e


def test_it_trains_and_scores(trained: Experiment, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((trained.run_dir / "truth.json").read_text())
    assert content["step"] == 40 and content["n_samples"] == 2000
    assert content["world"]["n_features"] == 48 and len(content["features"]["f1"]) == 48
    assert len(content["latents"]["feature"]) == 24
    low, high = content["intervals"]["f1"]
    assert low <= content["figures"]["f1"] <= high
    assert 0 < content["figures"]["mcc"] < 1 and content["figures"]["true_l0"] > 1
    assert (trained.run_dir / "truth.png").read_bytes()[:4] == b"\x89PNG"
    assert saejax.load(trained.run_dir).hook_point == "x"
    rows = [json.loads(line) for line in (trained.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert any("val/fve" in row for row in rows), "it validates on rows that are in no batch"
    # Again: nothing is trained, and the figures are the same.
    assert run_truth(trained) == 0
    assert "already done" in (said := capsys.readouterr().out) and "| MCC " in said
    assert json.loads((trained.run_dir / "truth.json").read_text()) == content


def test_a_program_gets_the_scores(trained: Experiment) -> None:
    """Those of the command, of a run that is there and of a dictionary that a program holds."""
    figures = json.loads((trained.run_dir / "truth.json").read_text())["figures"]
    sae = saejax.load(trained.run_dir)
    scores = saejax.truth(trained), saejax.truth(to_config_dict(trained), sae)
    for one in scores:
        assert {name: value for name, value in one.figures.items() if np.isfinite(value)} == {
            name: value for name, value in figures.items() if value is not None
        }
    assert "2,000 samples: " in repr(scores[0]) and "<td>" in scores[0]._repr_html_()


@pytest.mark.ci
def test_stopped_amid_it_goes_on_to_the_same_bits(
    trained: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the command by SIGTERM, then of a program by Ctrl-C."""
    e, asked, stops = small(tmp_path), PlantedBatches._draw, {17: signal.SIGTERM, 27: signal.SIGINT}

    def stopping(self: PlantedBatches, step: int) -> Any:
        if step in stops:
            os.kill(os.getpid(), stops.pop(step))
        return asked(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(PlantedBatches, "_draw", stopping)
        assert run_truth(e) == EXIT_PREEMPTED
        with pytest.raises(KeyboardInterrupt, match="the same call continues"):
            saejax.truth(e)
    assert not stops and not (e.run_dir / "truth.json").exists() and saejax.load(e.run_dir).step < 40
    assert run_truth(e) == 0
    through, resumed = saejax.load(trained.run_dir), saejax.load(e.run_dir)
    for name, value in through.params.items():
        np.testing.assert_array_equal(resumed.params[name], value)
    figures = [json.loads((one.run_dir / "truth.json").read_text())["figures"] for one in (trained, e)]
    assert figures[0] == figures[1]


def test_a_run_does_not_go_on_in_another_world(trained: Experiment) -> None:
    other = dataclasses.replace(trained, truth=dataclasses.replace(trained.truth, p_max=0.2))
    with pytest.raises(DataError, match=r"truth.p_max: 0.4 -> 0.2"):
        run_truth(other)


def test_dictionaries_are_scored_together(
    trained: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saejax.load(trained.run_dir).save(tmp_path / "saved")
    shapes = {"W_enc": (8, 16), "b_enc": (16,), "W_dec": (16, 8), "b_dec": (8,)}
    coder = build(CoderConfig(preset="standard", d_sae=16, encoder_centre=False), [8], 10, [8])
    zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    other = saejax.TrainedCoder(coder, zeros, Sites(("x",), ("x",), (1.0,), (1.0,), False))
    other.save(tmp_path / "narrow")
    e = dataclasses.replace(trained, name="scores", runs_dir=str(tmp_path))
    assert run_truth(e, [f"{trained.run_dir},{tmp_path / 'saved'},{tmp_path / 'narrow'}"]) == 1
    assert "narrow: error: TrainedCoder" in capsys.readouterr().out
    folder = e.run_dir / "scored"
    lines = (folder / "table.md").read_text().splitlines()
    assert len(lines) == 5 and "the world's activations are (16,)" in lines[4]
    found = [json.loads((folder / name / "truth.json").read_text()) for name in ("truth", "saved")]
    assert found[0]["figures"] == found[1]["figures"]
    assert found[0]["figures"] == json.loads((trained.run_dir / "truth.json").read_text())["figures"]
    with pytest.raises(DataError, match="the world's activations"):
        run_truth(e, [str(tmp_path / "narrow")])


def test_a_coder_of_several_hook_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one hook point, which a coder must reconstruct"):
        run_truth(small(tmp_path, coder={"preset": "transcoder"}))


def test_the_benchmarks_own_preset_is_synthsaebench() -> None:
    """Of the documentation of SAELens 6.43, "SynthSAEBench-16k", and the paper's appendix."""
    w = experiment(experiments.shipped("truth", "synthsaebench_16k")).truth
    assert (w.n_features, w.d_in, w.exponent, w.p_max, w.p_min) == (16_384, 768, 0.5, 0.4, 5e-4)
    assert (w.roots, w.branching, w.depth, w.exclusive, w.rank, w.correlation) == (128, 4, 3, 1.0, 25, 0.1)
    assert (w.orthogonal_steps, w.orthogonal_lr, w.scale_by_parent, w.compensate) == (100, 3e-4, True, True)
    with pytest.raises(ConfigError, match=r"no preset 'smal'. Did you mean 'small'"):
        experiments.shipped("truth", "smal")
