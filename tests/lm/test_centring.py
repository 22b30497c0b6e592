"""`center_writing_weights`: its definition at every hook point; no dictionary meets the other kind of model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import tiny_experiment
from tiny.decoders import saved
from tiny.families import MODELS, random_model

import saejax
from saejax.app import pretrained
from saejax.app.run_coders import model_config
from saejax.app.stages import run_capture, run_evaluate, run_train
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, DataError
from saejax.interop.table import examples
from saejax.lm import LanguageModel, LMConfig
from saejax.lm.pair import ModelPair, load_models
from saejax.plans.models import shapes_of
from saejax.trained import TrainedCoder

INSIDE = ("attn_z", "mlp_act", "mlp_in")
LAYERNORM = [name for name in MODELS if name.startswith(("gpt_neox", "phi"))]


def compare(plain: LanguageModel, centred: LanguageModel) -> None:
    """Both on the same tokens, against the definition in float64."""
    points = list(plain.hook_points())
    tokens = np.random.default_rng(0).integers(plain.config.vocab_size, size=(2, 9))
    (logits, theirs), (same, ours) = (lm.run(tokens, capture=points) for lm in (plain, centred))
    np.testing.assert_allclose(same, logits, rtol=1e-4, atol=1e-4)
    for name in points:
        x = np.asarray(theirs[name], np.float64)
        wanted = x if name.endswith(INSIDE) else x - x.mean(-1, keepdims=True)
        np.testing.assert_allclose(ours[name], wanted, rtol=1e-4, atol=1e-4, err_msg=name)


def test_the_demo_model_keeps_its_logits_and_loses_its_mean() -> None:
    plain, centred = (saejax.load_lm("demo", center_writing_weights=on) for on in (False, True))
    assert plain.config.tied_embeddings and not centred.config.tied_embeddings
    compare(plain, centred)
    assert plain.identity | {"center_writing_weights": True} == centred.identity


@pytest.mark.parametrize("name", LAYERNORM)
def test_so_does_every_family_with_layernorms(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="transformers makes the models with it")
    folder = saved(random_model(name), tmp_path)
    compare(*(saejax.load_lm(folder, backend="jax", center_writing_weights=on) for on in (False, True)))


@pytest.mark.parametrize("name", ["gemma2", "llama, llama3 rope", "olmo2", "qwen3_moe"])
def test_other_norms_are_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="transformers makes the models with it")
    folder = saved(random_model(name), tmp_path)
    with pytest.raises(ConfigError, match="other norms"):
        saejax.load_lm(folder, center_writing_weights=True)


def test_a_model_in_memory_too_and_none_that_pytorch_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="this is about its modules")
    module = random_model("phi")
    compare(*(saejax.load_lm(module, backend="jax", center_writing_weights=on) for on in (False, True)))
    for model in (module, saved(module, tmp_path)):
        with pytest.raises(ConfigError, match="PyTorch runs this one"):
            saejax.load_lm(model, backend="torch", center_writing_weights=True)


def test_both_models_of_a_section_and_its_plan() -> None:
    wanted = LMConfig("demo", second="demo", center_writing_weights=True)
    pair = load_models(wanted)
    assert isinstance(pair, ModelPair)
    assert all(one.identity["center_writing_weights"] for one in (pair.first, pair.second))
    assert [shape.tied_embeddings for shape in shapes_of(wanted)] == [False, False]
    assert all(shape.tied_embeddings for shape in shapes_of(dataclasses.replace(wanted, center_writing_weights=False)))


def of_saelens(folder: Path, said: Any, version: str = "6.54.12") -> Path:
    """A dictionary for the demo model as SAELens would have written it, by what it says of the model's weights."""
    rows = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    settings: Any = {"k": 2, "d_sae": 8, "batch_size": 32, "tokens": 64}
    sae = saejax.train(rows, "topk", hook_point="blocks.1.resid_post", progress=False, **settings)
    sae.save(folder, format="saelens")
    config = json.loads((folder / "cfg.json").read_text())
    meta = (
        config.pop("metadata")
        | {"model_name": "demo"}
        | ({} if said is None else {"model_from_pretrained_kwargs": said})
    )
    meta |= {"sae_lens_version": version}
    if version[0] < "6":
        config = config | meta | {"architecture": "topk", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 2}}
    else:
        config["metadata"] = meta
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("version", ["6.54.12", "5.10.0"])
@pytest.mark.parametrize(
    ("said", "centring"),
    [
        (None, None), ({}, None), ({"center_writing_weights": 1}, None), ("damaged", None),
        ({"center_writing_weights": True}, True), ({"center_writing_weights": False, "fold_ln": False}, False),
    ],
    ids=str,
)  # fmt: skip
def test_what_saelens_says_decides_which_model_is_right(
    said: Any, centring: bool | None, version: str, tmp_path: Path
) -> None:
    sae = saejax.load(of_saelens(tmp_path / "sae", said, version))
    assert sae.origin.center_writing_weights is centring
    assert model_config("there", sae) == LMConfig("demo", center_writing_weights=bool(centring))
    assert model_config("there", sae, "other") == LMConfig("other", center_writing_weights=bool(centring))
    for on in (False, True):
        lm = saejax.load_lm("demo", center_writing_weights=on)
        if centring in (None, on):
            assert sae.at(lm).sites == sae.sites
        else:
            with pytest.raises(
                DataError, match=rf"with(out)? center_writing_weights.*center_writing_weights={not on}\)"
            ):
                saejax.evaluate(sae, lm, "import json\n" * 20)
    again = tmp_path / "again"
    sae.save(again, format="saelens")
    meta = json.loads((again / "cfg.json").read_text())["metadata"]
    assert meta.get("model_from_pretrained_kwargs") == ({"center_writing_weights": True} if centring else None)


TABLE = """
res-jb:
  repo_id: ann/res
  config_overrides: {model_from_pretrained_kwargs: {center_writing_weights: true}}
  saes: [{id: here}]
other:
  repo_id: ann/other
  config_overrides: {dataset_path: some/text}
  saes: [{id: here}]
"""


def test_the_table_of_saelens_says_it_for_files_that_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sae_lens"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "pretrained_saes.yaml").write_text(TABLE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pretrained, "load", lambda place: examples()[0])
    found = {name: saejax.from_pretrained(name, "here").origin.center_writing_weights for name in ("res-jb", "other")}
    assert found == {"res-jb": True, "other": None}


def test_a_run_remembers_its_model(tmp_path: Path) -> None:
    work = Workspace(tiny_experiment(tmp_path, lm={"center_writing_weights": True}))
    run_capture(work)
    assert run_train(work) == 0
    sae = saejax.load(work.experiment.run_dir)
    assert isinstance(sae, TrainedCoder) and sae.origin.center_writing_weights is True
    run_evaluate(work)
    with pytest.raises(DataError, match="was trained on a model with center_writing_weights"):
        sae.at(saejax.load_lm("demo"))
    sae.save(tmp_path / "saved")
    assert saejax.load(tmp_path / "saved").origin == sae.origin
