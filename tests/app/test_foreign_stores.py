"""Training on stores that a merge or an import made, with the language model at hand and without one."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import planted_experiment, planted_store, replaced, tiny_experiment

import saejax
from saejax.app.experiment import Experiment, from_json
from saejax.app.stages import run_capture, run_evaluate, run_train
from saejax.app.sweep.config import SweepConfig
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json
from saejax.store import ImportConfig, StoreLayout, StoreReader, import_files, merge

HOOK = "blocks.1.resid_post"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A capture of the demo model."""
    e = tiny_experiment(tmp_path_factory.mktemp("captured"))
    run_capture(Workspace(e))
    return e


def short(e: Experiment, **top: Any) -> Experiment:
    return replaced(dataclasses.replace(e, **top), "train", tokens=10 * 128)


def imported(
    folder: Path, e: Experiment, model: str, width: int = 128, split: str = "train", hook_point: str = HOOK
) -> Experiment:
    """The captured activations as a file of someone else's, and an experiment on their store."""
    reader = StoreReader.open(e.store_dir("train"), [HOOK])
    np.save(folder / "acts.npy", reader.rows(0, 2000)[HOOK].astype(np.float32)[:, :width])
    config = ImportConfig(hook_point, model=model, layout=StoreLayout(1024, 64))
    import_files(folder / "stores/theirs" / split, [folder / "acts.npy"], config)
    return short(e, name="theirs", store="theirs", stores_dir=str(folder / "stores"), runs_dir=str(folder / "runs"))


def test_without_a_model_an_imported_store_is_trained_on(
    captured: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e = replaced(imported(tmp_path, captured, model=""), "lm", model="")
    run_capture(Workspace(e))
    assert run_train(Workspace(e)) == 0
    said = capsys.readouterr().out
    assert "is imported and taken as it is" in said and "nothing is validated" in said
    sae = saejax.load(e.run_dir)
    assert sae.hook_point == HOOK and sae.params["W_enc"].shape == (128, 256)
    with pytest.raises(ConfigError, match=r"lm\.model is empty, and this needs the language model"):
        run_evaluate(Workspace(e))
    with pytest.raises(ConfigError, match=r"no hook point .blocks\.1\.resid_pos."):
        Workspace(dataclasses.replace(e, hook_point="blocks.1.resid_pos")).build()
    for key, value in (("early_stop_patience", 3), ("keep_best", "val/fve")):
        new = replaced(dataclasses.replace(e, name="new"), "train", **{key: value})
        with pytest.raises(ConfigError, match=rf"train.{key} needs held-out .*saejax store import .*theirs/heldout"):
            run_train(Workspace(new))
        assert not (new.run_dir / "config.json").exists()


def test_with_its_model_an_imported_store_is_also_validated_and_evaluated(captured: Experiment, tmp_path: Path) -> None:
    e = imported(tmp_path, captured, model="demo")
    run_capture(Workspace(e))  # the held-out text alone
    assert StoreReader.open(e.store_dir("heldout")).n_tokens == e.capture.heldout_tokens
    assert run_train(Workspace(e)) == 0
    assert "val/fve" in (e.run_dir / "metrics.jsonl").read_text()
    run_evaluate(Workspace(e))
    assert (e.run_dir / "eval.json").is_file()


@pytest.mark.ci
def test_a_merged_store_is_trained_on_and_another_model_s_refused(captured: Experiment, tmp_path: Path) -> None:
    again = dataclasses.replace(captured, seed=1, store="again")
    run_capture(Workspace(again))
    stores = tmp_path / "stores"
    for split in ("train", "heldout"):
        merge(stores / "both" / split, [captured.store_dir(split), again.store_dir(split)])
    e = short(captured, name="both", store="both", stores_dir=str(stores), runs_dir=str(tmp_path / "runs"))
    run_capture(Workspace(e))
    work = Workspace(e)
    assert run_train(work) == 0
    assert work.reader("train").n_tokens == 2 * captured.capture.tokens
    other = imported(tmp_path, captured, model="gpt2")
    with pytest.raises(DataError, match="holds something else than expected"):
        run_train(Workspace(other))


def test_without_a_model_a_captured_store_or_none_is_refused(captured: Experiment, tmp_path: Path) -> None:
    for stores_dir in (captured.stores_dir, str(tmp_path)):
        e = replaced(short(captured, name="new", stores_dir=stores_dir), "lm", model="")
        with pytest.raises(ConfigError, match="is no imported or merged store"):
            run_train(Workspace(e))


def test_a_store_that_lies_there_is_no_matter_to_a_stream(captured: Experiment, tmp_path: Path) -> None:
    e = replaced(imported(tmp_path, captured, model="demo"), "capture", into="training")
    assert Workspace(e).origin("train") is None
    elsewhere = dataclasses.replace(e, hook_point="blocks.0.mlp_out")  # captured, and not in the imported store
    assert Workspace(elsewhere).sites == (("blocks.0.mlp_out",), ("blocks.0.mlp_out",))


def test_the_model_loads_where_the_training_s_devices_are_not(captured: Experiment) -> None:
    assert Workspace(replaced(captured, "parallel", mesh=(99, 1))).lm.params
    with pytest.raises(ConfigError, match="needs 198 devices"):
        Workspace(replaced(captured, "parallel", mesh=(99, 2))).build()


# --- a model that comes later, and one that does not fit --------------------------------------------------------------


@pytest.fixture(scope="module")
def without_model(captured: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A run on an imported store that names its model, trained without it; TransformerLens's name of the hook point."""
    folder = tmp_path_factory.mktemp("without-model")
    name = "blocks.1.hook_resid_post"
    e = replaced(imported(folder, captured, model="demo", hook_point=name), "lm", model="")
    assert run_train(Workspace(e)) == 0
    return e


def test_a_run_without_a_model_is_evaluated_with_one_later(
    without_model: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e = dataclasses.replace(without_model, runs_dir=str(tmp_path))
    shutil.copytree(without_model.run_dir, e.run_dir)
    named = replaced(e, "lm", model="demo")
    run_evaluate(Workspace(named))
    assert json.loads((e.run_dir / "eval.json").read_text())["metrics"]["relative_error"] < 0.8
    assert run_train(Workspace(named)) == 0
    assert f"{e.run_dir} did not record what it was made from (text)" in capsys.readouterr().out
    recorded = json.loads((e.run_dir / "provenance.json").read_text())
    assert recorded["lm"] == Workspace(named).lm.identity and recorded["text"]["source"] == "stdlib"
    for other in (replaced(named, "text", context_length=32), replaced(named, "train", lr=0.5)):
        with pytest.raises(DataError, match="another configuration"):
            run_evaluate(Workspace(other), redo=True)
    # The model is the run's from now on, weights and all.
    with pytest.raises(DataError, match=r"lm\.dtype: 'float32' -> 'bfloat16'"):
        run_evaluate(Workspace(replaced(named, "lm", dtype="bfloat16")), redo=True)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({"model": "gpt2"}, r"lm\.model: 'gpt2' -> 'demo'"),
        pytest.param(
            *({"model": "", "width": 96}, r"is 96 wide at blocks\.1\.resid_post, the model demo 128"),
            marks=pytest.mark.ci,
        ),
        pytest.param(
            *({"model": "", "hook_point": "blocks.9.resid_post"}, r"no hook point 'blocks\.9\.resid_post'"),
            marks=pytest.mark.ci,
        ),
    ],
)
def test_a_model_that_the_run_is_not_of_is_refused_later(
    captured: Experiment, tmp_path: Path, store: dict[str, Any], message: str
) -> None:
    e = replaced(imported(tmp_path, captured, **store), "lm", model="")
    assert run_train(Workspace(replaced(e, "train", tokens=128))) == 0
    named = replaced(replaced(e, "train", tokens=128), "lm", model="demo")
    with pytest.raises((ConfigError, DataError), match=message):
        run_evaluate(Workspace(named))
    assert not (e.run_dir / "eval.json").exists()


@pytest.mark.parametrize(
    ("model", "widths", "message"),
    [
        ("demo", {"train": 96}, r"theirs/train is 96 wide at {}, the model demo 128"),
        ("demo", {"train": 128, "heldout": 96}, r"theirs/heldout is 96 wide at {}, the model demo 128"),
        ("", {"train": 96, "heldout": 128}, r"theirs/heldout is 128 wide at {}, the store .*theirs/train 96"),
    ],
)
def test_a_store_of_another_width_is_refused_before_anything_is_written(
    captured: Experiment, tmp_path: Path, model: str, widths: dict[str, int], message: str
) -> None:
    """Also a store that does not say which model it comes from."""
    for split, width in widths.items():
        e = replaced(imported(tmp_path, captured, model="", width=width, split=split), "lm", model=model)
    with pytest.raises(DataError, match=message.format(HOOK)):
        run_train(Workspace(e))
    assert not (e.run_dir / "config.json").exists()


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_a_sweep_takes_a_store_without_its_model(tmp_path: Path) -> None:
    e = planted_experiment(tmp_path, "sweep", tokens=4 * 128)
    e = dataclasses.replace(e, sweep=SweepConfig(seeds=(0, 1)))
    shutil.move(Path(e.store_dir("heldout")), tmp_path / "heldout")
    with pytest.raises(ConfigError, match=r"sweep .*held-out.*saejax store import .*planted/heldout"):
        run_sweep(Workspace(e))
    assert not e.run_dir.exists()
    shutil.move(tmp_path / "heldout", Path(e.store_dir("heldout")))
    assert run_sweep(Workspace(e)) == 0
    assert saejax.load(e.run_dir / "seed1").params["W_enc"].shape == (16, 64)
    # The sweep, and every member, is of these activations alone.
    planted_store(tmp_path / "stores" / "other" / "train", seed=7)
    other = dataclasses.replace(e, store="other")
    with pytest.raises(DataError, match=r"made from something else:\n  train: .*planted/train .*other/train"):
        run_sweep(Workspace(other))
    member = dataclasses.replace(from_json(read_json(e.run_dir / "seed1" / "config.json")), store="other")
    with pytest.raises(DataError, match=r"made from something else:\n  train: .*planted/train .*other/train"):
        run_train(Workspace(member))
