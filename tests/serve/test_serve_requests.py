"""What requests become: checked experiments, of places below the server's folders alone."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tiny import planted_store

from saejax.app import experiments
from saejax.app.experiment import Experiment, experiment, to_run_json
from saejax.app.new_experiment import as_file
from saejax.core.config import to_config_dict
from saejax.core.errors import ConfigError, DataError, SaejaxError
from saejax.core.files import write_json
from saejax.serve.jobs.activations import training
from saejax.serve.jobs.experiments import flat, requested
from saejax.serve.jobs.requests import ExperimentBody, TrainBody
from saejax.serve.problems import Problem
from saejax.serve.site import Folders, Site
from saejax.store import StoreLayout, StoreWriter

ROWS = 5000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A server's folders: runs/known, two stores, files in data/, and what lies outside."""
    folder = tmp_path_factory.mktemp("requests")
    data = folder / "data"
    for one in ("runs", "stores", "data/many", "data/mixed", "outside"):
        (folder / one).mkdir(parents=True)
    (folder / "outside" / "secret.npy").write_bytes(b"secret")
    (data / "link").symlink_to(folder / "outside")
    (data / "text.txt").write_text("text")
    np.save(data / "x.npy", np.ones((ROWS, 4), np.float32))
    for name in ("a", "b"):
        np.save(data / "many" / f"{name}.npy", np.ones((100, 4), np.float32))
    (data / "mixed" / "a.npy").touch()
    (data / "mixed" / "a.parquet").touch()
    planted_store(folder / "stores" / "planted" / "train", rows=1024)
    planted_store(folder / "stores" / "planted" / "heldout", rows=256, seed=1)
    planted_store(data / "elsewhere" / "train", rows=512)
    known = Experiment(name="known", store="planted", runs_dir="runs", stores_dir="stores", hook_point="h")
    known = dataclasses.replace(
        known,
        text=dataclasses.replace(known.text, source="files", paths=("/big/corpus",)),
        train=dataclasses.replace(known.train, init_from="../old"),
    )
    write_json(folder / "runs" / "known" / "config.json", to_run_json(known))
    mine = folder / "mine.py"
    mine.write_text(as_file(to_config_dict(dataclasses.replace(Experiment(), name="mine")), "Mine.", "saejax train"))
    bad = folder / "bad.py"
    bad.write_text("def get_config(preset=''):\n    raise RuntimeError('no')\n")
    shipped = {name: experiments.folder() / f"{name}.py" for name in experiments.names()}
    return Site(Folders(folder / "runs", folder / "stores", (data,)), shipped | {"mine": mine, "bad": bad})


def above(site: Site) -> Path:
    return site.folders.runs.parent


def mine(config: dict[str, Any]) -> ExperimentBody:
    return ExperimentBody(experiment="mine", config=config)


def activations(layer: int, path: str, **fields: Any) -> TrainBody:
    return TrainBody(layer_idx=layer, activation_data_path=path, **fields)


def asked(site: Site, **config: Any) -> Experiment:
    return requested(
        site,
        ExperimentBody(
            experiment="quickstart", preset="tiny", config={k.replace("__", "."): v for k, v in config.items()}
        ),
    )


# --- experiments ---------------------------------------------------------------------------------------------------


def test_an_experiment_with_a_preset_and_keys(site: Site) -> None:
    e = asked(site, name="mine", train__lr=1e-4, coder__k=7, capture__hook_points=["blocks.1.resid_post"])
    assert (e.name, e.train.lr, e.coder.k) == ("mine", 1e-4, 7)
    assert e.capture.hook_points == ("blocks.1.resid_post",)
    assert e.train.batch_size == 512, "what the preset says"
    assert e.run_dir == site.folders.runs / "mine" and e.stores_dir == str(site.folders.stores)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train.lrr", 1.0, "Did you mean 'lr'"),
        ("trian.lr", 1.0, "Unknown key config.trian.*Did you mean 'train'"),
        ("train.lr.x", 1.0, "Unknown key config.train.lr"),
        ("train", {"lr": 1.0}, "is a section"),
        ("train.lr", "fast", "must be float"),
        ("train.lr", -1.0, "train.lr is -1.0"),
        ("train.lr", 1e400, "finite"),
        ("coder.k", 1.5, "must be int"),
        ("coder.preset", "topkk", "Did you mean 'topk'"),
        ("train.tensorboard", "yes", "must be bool"),
        ("", 1, "Unknown key"),
        ("runs_dir", "/tmp", "the server's own"),
        ("stores_dir", "/tmp", "the server's own"),
        ("name", "../up", "one folder"),
        ("name", ".serve", "must not begin"),
        ("name", "@gemma", "must not begin"),
        ("store", ".hidden", "must not begin"),
        ("name", "a\x00b", "control characters"),
    ],
)
def test_what_no_setting_can_be_is_refused_with_the_nearest(site: Site, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        requested(site, ExperimentBody(experiment="quickstart", config={key: value}))


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        (ExperimentBody(experiment="quikstart"), ConfigError, "Did you mean 'quickstart'"),
        (ExperimentBody(experiment="quickstart", preset="tyny"), ConfigError, "Did you mean 'tiny'"),
        (ExperimentBody(experiment="mine", preset="x"), ConfigError, "has no preset"),
        (ExperimentBody(experiment="bad"), ConfigError, "RuntimeError"),
        (ExperimentBody(), ConfigError, "one of them"),
        (ExperimentBody(experiment="quickstart", run="known"), ConfigError, "one of them"),
        (ExperimentBody(run="known", preset="tiny"), ConfigError, "no presets"),
        (ExperimentBody(run="nowhere"), Problem, "no run"),
        (ExperimentBody(run="../outside"), Problem, "no run"),
        (ExperimentBody(experiment="/etc/passwd"), ConfigError, "no experiment"),
    ],
)
def test_only_known_beginnings(site: Site, asked: ExperimentBody, kind: type[SaejaxError], said: str) -> None:
    with pytest.raises(kind, match=said):
        requested(site, asked)


def test_a_run_goes_on_as_it_was_and_a_new_one_from_it_keeps_its_store(site: Site) -> None:
    e = requested(site, ExperimentBody(run="known"))
    assert e.run_dir == site.folders.runs / "known" and e.stores_dir == str(site.folders.stores)
    # What the run's own record names is not the request's: it stays, also where the form sends it back.
    same = requested(site, ExperimentBody(run="known", config=_without_own(flat(e))))
    assert same == e and same.text.paths == ("/big/corpus",) and same.train.init_from == "../old"
    new = requested(site, ExperimentBody(run="known", config={"name": "again", "train.lr": 1e-5}))
    assert (new.name, new.store, new.train.lr) == ("again", "planted", 1e-5)


def _without_own(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ("runs_dir", "stores_dir")}


def test_another_preset_takes_its_own_values_along(site: Site) -> None:
    """config.json of a run holds what its preset gave: sparsity=topk must not stay behind with preset=jumprelu."""
    e = requested(site, ExperimentBody(run="known", config={"name": "other", "coder.preset": "jumprelu"}))
    assert e.coder.resolved().sparsity == "jumprelu"
    kept = requested(site, ExperimentBody(run="known", config={"name": "other", "coder.d_sae": 99}))
    assert kept.coder.resolved().sparsity == "topk" and kept.coder.d_sae == 99


# --- places --------------------------------------------------------------------------------------------------------

OUTSIDE: list[Callable[[Path], str]] = [
    lambda above: "/etc/passwd",
    lambda above: "/",
    lambda above: "../outside",
    lambda above: f"{above}/data/../outside",
    lambda above: f"{above}/outside",
    lambda above: f"{above}/data/link/secret.npy",
    lambda above: f"{above}/data/link",
    lambda above: "~/secret",
    lambda above: "~root",
    lambda above: "file:///etc/passwd",
    lambda above: "s3://bucket/x",
    lambda above: "gs://bucket/x",
    lambda above: "https://example.org/x",
    lambda above: "hf://../../etc/passwd",
    lambda above: f"{above}/data/*",
    lambda above: f"{above}/runs/.serve/token",
    lambda above: "a\x00b",
]
PLACES = [
    "lm.model",
    "lm.second",
    "lm.adapter",
    "prefix.second",
    "train.init_from",
    "text.paths",
    "study.dictionaries",
    "study.behaviours",
    "text.dataset",
    "probes.data",
    "truth.source",
]


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("place", OUTSIDE, ids=lambda place: place(Path("above")))
def test_no_setting_reads_outside_of_the_given_folders(site: Site, key: str, place: Callable[[Path], str]) -> None:
    text = place(above(site))
    value: Any = {"text.paths": [text], "study.dictionaries": [text], "study.behaviours": [f"x={text}"]}.get(key, text)
    with pytest.raises(ConfigError, match=f"^{key} is"):
        requested(
            site,
            ExperimentBody(
                experiment="mine", config={key: value, "text.source": "files" if key == "text.paths" else "stdlib"}
            ),
        )


def test_no_source_of_a_mixture_reads_outside(site: Site) -> None:
    sources = [{"source": "stdlib"}, {"source": "files", "paths": ["/etc"]}]
    with pytest.raises(ConfigError, match=r"^text.sources.paths is '/etc'"):
        requested(site, mine({"text.sources": sources}))
    with pytest.raises(ConfigError, match=r"^text.sources.dataset"):
        requested(site, mine({"text.sources": [{"source": "hub", "dataset": "/etc"}]}))


def test_every_setting_that_names_a_place_is_marked(site: Site) -> None:
    """A new setting of this kind must be marked too: these words in its documentation say that it may be one."""
    from saejax.app.keys import sections

    keys = [key for section in sections() for key in section.keys]
    assert {key.name for key in keys if key.known.place} == set(PLACES)
    words = ("folder", "path", "file")
    exempt = {"name", "store", "runs_dir", "stores_dir", "text.sources"}
    exempt |= {"text.source", "text.column", "text.prepend_bos", "train.profile", "prefix.source"}
    for key in keys:
        says = key.type.endswith("str") and any(word in key.known.doc for word in words)
        assert not says or key.known.place or key.name in exempt, f"{key.name}: does it name a file?"


def test_given_folders_and_ids_of_the_hub_are_allowed(site: Site) -> None:
    data = site.folders.data[0]
    e = requested(
        site,
        ExperimentBody(
            experiment="mine",
            config={
                "lm.model": "openai-community/gpt2",
                "lm.second": str(data),
                "train.init_from": "hf://owner/name@main/sub",
                "text.source": "files",
                "text.paths": [f"{data}/many/../text.txt".replace("many/../", ""), str(data / "many")],
                "study.behaviours": ["bracket", f"own={data}/text.txt"],
            },
        ),
    )
    assert e.lm.model == "openai-community/gpt2" and e.lm.second == str(data)
    assert e.train.init_from == "hf://owner/name@main/sub"
    assert e.text.paths == (str(data / "text.txt"), str(data / "many"))
    assert e.study.behaviours == ("bracket", f"own={data}/text.txt")


def test_an_id_of_the_hub_is_a_path_where_one_is_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(above(site))
    with pytest.raises(ConfigError, match="lies below none"):
        requested(site, mine({"lm.model": "outside/secret.npy"}))
    assert requested(site, mine({"lm.model": "data/many"})).lm.model == str(site.folders.data[0] / "many")


# --- the file ------------------------------------------------------------------------------------------------------

HOSTILE = ['"""\nimport os\nos.mkdir("ran")\n"""', "'; import os; '", "\\", "\n", "{}", "é\u2028", "\x1b]0;x\x07"]


@pytest.mark.parametrize("text", HOSTILE, ids=repr)
def test_no_value_becomes_code(site: Site, text: str, tmp_path: Path) -> None:
    e = requested(site, mine({"text.column": text, "text.template": text * 3, "lm.device": text}))
    source = as_file(to_config_dict(e), "What a job runs.", "saejax train")
    tree = ast.parse(source)
    assert [type(node).__name__ for node in tree.body] == ["Expr", "ImportFrom", "ImportFrom", "FunctionDef"]
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert called == ["default_config"]
    (tmp_path / "experiment.py").write_text(source, encoding="utf-8")
    assert experiment(experiments.settings(experiments.load(tmp_path / "experiment.py"))) == e


# --- /api/sae/train ------------------------------------------------------------------------------------------------


def test_the_fields_of_others_become_ours(site: Site) -> None:
    body = TrainBody(
        layer_idx=6,
        activation_data_path="planted",
        hook_point="h",
        latent_dim=128,
        batch_size=64,
        accumulate_grad_batches=2,
        max_samples=512,
        max_epochs=3,
        learning_rate=2e-4,
        early_stopping_patience=4,
        val_check_interval=0.5,
        num_workers=3,
        sparsity=8,
        name="mine",
        config={"train.b2": 0.99},
    )
    e, before = training(site, body)
    assert before == ()
    assert (e.name, e.store, e.hook_point, e.lm.model) == ("mine", "planted", "h", "")
    assert (e.coder.d_sae, e.coder.k, e.coder.preset) == (128, 8, "topk")
    t = e.train
    assert (t.batch_size, t.accumulate, t.max_rows, t.tokens) == (128, 2, 512, 3 * 512)
    assert (t.lr, t.b2, t.early_stop_patience, t.validate_epochs, t.blocks_ahead) == (2e-4, 0.99, 4, 0.5, 3)


@pytest.mark.parametrize("path", ["planted", "stores/planted", "planted/train", "stores/planted/train"])
def test_a_store_by_its_names(site: Site, path: str) -> None:
    e, before = training(site, activations(0, path, hook_point="h"))
    assert (e.store, before, e.stores_dir) == ("planted", (), str(site.folders.stores))
    assert e.name == "planted-1"


def test_a_store_in_another_given_folder(site: Site) -> None:
    e, _ = training(site, activations(0, str(site.folders.data[0] / "elsewhere"), hook_point="h"))
    assert e.store_dir("train") == str(site.folders.data[0] / "elsewhere" / "train")
    assert e.run_dir.parent == site.folders.runs and e.train.validate_every == 0


def test_files_are_imported_first_and_once(site: Site) -> None:
    data = site.folders.data[0]
    e, ((store, verb, out, *words),) = training(site, activations(6, str(data / "x.npy")))
    assert (store, verb, words) == ("store", "import", [str(data / "x.npy"), "--hook_point=blocks.6.resid_post"])
    assert out == e.store_dir("train") and e.hook_point == "blocks.6.resid_post"
    assert e.train.tokens == 10 * ROWS and e.train.validate_every == 0
    again, _ = training(site, activations(6, str(data / "x.npy"), name="second"))
    assert again.store == e.store
    other, _ = training(site, activations(7, str(data / "x.npy")))
    assert other.store != e.store, "its hook point has another name"
    _, before = training(site, activations(6, str(data / "many"), heldout_data_path=str(data / "x.npy")))
    assert [words[3:-1] for words in before] == [
        (str(data / "many/a.npy"), str(data / "many/b.npy")),
        (str(data / "x.npy"),),
    ]


def test_the_fast_values_as_far_as_the_activations_allow(site: Site) -> None:
    e, _ = training(site, activations(6, str(site.folders.data[0] / "x.npy")), fast=True)
    assert (e.coder.d_sae, e.train.lr, e.coder.matmul_dtype) == (8192, 2e-3, "bfloat16")
    assert (e.train.batch_size, e.train.tokens, e.train.max_rows) == (1024, 50 * ROWS, 0)
    assert e.train.early_stop_patience == 0, "there is nothing held out"
    e, _ = training(site, activations(0, "planted", hook_point="h", latent_dim=64, max_epochs=2), fast=True)
    assert (e.coder.d_sae, e.train.tokens) == (64, 2 * 1024)
    assert (e.train.batch_size, e.train.early_stop_patience, e.train.validate_epochs) == (256, 5, 0.25)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"activation_data_path": "/etc/passwd"}, "lies below none"),
        ({"activation_data_path": "../outside/secret.npy"}, r"without '\.\.'"),
        ({"activation_data_path": "s3://bucket/x.npy"}, "no other URL"),
        ({"activation_data_path": "LINK"}, "lies below none"),
        ({"activation_data_path": "TEXT"}, "neither a store nor a file that ends in"),
        ({"activation_data_path": "MIXED"}, "several kinds"),
        ({"activation_data_path": "MISSING"}, "does not exist"),
        ({"activation_data_path": "planted/heldout"}, "lies below none|no training split"),
        ({"activation_data_path": "stores/planted/train/../../../outside"}, r"without '\.\.'"),
        ({"heldout_data_path": "planted"}, "leave heldout_data_path away"),
        ({"hook_point": ""}, "layer_idx is 6; the store has h"),
        ({"hook_point": "x"}, "the store has h"),
        ({"batch_size": 4096}, "more than the 1,024 activations"),
        ({"accumulate_grad_batches": 2, "gradient_accumulation_steps": 3}, "the same"),
        ({"sparsity": "jumprelu", "preset": "topk"}, "one of them"),
        ({"sparsity": 8, "preset": "jumprelu"}, "keeps no k"),
        ({"name": "../up"}, "one folder"),
        ({"config": {"runs_dir": "/tmp"}}, "server's own"),
        ({"config": {"lm.model": "/etc"}}, "lm.model is '/etc'"),
    ],
)
def test_trainings_that_cannot_be(site: Site, fields: dict[str, Any], said: str) -> None:
    data = site.folders.data[0]
    short = {"LINK": data / "link" / "secret.npy", "TEXT": data / "text.txt", "MIXED": data / "mixed"}
    short["MISSING"] = data / "none.npy"
    path = fields.get("activation_data_path", "planted")
    given = {"hook_point": "h"} | fields | {"activation_data_path": str(short.get(path, path))}
    with pytest.raises(ConfigError, match=said):
        training(site, TrainBody(layer_idx=6, **given))


def test_a_captured_store_needs_the_model_and_text_it_was_captured_with(site: Site) -> None:
    path = site.folders.stores / "captured" / "train"
    points = {"blocks.1.resid_post": 4, "blocks.2.resid_post": 4, "blocks.2.mlp_out": 4}
    tokens = {name: np.zeros(64, np.int32) for name in ("token_id", "document", "position")}
    layout = StoreLayout(shard_rows=64, chunk_rows=64)
    identity = {"lm": {"model": "owner/name"}}
    with StoreWriter.open(path, identity=identity, hook_points=points, n_tokens=64, layout=layout) as writer:
        writer.append({name: np.ones((64, 4), np.float32) for name in points}, tokens, cursor={})
        writer.finish()
    with pytest.raises(ConfigError, match="no run here says of which model"):
        training(site, activations(1, "captured", batch_size=16))
    known = Experiment(name="old", store="captured", train=dataclasses.replace(Experiment().train, lr=0.5))
    known = dataclasses.replace(known, lm=dataclasses.replace(known.lm, model="owner/name"))
    write_json(site.folders.runs / "old" / "config.json", to_run_json(known))
    e, _ = training(site, activations(1, "captured", batch_size=16))
    assert (e.lm.model, e.hook_point, e.name, e.train.lr) == ("owner/name", "blocks.1.resid_post", "captured-1", 1e-3)
    with pytest.raises(ConfigError, match=r"say which: hook_point"):
        training(site, activations(2, "captured", batch_size=16))
    with pytest.raises(ConfigError, match=r"layer_idx is 3; the store has blocks\.1"):
        training(site, activations(3, "captured", batch_size=16))
    e, _ = training(
        site,
        TrainBody(
            layer_idx=0,
            activation_data_path="captured",
            batch_size=16,
            experiment="gpt2_small",
            hook_point="blocks.2.mlp_out",
        ),
    )
    assert e.lm.model == "openai-community/gpt2"


def test_stopping_early_needs_something_held_out(site: Site) -> None:
    with pytest.raises(ConfigError, match="give heldout_data_path"):
        training(site, activations(6, str(site.folders.data[0] / "x.npy"), early_stopping_patience=3))


def test_a_file_that_is_none_is_refused_before_a_job_is_made(site: Site) -> None:
    (site.folders.data[0] / "broken.npy").write_bytes(b"\x93NUMPY rubbish")
    with pytest.raises(DataError, match=r"broken\.npy is no readable"):
        training(site, activations(6, str(site.folders.data[0] / "broken.npy")))


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_idx": -1},
        {"layer_idx": 6, "epochs": 3},
        {"layer_idx": 6, "max_epochs": 0},
        {"layer_idx": 6, "batch_size": 1},
        {"layer_idx": 6, "latent_dim": 1 << 40},
        {"layer_idx": 6, "learning_rate": float("nan")},
        {"layer_idx": 6, "num_workers": 10_000},
        {"layer_idx": 6, "name": "a" * 2000},
        {"layer_idx": 6, "config": {str(i): i for i in range(501)}},
    ],
)
def test_bodies_are_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainBody(activation_data_path="x", **fields)
