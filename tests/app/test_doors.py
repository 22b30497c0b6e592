"""All doors to a training: the same settings give the same coder and the same state before the first step.

What a door cannot honour it refuses by name, before it has read, drawn or written anything.
"""

import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny import D_IN, replaced
from tiny.doors import (
    DOORS,
    ROWS,
    Enough,
    Seen,
    for_door,
    given,
    iterated,
    made,
    of_door,
    plan,
    stage,
    streamed,
    streamed_plan,
    streamed_sweep,
    sweep,
    truth,
    watched,
    write_stores,
)

import saejax
from saejax.app.experiment import Experiment
from saejax.app.truth import run_truth
from saejax.checkpoints import Checkpoints
from saejax.coders import Coder, build
from saejax.core.errors import ConfigError
from saejax.core.files import read_json
from saejax.core.metrics import read_metrics
from saejax.core.rng import stream
from saejax.core.settings import settings_of
from saejax.evals.truth import plant
from saejax.evals.truth.source import PlantedBatches
from saejax.plans import calibrate
from saejax.store import Statistics, StoreReader
from saejax.training import TrainConfig, TrainState


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return watched(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_stores(folder := tmp_path_factory.mktemp("doors"))
    return folder


def wanted(e: Experiment, width: int = D_IN) -> Coder:
    """Of all that the settings say."""
    return build(e.coder, [width], e.train.steps, [width], e.train.neighbours, e.train.tokens)


# --- from nothing ----------------------------------------------------------------------------------------------


def through(door: str, e: Experiment) -> None:
    with pytest.raises(Enough):
        DOORS[door](e)


def mean_of(door: str, e: Experiment) -> tuple[np.ndarray, float]:
    """(mean, scale) of what is read, float64, without the library's statistics where there are rows."""
    if door == "truth":
        found: Statistics = PlantedBatches(plant(e.truth), e.train.batch_size, e.seed).statistics["x"]
        return np.asarray(found.mean, np.float64), np.sqrt(D_IN) / found.mean_norm
    x = StoreReader.open(e.store_dir("train")).rows(0, ROWS)["h"].astype(np.float64)
    return x.mean(0), np.sqrt(D_IN) / np.linalg.norm(x, axis=1).mean()


CASES: dict[str, dict[str, Any]] = {
    "topk": {},
    "temporal": {"coder": {"preset": "temporal", "d_sae": 64}, "train": {"neighbours": 2}},
}
PAIRS = [(case, door) for case in CASES for door in DOORS if (case, door) != ("temporal", "truth")]


@pytest.mark.parametrize(("case", "door"), PAIRS)
def test_every_door_begins_with_the_same_coder_and_state(
    seen: Seen, folder: Path, tmp_path: Path, case: str, door: str
) -> None:
    e = for_door(door, of_door(folder, tmp_path, **CASES[case]))
    coder = wanted(e)
    assert 0 < coder.dead_after_tokens == round(0.003 * e.train.tokens)
    through(door, e)
    assert seen.coders and all(one == coder for one in seen.coders)
    (state,) = seen.states
    fresh = coder.init(stream(e.seed, "init"))
    (mean, scale), params = mean_of(door, e), jax.device_get(state.params)
    assert params.keys() == fresh.keys()
    for name in ("W_enc", "W_dec"):
        np.testing.assert_allclose(params[name], fresh[name], rtol=1e-5, atol=1e-7)
    for name in ("b_dec", "centre"):
        np.testing.assert_allclose(params[name], mean * scale, rtol=1e-4, atol=1e-5)
    assert not params["b_enc"].any()
    assert_as_fresh(coder, state)


def assert_as_fresh(coder: Coder, state: TrainState) -> None:
    """Statistics and moments as every training begins with them."""
    usual = coder.init_stats()
    assert state.stats.keys() == usual.keys()
    for name, value in usual.items():
        np.testing.assert_array_equal(state.stats[name], value)
    assert int(state.step) == 0 and not state.averaged and not state.recent
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))


def test_a_plan_and_a_calibration_are_of_the_same_coder(seen: Seen, tmp_path: Path) -> None:
    """A plan needs a model, whose activations are as wide as it says."""
    e = made(tmp_path, lm={"model": "demo"}, top={"hook_point": "blocks.1.resid_post", "store": ""})
    seen.at_once = True
    with pytest.raises(Enough):
        plan(e)
    assert seen.coders and all(one == wanted(e, 128) for one in seen.coders)
    seen.coders.clear()
    with pytest.raises(Enough):
        calibrate.step_point("topk", D_IN, 64, 128, 4)
    usual = {"coder.preset": "topk", "coder.d_sae": 64, "coder.k": 4, "train.batch_size": 128}
    assert seen.coders and all(one == wanted(calibrate.experiment_with(usual)) for one in seen.coders)


def test_nobody_else_builds_a_coder() -> None:
    """But who loads one, who documents them, and the formats of other projects."""
    package = Path(saejax.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"from saejax\.coders(\.build)? import [^\n]*\bbuild\b", path.read_text())
    }
    assert found == {"fit/trainable.py", "app/load.py", "commands/_reference.py", "coders/__init__.py"}


@pytest.mark.parametrize("changes", [{}, {"max_rows": 640}, {"into": "training"}])
def test_an_open_batch_size_is_found_among_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """By the training and by its plan, before anything is captured."""
    e = made(tmp_path, lm={"model": "demo"}, top={"hook_point": "blocks.1.resid_post", "store": ""})
    e = replaced(e, "train", batch_size=0, **{key: changes[key] for key in changes if key != "into"})
    e = replaced(e, "capture", **{key: changes[key] for key in changes if key == "into"})
    asked: list[tuple[Any, ...]] = []

    def find(*how: Any) -> None:
        asked.append(how[:4])
        raise Enough

    monkeypatch.setattr("saejax.fit.resolve.find", find)
    for door in (stage, plan):
        with pytest.raises(Enough):
            door(e)
    assert asked[0] == asked[1]


# --- from another dictionary -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved coder of 64 latents."""
    x = StoreReader.open(folder / "stores" / "doors" / "train").rows(0, ROWS)["h"].astype(np.float32)
    how: dict[str, Any] = {"matmul_dtype": "float32", "mesh": (1, 1), "progress": False}
    sae = saejax.train(x, "topk", k=4, d_sae=64, tokens=20 * 128, batch_size=128, lr=1e-2, **how)
    sae.save(path := tmp_path_factory.mktemp("source") / "saved")
    return path


@pytest.mark.parametrize("d_sae", [64, pytest.param(80, marks=pytest.mark.ci)])
@pytest.mark.parametrize("door", DOORS)
def test_every_door_starts_from_a_source_alike(
    seen: Seen, folder: Path, tmp_path: Path, source: Path, door: str, d_sae: int
) -> None:
    """The centre is the data's, as it is of a fresh coder, and the first reconstruction is the source's."""
    sections = {"coder": {"d_sae": d_sae, "auxk_coefficient": 1 / 32}, "train": {"init_from": str(source)}}
    e = for_door(door, of_door(folder, tmp_path, **sections))
    coder = wanted(e)
    through(door, e)
    (state,) = seen.states
    (mean, scale), params = mean_of(door, e), jax.device_get(state.params)
    np.testing.assert_allclose(params["centre"], mean * scale, rtol=1e-4, atol=1e-5)
    sae = saejax.load(source)
    x = StoreReader.open(e.store_dir("train")).rows(0, 200)["h"].astype(np.float64)
    want = sae.decode(sae.encode(x.astype(np.float32)))
    assert np.abs(reconstructed(params, x * scale, 4) / scale - want).max() <= 2e-5 * np.abs(want).max()
    new = np.asarray(state.stats["tokens_since_fired"])[64:]
    assert len(new) == d_sae - 64 and (new == coder.dead_after_tokens).all()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))


def reconstructed(params: dict[str, Any], x_BD: np.ndarray, k: int) -> np.ndarray:
    """What a TopK makes of activations in training, float64."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    pre_BF = (x_BD - p["centre"]) @ p["W_enc"] + p["b_enc"]
    least_B = np.sort(pre_BF, axis=1)[:, -k, None]
    return np.where((pre_BF >= least_B) & (pre_BF > 0), pre_BF, 0) @ p["W_dec"] + p["b_dec"]


# --- what a door has no use for ----------------------------------------------------------------------------------

# A value of every setting of a training that needs something.
VALUES: dict[str, Any] = {
    **{"max_rows": 512, "shares": 2, "neighbours": 2, "block_chunks": 8, "blocks_ahead": 2},
    **{"validate_every": 5, "validate_epochs": 0.5, "early_stop_patience": 2, "keep_best": "val/fve"},
    **{"tensorboard": True, "profile": True},
    **{"checkpoint_every": 5, "keep_every": 5, "keep_checkpoints": 1},
    **{"through": "kl"},
}


def needing(*needs: str) -> list[str]:
    return [key for key, known in settings_of(TrainConfig).items() if not set(needs).isdisjoint(known.needs)]


def test_every_setting_that_needs_something_is_tried() -> None:
    assert VALUES.keys() == {key for key, known in settings_of(TrainConfig).items() if known.needs}


REFUSED: list[tuple[Callable[[Experiment], None], list[str]]] = [
    (given, needing("run", "heldout", "validations", "text")),
    (iterated, needing("order", "rows", "epoch", "text")),
    (truth, needing("order", "rows", "text")),
    *((door, needing("order")) for door in (streamed, streamed_sweep, streamed_plan)),
]


@pytest.mark.parametrize(("door", "key"), [(door, key) for door, keys in REFUSED for key in keys])
def test_what_would_do_nothing_is_refused_by_name(
    seen: Seen, folder: Path, tmp_path: Path, door: Callable[[Experiment], None], key: str
) -> None:
    e = replaced(of_door(folder, tmp_path), "train", **{key: VALUES[key]})
    e = dataclasses.replace(e, hook_point="") if door is truth else e
    with pytest.raises(ConfigError, match=rf"train\.{key}=.*set it to ") as refused:
        door(e)
    assert "\n" not in str(refused.value)
    assert not seen.coders and not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".json"]


@pytest.mark.parametrize("door", [truth, iterated, streamed])
def test_a_contrast_of_neighbours_is_refused_where_there_are_none(
    seen: Seen, folder: Path, tmp_path: Path, door: Callable[[Experiment], None]
) -> None:
    e = for_door(door.__name__, of_door(folder, tmp_path, coder={"preset": "temporal"}))
    with pytest.raises(ConfigError, match=r"coder\.contrastive_coefficient=.* needs a store.*set it to 0.0"):
        door(e)
    assert not seen.coders


@pytest.mark.parametrize("key", ["hook_point", "reads", "writes"])
def test_planted_activations_have_one_hook_point(folder: Path, tmp_path: Path, key: str) -> None:
    e = dataclasses.replace(of_door(folder, tmp_path), hook_point="")
    with pytest.raises(ConfigError, match=rf"{key} is .*Leave it empty"):
        run_truth(dataclasses.replace(e, **{key: "h" if key == "hook_point" else ("h",)}))


@pytest.mark.parametrize(("section", "key", "value"), [("parallel", "fsdp", True), ("train", "profile", True)])
def test_a_sweep_refuses_what_is_for_one_coder(
    folder: Path, tmp_path: Path, section: str, key: str, value: Any
) -> None:
    e = replaced(of_door(folder, tmp_path), section, **{key: value})
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        sweep(e)


# --- no setting is forgotten -------------------------------------------------------------------------------------


# Who checks, compares or writes down all settings.
OF_ALL = re.compile(r"(core/\w+|dataclasses|training/config|fit/trainable|tiny/doors|test_doors)\.py$")


@pytest.mark.parametrize("door", ["saejax.train", "saejax.train(run=)", "sweep", "truth"])
def test_a_door_reads_what_the_stage_reads_or_refuses_it(
    seen: Seen, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """A setting that nobody looks at before the training begins does nothing to its data."""
    read: set[str] = set()
    keys, found = set(settings_of(TrainConfig)), object.__getattribute__

    def asked(self: TrainConfig, name: str) -> Any:
        if name in keys and not OF_ALL.search(sys._getframe(1).f_code.co_filename):
            read.add(name)
        return found(self, name)

    def reads(name: str) -> set[str]:
        read.clear()
        through(name, for_door(name, of_door(folder, tmp_path / name)))
        return set(read)

    monkeypatch.setattr(TrainConfig, "__getattribute__", asked)
    left = reads("stage") - reads(door)
    refused = {
        "saejax.train": needing("run", "heldout", "validations", "text"),
        "saejax.train(run=)": needing("text"),
        "truth": needing("order", "rows", "text"),
    }
    # The step itself looks at `accumulate`.
    assert left - {"accumulate"} <= set(refused.get(door, ())), left


# --- begun runs --------------------------------------------------------------------------------------------------


def test_a_latent_dies_in_a_short_training_and_the_run_says_when(folder: Path, tmp_path: Path) -> None:
    e = of_door(folder, tmp_path, coder={"k": 1, "d_sae": 256})
    given(e, run=True, log_every=5)
    recorded = read_json(e.run_dir / "config.json")["coder"]["dead_after_tokens"]
    with Checkpoints(e.run_dir / "checkpoints") as checkpoints:
        said = checkpoints.restore_numpy(40, names=())[1]["dead_after_tokens"]
    assert recorded == said == round(0.003 * 40 * 128)
    assert any(row.get("train/dead", 0) > 0 for row in read_metrics(e.run_dir / "metrics.jsonl"))
