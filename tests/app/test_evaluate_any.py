"""`saejax evaluate --sae`: dictionaries from anywhere on one text, without a store and without a training."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import one_device, planted_experiment, replaced, tiny_experiment
from tiny.commands import run_command
from tiny.endpoint import stand_in

import saejax
from saejax.analysis.endpoint import Endpoint
from saejax.app.dictionaries import dictionaries
from saejax.app.experiment import Experiment
from saejax.app.explain import run_explain
from saejax.app.run_coders import experiment_of
from saejax.app.stages import run_capture, run_dictionaries, run_evaluate, run_train
from saejax.app.workspace import Workspace
from saejax.coders import TOPOLOGIES
from saejax.core.errors import ConfigError, DataError
from saejax.evals import OF_TRAINING
from saejax.reports import render
from saejax.reports.feature_table import read_features
from saejax.trained import Origin, TrainedCoder

# Bars that a training of seconds clears.
PASSED = {"relative_error": 1.0, "loss_recovered": 0.0, "zero_fraction": 0.5, "gram_rms": 0.9}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `tiny`, evaluated, and `saved`, the same coder as a saved folder."""
    folder = tmp_path_factory.mktemp("any")
    work = Workspace(tiny_experiment(folder, gates=PASSED))
    run_capture(work)
    assert run_train(work) == 0
    run_evaluate(work)
    saejax.load(folder / "runs" / "tiny").save(folder / "saved")
    return folder


def other(folder: Path, name: str = "other", **sections: Any) -> Experiment:
    """An experiment of the same text and model below `folder`, in which nothing was captured or trained."""
    return tiny_experiment(folder, **{"gates": PASSED} | sections | {"top": {"name": name} | sections.get("top", {})})


def evaluated(e: Experiment, name: str) -> dict[str, Any]:
    return json.loads((e.run_dir / "evaluated" / name / "eval.json").read_text())


def uncentred(sae: TrainedCoder) -> TrainedCoder:
    """The transcoder from a hook point to itself that computes what an autoencoder does: its encoder sees x."""
    t, p = sae.coder.topology, {name: np.asarray(value, np.float64) for name, value in sae.params.items()}
    topology = TOPOLOGIES["transcoder"](d_in=t.d_in, d_sae=t.d_sae, d_out=t.d_in, sites=1, matmul_dtype="float32")
    params = p | {"b_enc": p["b_enc"] - p["b_dec"] @ p["W_enc"]}
    arrays = {name: value.astype(np.float32) for name, value in params.items()}
    return TrainedCoder(dataclasses.replace(sae.coder, topology=topology), arrays, sae.sites)


@pytest.mark.ci
def test_a_run_and_its_copies_have_the_figures_of_the_run_s_own_evaluation(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, e = runs / "runs" / "tiny", other(tmp_path)
    same = uncentred(saejax.load(run))
    same.save(tmp_path / "like")
    words = [f"{run},{runs / 'saved'}", str(tmp_path / "like")]
    assert run_dictionaries(Workspace(e), words, report=True) == 0
    own = json.loads((run / "eval.json").read_text())
    for name in ("tiny", "saved"):
        found = evaluated(e, name)
        assert found["metrics"] == own["metrics"] and found["density"] == own["density"], name
        assert [gate["name"] for gate in found["gates"]] == [
            gate["name"] for gate in own["gates"] if gate["name"] not in OF_TRAINING
        ]
        assert found["notes"] == [] and found["k"] == own["k"] == 8
    like = evaluated(e, "like")
    assert like["coder"] == "transcoder x topk" and like["notes"] == ["training text unknown"]
    assert like["metrics"] == pytest.approx(own["metrics"], rel=2e-3, abs=1e-4)
    assert evaluated(e, "tiny")["sha256"] == evaluated(e, "saved")["sha256"] != like["sha256"]
    # Nothing was captured, and nothing stands where a run would be.
    assert not (tmp_path / "stores").exists() and not (e.run_dir / "config.json").exists()
    folder = e.run_dir / "evaluated"
    table = (folder / "table.md").read_text()
    tables = [
        [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")]
        for part in table.split("\n## ")
    ]
    assert tables == [
        ["dictionary", "tiny", "saved", "like"],
        ["dictionary", "saved", "like"],
        ["dictionary", "tiny", "tiny", "saved"],
    ]
    assert f"{own['metrics']['loss_recovered']:.4f}" in table and f"{own['metrics']['kl']:.4f}" in table
    assert table.split("\n\n", 2)[2].strip() in capsys.readouterr().out
    assert (folder / "table.png").read_bytes().startswith(b"\x89PNG")
    assert "transcoder x topk" in (folder / "table.html").read_text()
    # The page of a dictionary has features and no training.
    page = (folder / "saved" / "report.html").read_text()
    assert '"trained":false' in page and '"skipped_gates":["loss_falls","r2"]' in page
    assert '"has_features":true' in page and str(tmp_path) not in page.split("</title>")[0]
    # Everything again: nothing is computed, and no file but the table changes.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.parent != folder}
    assert run_dictionaries(Workspace(e), words, report=True) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.parent != folder} == before
    assert len(re.findall(r": already done, .*eval\.json$", capsys.readouterr().out, re.M)) == 3


@pytest.mark.ci
def test_a_coder_that_keeps_another_number_than_in_training_is_noted(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sae, e = saejax.load(runs / "saved"), other(tmp_path)
    assert "l0_in_training" not in sae.figures  # topk is the same coder after training
    dataclasses.replace(sae, figures={"l0_in_training": 31.0}).save(tmp_path / "apart")
    dataclasses.replace(sae, figures={"l0_in_training": 8.2}).save(tmp_path / "near")
    run_dictionaries(Workspace(e), [f"{tmp_path / 'apart'},{tmp_path / 'near'}"])
    assert evaluated(e, "apart")["notes"] == ["kept 31 latents in training"] and evaluated(e, "near")["notes"] == []
    assert "keeps 8 latents for a token and kept 31 in training" in capsys.readouterr().out
    assert evaluated(e, "apart")["l0_in_training"] == 31.0


@pytest.mark.ci
def test_a_folder_of_several_with_a_bad_one_among_them(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sae, folder = saejax.load(runs / "runs" / "tiny"), tmp_path / "several"
    shutil.copytree(runs / "runs" / "tiny", folder / "run")
    sae.save(folder / "deep" / "saved")
    sae.save(folder / "theirs", format="saelens")
    sae.save(folder / "bad")
    (folder / "bad" / "coder.safetensors").write_bytes(b"broken")
    assert list(dictionaries([str(folder)])) == ["run", "bad", "saved", "theirs"]
    e = other(tmp_path)
    assert run_dictionaries(Workspace(e), [str(folder)]) == 1
    table = (e.run_dir / "evaluated" / "table.md").read_text().split("\n## ")[0]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    assert "not evaluated" in rows["bad"] and list(rows)[1:] == ["run", "bad", "saved", "theirs"]
    own, theirs = (evaluated(e, name) for name in ("run", "theirs"))
    assert theirs["metrics"] == pytest.approx(own["metrics"], rel=2e-3, abs=1e-4)
    assert theirs["notes"][0] == "training text unknown" and f"{own['metrics']['fve']:.4f}" in rows["saved"]
    assert "bad: " in table and "is not the file that was saved" in table
    assert "is not the file that was saved" in (e.run_dir / "evaluated" / "table.html").read_text()
    assert not (e.run_dir / "evaluated" / "bad").exists()
    capsys.readouterr()
    shutil.copytree(folder / "bad", folder / "bad2")
    assert run_dictionaries(Workspace(e), [str(folder / "bad"), str(folder / "bad2")]) == 1
    assert "Not one of them could be evaluated" in (e.run_dir / "evaluated" / "table.md").read_text()
    # Alone, its error is the command's.
    with pytest.raises(DataError, match="is not the file that was saved"):
        run_dictionaries(Workspace(e), [str(folder / "bad")])


@pytest.mark.ci
def test_bars_are_judged_anew_and_all_else_only_on_demand(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    e, words = other(tmp_path), [str(runs / "saved")]
    assert run_dictionaries(Workspace(e), words) == 0
    first = evaluated(e, "saved")
    strict = replaced(e, "gates", relative_error=0.0)
    assert run_dictionaries(Workspace(strict), words) == 1
    out = capsys.readouterr().out
    assert "saved: already done, " in out and "FAIL" in out and "fails relative_error" in out
    assert evaluated(e, "saved")["metrics"] == first["metrics"]
    longer = replaced(e, "eval", tokens=900)
    with pytest.raises(DataError, match=r"on\.eval\.tokens: 500 -> 900.*Pass --redo"):
        run_dictionaries(Workspace(longer), words)
    assert run_dictionaries(Workspace(longer), words, redo=True) == 0
    assert evaluated(e, "saved")["density"]["n_tokens"] >= 900 > first["density"]["n_tokens"]
    # Another dictionary of the same name is another one.
    sae = saejax.load(runs / "saved")
    changed = dataclasses.replace(sae, params=dict(sae.params) | {"b_dec": np.asarray(sae.params["b_dec"]) + 1})
    changed.save(tmp_path / "elsewhere" / "saved")
    with pytest.raises(DataError, match=r"was made from something else \(sha256: .*--redo"):
        run_dictionaries(Workspace(longer), [str(tmp_path / "elsewhere" / "saved")])


@pytest.mark.ci
def test_what_a_reader_must_know_is_noted(runs: Path, tmp_path: Path) -> None:
    sae, e = saejax.load(runs / "saved"), other(tmp_path, text={"heldout_fraction": 0.2})
    known = sae.origin
    origins: dict[str, Origin] = {
        "same": known,
        "other": dataclasses.replace(known, model="gpt2", tokenizer="0", text={"source": "files"}),
        "none": Origin(),
    }
    for name, origin in origins.items():
        dataclasses.replace(sae, origin=origin, finished=name != "none").save(tmp_path / "noted" / name)
    run_dictionaries(Workspace(e), [str(tmp_path / "noted")])
    assert evaluated(e, "same")["notes"] == ["trained on a part of this text"]
    assert evaluated(e, "other")["notes"] == ["made for gpt2", "another tokenizer", "trained on another text"]
    assert evaluated(e, "none")["notes"] == ["training unfinished, at step 0", "training text unknown"]


def test_a_dictionary_that_does_not_say_where_it_is_takes_the_hook_point_of_the_config(
    runs: Path, tmp_path: Path
) -> None:
    saejax.load(runs / "saved").save(tmp_path / "nowhere", format="saelens")
    path = tmp_path / "nowhere" / "cfg.json"
    config = json.loads(path.read_text())
    config["metadata"] = {key: value for key, value in config["metadata"].items() if "hook" not in key}
    path.write_text(json.dumps(config))
    e, words = other(tmp_path), [str(tmp_path / "nowhere")]
    with pytest.raises(DataError, match=r"does not say at which hook point it is. Say it: --config\.hook_point="):
        run_dictionaries(Workspace(e), words)
    e = other(tmp_path, top={"hook_point": "blocks.1.resid_post"})
    assert run_dictionaries(Workspace(e), words) == 0
    own = json.loads((runs / "runs" / "tiny" / "eval.json").read_text())["metrics"]
    assert evaluated(e, "nowhere")["metrics"]["fve"] == pytest.approx(own["fve"], abs=1e-4)


@pytest.mark.ci
def test_an_evaluated_dictionary_is_exported_and_explained_like_a_run(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "theirs"
    saejax.load(runs / "saved").save(theirs, format="saelens")
    work = Workspace(other(tmp_path, gates={"relative_error": 0.0}))
    folder, words = work.experiment.run_dir / "evaluated" / "theirs", [str(theirs)]
    assert run_dictionaries(work, words, report=True) == 1
    # It has no training whose settings could be changed.
    assert "FAIL" in (said := capsys.readouterr().out) and "coder.k" not in said
    flags: dict[str, Any] = {"creator": "me", "splits": 2}
    for target in ("neuronpedia", "delphi", "circuit-tracer", "saedashboard"):
        run_command("export", [target, str(folder), str(tmp_path / target)], **flags)
    alive = [f for f in read_features(folder)["features"] if f["examples"]]
    usual = max(alive, key=lambda feature: feature["density"])["id"]
    (batch, *_) = (json.loads(path.read_text()) for path in (tmp_path / "neuronpedia/upload/1-theirs").glob("*-0.json"))
    assert [f["density"] for f in batch["features"]] == [f["density"] for f in alive][: len(batch["features"])]

    monkeypatch.setenv("no_proxy", "*")
    e = experiment_of(folder)
    with stand_in() as server:
        endpoint = Endpoint(server.url, "m", "", 100, 5.0)
        for _ in range(2):  # the second time it is done already
            assert run_explain(dataclasses.replace(work, experiment=e), endpoint, str(usual), 4, 0, 1) == 0
        assert len(server.requests) == 1
    assert "explanations" in read_features(folder)["features"][usual]
    assert "explanations.jsonl" in (folder / "report.html").read_text(encoding="utf-8")

    # With another dictionary in its place nothing is said of that one by mistake.
    sae = saejax.load(theirs)
    shutil.rmtree(theirs)
    moved = dict(sae.params) | {"b_dec": np.asarray(sae.params["b_dec"]) + 1}
    dataclasses.replace(sae, params=moved).save(theirs, format="saelens")
    with pytest.raises(DataError, match=r"theirs is another dictionary than the one that was evaluated"):
        run_command("export", ["neuronpedia", str(folder), str(tmp_path / "neuronpedia")], **flags)
    run_dictionaries(work, words, redo=True)
    with pytest.raises(DataError, match=r"The report of .*theirs is of another dictionary"):
        run_command("export", ["neuronpedia", str(folder), str(tmp_path / "neuronpedia")], **flags)
    run_dictionaries(work, words, report=True)
    assert "explanations" not in read_features(folder)["features"][usual]
    shutil.rmtree(theirs)
    with pytest.raises(DataError, match=r"is the evaluation of .*theirs, which cannot be read from here"):
        run_command("export", ["delphi", str(folder), str(tmp_path / "delphi")], **flags)


@pytest.mark.ci
def test_different_hook_points_stand_in_one_table_which_says_so(runs: Path, tmp_path: Path) -> None:
    sae = saejax.load(runs / "saved")
    moved = dataclasses.replace(sae.sites, reads=("blocks.2.hook_resid_post",), writes=("blocks.2.hook_resid_post",))
    dataclasses.replace(sae, sites=moved).save(tmp_path / "moved")
    e = other(tmp_path)
    run_dictionaries(Workspace(e), [str(runs / "saved"), str(tmp_path / "moved")])
    table = (e.run_dir / "evaluated" / "table.md").read_text()
    assert "different hook points" in table and "blocks.1.resid_post" in table and "| blocks.2.resid_post" in table


def test_a_dictionary_of_another_width_is_refused_by_both_names(runs: Path, tmp_path: Path) -> None:
    planted = planted_experiment(tmp_path, "planted")
    assert run_train(Workspace(planted)) == 0
    sae = saejax.load(planted.run_dir)
    at = dataclasses.replace(sae.sites, reads=("blocks.1.resid_post",), writes=("blocks.1.resid_post",))
    dataclasses.replace(sae, sites=at).save(tmp_path / "narrow")
    with pytest.raises(DataError, match=r"planted is 16 wide at blocks\.1\.resid_post, the model demo 128"):
        run_dictionaries(Workspace(other(tmp_path)), [str(tmp_path / "narrow")])


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda folder: [" , "], ConfigError, "--sae is empty"),
        (lambda folder: [str(folder / "nowhere")], DataError, "nowhere"),
        (lambda folder: [str(folder)], DataError, "neither a run"),
    ],
)
def test_nothing_to_evaluate(
    tmp_path: Path, make: Callable[[Path], list[str]], kind: type[Exception], message: str
) -> None:
    e = other(tmp_path)
    with pytest.raises(kind, match=message):
        run_dictionaries(Workspace(e), make(tmp_path))
    assert not e.run_dir.exists()


def test_names_tell_dictionaries_apart(tmp_path: Path) -> None:
    """As short as they can be, and each the name of one folder."""
    places = ["a/x", "b/x", "c/y z", "deep/er/file.npz", "owner/name"]
    for place in places[:3]:
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / places[3]).touch()
    words = [str(tmp_path / place) for place in places[:4]]
    assert list(dictionaries([*words, "owner/name,other/name", words[0]])) == [
        "a-x", "b-x", "y-z", "er-file.npz", "owner-name", "other-name",
    ]  # fmt: skip


def test_a_page_of_a_folder_without_run_and_evaluation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(DataError, match=r"has no config\.json"):
        render(tmp_path)


@pytest.mark.ci
def test_the_command_in_a_process_of_its_own(runs: Path, tmp_path: Path) -> None:
    """A user with a dictionary and no run: model and text of a shipped experiment, in a folder that holds nothing."""
    command = [sys.executable, "-m", "saejax", "evaluate", "--config=quickstart:tiny", f"--sae={runs / 'saved'}"]
    small = ["--config.eval.tokens=500", "--config.eval.batch_rows=4", "--config.gates.relative_error=0"]
    done = subprocess.run(
        [*command, *small], check=False, cwd=tmp_path, env=one_device(), text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    ends = ("csv", "html", "md", "pdf", "png", "svg", "tex")
    assert "FAIL" in done.stdout and "| saved " in done.stdout and "tokens/s" in done.stderr
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        f"runs/quickstart-tiny/evaluated/{name}"
        for name in ("saved/documents.npz", "saved/eval.json", *(f"table.{end}" for end in ends))
    ]
