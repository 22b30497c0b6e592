"""A world that SAELens saved, read as SAELens reads it; benchmarks/peers/make_truth_fixtures.py wrote the files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tiny import ROOT

import saejax
from saejax.core.errors import ConfigError, DataError
from saejax.core.rng import stream
from saejax.evals.truth import World, plant
from saejax.experiment import shipped

SAVED = ROOT / "tests" / "fixtures" / "peers" / "truth" / "saved"
CONFIG, WEIGHTS, TREES = "synthetic_model_config.json", "synthetic_model.safetensors", "hierarchy.json"


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A copy of the saved world."""
    return Path(shutil.copytree(SAVED, tmp_path / "world"))


def test_it_is_the_world_that_saelens_loads() -> None:
    planted = plant(World(source=str(SAVED)))
    with np.load(SAVED / "loaded.npz") as theirs:
        for name in ("directions", "bias", "probability", "causes"):
            np.testing.assert_array_equal(getattr(planted, name), theirs[name])
        # Made anew at each load: linear magnitudes, and normal ones of torch's generator.
        for name in ("mean", "std"):
            np.testing.assert_allclose(getattr(planted, name), theirs[name], rtol=0, atol=1e-6)
        parent, exclusive = theirs["parent"], theirs["exclusive"]
    for above, child in planted.hierarchy.pairs():
        assert parent[child] == above
    assert len(planted.hierarchy.pairs()) == (parent >= 0).sum() and planted.hierarchy.scaled
    flags = np.concatenate([g.exclusive for g in planted.hierarchy.generations])
    np.testing.assert_array_equal(flags, exclusive[: len(flags)])


def test_a_moved_world_is_the_same_and_a_changed_one_is_not(world: Path) -> None:
    here, there = plant(World(source=str(SAVED))), plant(World(source=str(world)))
    assert here.fingerprint == there.fingerprint
    for mine, theirs in zip(here.sample(stream(0, "x"), 50), there.sample(stream(0, "x"), 50), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    config = json.loads((world / CONFIG).read_text())
    (world / CONFIG).write_text(json.dumps(config | {"seed": 8}))
    assert plant(World(source=str(world))).fingerprint != here.fingerprint


def test_a_dictionary_is_trained_and_scored_on_it(world: Path, tmp_path: Path) -> None:
    config = shipped("truth", "saelens")
    config.runs_dir, config.name = str(tmp_path / "runs"), "saved"
    config.truth.source, config.truth.score_samples = str(world), 500
    config.coder.d_sae, config.coder.k = 12, 3
    config.train.tokens, config.train.batch_size, config.train.lr = 2560, 128, 3e-3
    scores = saejax.truth(config)
    assert 0 < scores.figures["mcc"] <= 1
    written = json.loads((tmp_path / "runs" / "saved" / "truth.json").read_text())
    assert written["world"] == plant(World(source=str(world))).described()
    assert written["world"]["n_features"] == 40 and written["world"]["d_in"] == 12
    # Another world is refused, and the first is taken from wherever it lies.
    moved = shutil.move(world, tmp_path / "moved")
    config.truth.source = str(moved)
    assert saejax.truth(config).figures == scores.figures
    (Path(moved) / TREES).unlink()
    with pytest.raises(DataError, match="made from"):
        saejax.truth(config)


def test_settings_that_would_make_features_are_refused_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"truth\.roots is set.*truth:saelens"):
        plant(World(source=str(SAVED), roots=4))
    plant(World(source=str(SAVED), score_samples=200))


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def of_weights(folder: Path) -> None:
        tensors = dict(safetensors.numpy.load_file(folder / name))
        (folder / name).write_bytes(safetensors.numpy.save(change(tensors)))

    def of_json(folder: Path) -> None:
        (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))

    return of_weights if name == WEIGHTS else of_json


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda d: {k: v for k, v in d.items() if k != key}


def set_to(key: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda d: d | {key: value(d[key]) if callable(value) else value}


def trees(change: Callable[[list[Any]], None]) -> Callable[[Any], Any]:
    def changed(d: Any) -> Any:
        change(d["roots"])
        return d

    return changed


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"no {WEIGHTS}.*hf download"),
    "no config": (lambda f: (f / CONFIG).unlink(), f"no {CONFIG}"),
    "cut short": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-40]), "not a readable safetensors"),
    "a lying header": (lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 64), "not a readable safetensors"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "damaged"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "no settings"),
    "a tensor is missing": (edit(WEIGHTS, without("bias")), "has no bias"),
    "another width": (edit(WEIGHTS, set_to("bias", lambda b: b[:-1])), "bias.*does not fit"),
    "not finite": (edit(WEIGHTS, set_to("firing_probabilities", lambda p: p * np.float32(np.nan))), "not finite"),
    "long rows": (edit(WEIGHTS, set_to("feature_vectors", lambda v: 2 * v)), "length 1"),
    "variances": (edit(WEIGHTS, set_to("correlation_diag", lambda v: 2 * v)), "variances of 1"),
    "no seed": (edit(CONFIG, set_to("seed", None)), "anew at each load"),
    "a strange kind": (edit(CONFIG, set_to("mean_firing_magnitudes", {"generator_name": "gamma"})), "gamma"),
    "no number": (edit(CONFIG, set_to("std_firing_magnitudes", {"generator_name": "constant"})), "not readable"),
    "other numbers": (edit(TREES, trees(lambda r: r[0].update(feature_index=5))), "not numbered"),
    "a childless parent": (edit(TREES, trees(lambda r: r[0].update(children=[]))), "not numbered"),
    "mixed scales": (edit(TREES, trees(lambda r: r[0].update(scale_children_by_parent=False))), "not numbered"),
    "no trees": (edit(TREES, without("roots")), "holds no trees"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_sampled_is_refused_with_its_file(case: str, world: Path) -> None:
    breaks, message = BROKEN[case]
    breaks(world)
    with pytest.raises(DataError, match=message) as error:
        plant(World(source=str(world)))
    assert str(world) in str(error.value)
