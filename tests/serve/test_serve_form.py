"""The form's data: made from the settings alone, complete, and the values of experiments and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny.commands import on_page

from saejax.app import experiments
from saejax.app.experiment import Experiment, experiment, to_run_json
from saejax.app.keys import sections
from saejax.commands import COMMANDS
from saejax.commands._reference import reference
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import write_json
from saejax.serve.jobs import form
from saejax.serve.jobs.experiments import flat, requested
from saejax.serve.jobs.form import keys
from saejax.serve.jobs.requests import ExperimentBody
from saejax.serve.problems import Problem
from saejax.serve.site import Folders, Site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("form")
    (folder / "stores").mkdir()
    write_json(folder / "runs" / "mine" / "config.json", to_run_json(Experiment(name="mine")))
    write_json(folder / "runs" / "sweep" / "sweep_config.json", {})
    listed = folder / "own.py"
    listed.write_text(
        '"""My own."""\n\nPRESETS = ("", "a", "b")\n\n\ndef get_config(preset=""):\n    raise ValueError\n'
    )
    broken = folder / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    # It hides the shipped one of its name.
    other = folder / "quickstart.py"
    other.write_text('"""Another quickstart."""\n')
    shipped = {name: experiments.folder() / f"{name}.py" for name in experiments.names()}
    listed_files = {"own": listed, "broken": broken, "quickstart": other}
    return Site(Folders(folder / "runs", folder / "stores"), shipped | listed_files, on_page())


def test_every_key_of_an_experiment_is_in_the_form(site: Site) -> None:
    content = json.loads(json.dumps(form.settings(site), allow_nan=False))
    keys = [setting for section in content["sections"] for setting in section["settings"]]
    # Where runs and stores lie is the server's own.
    known = [key.name for section in sections() for key in section.keys]
    assert [one["key"] for one in keys] == [name for name in known if name not in ("runs_dir", "stores_dir")]
    assert {one["key"] for one in keys} == set(flat(Experiment())) - {"runs_dir", "stores_dir"}
    assert all(one["doc"] and one["type"] for one in keys)
    assert content["sections"][0]["name"] == "" and all(section["doc"] for section in content["sections"][1:])
    defaults = flat(Experiment())
    assert all(one["default"] == defaults[one["key"]] for one in keys)
    lr = next(one for one in keys if one["key"] == "train.lr")
    assert (lr["type"], lr["choices"], lr["decides"], lr["sweep"]) == ("float", None, True, True)
    preset = next(one for one in keys if one["key"] == "coder.preset")
    assert "topk" in preset["choices"]
    assert next(one for one in keys if one["key"] == "coder_seed")["optional"]


def test_the_form_and_the_reference_say_the_same() -> None:
    text = reference()
    for section in keys():
        for one in section["settings"]:
            assert f"| `{one['key']}` | {one['type']} |" in text


def test_the_commands_of_the_form_are_commands(site: Site) -> None:
    assert all(one["name"] in COMMANDS and one["text"] for one in form.settings(site)["commands"])


def test_experiments_shipped_and_listed(site: Site) -> None:
    found = {one["name"]: one for one in form.settings(site)["experiments"]}
    assert (found["own"]["summary"], found["own"]["presets"], found["own"]["listed"]) == ("My own.", ["a", "b"], True)
    assert "ModuleNotFoundError" in found["broken"]["summary"]
    assert found["gpt2_small"]["presets"] == ["fast", "thorough"] and not found["gpt2_small"]["listed"]
    assert found["quickstart"]["summary"] == "Another quickstart." and found["quickstart"]["listed"]


def test_the_values_of_an_experiment_are_those_it_runs_with(site: Site) -> None:
    values = form.values(site, "gpt2_small", "fast")["values"]
    e = experiment(experiments.shipped("gpt2_small", "fast"))
    assert values | {"runs_dir": "runs", "stores_dir": "stores"} == json.loads(json.dumps(flat(e)))
    # What the form sends back unchanged is the same experiment.
    sent = {key: value for key, value in values.items() if key not in ("runs_dir", "stores_dir")}
    assert requested(site, ExperimentBody(experiment="gpt2_small", preset="fast", config=sent)).train == e.train


def test_the_values_of_a_run(site: Site, tmp_path: Path) -> None:
    found = form.values(site, run="mine")
    assert found["name"] == "mine" and found["values"]["coder.sparsity"] == "topk", "the preset's values too"
    with pytest.raises(Problem):
        form.values(site, run="none")
    with pytest.raises(DataError, match=r"sweep_experiment\.json does not exist"):
        form.values(site, run="sweep")
    with pytest.raises(ConfigError, match="Did you mean 'gpt2_small'"):
        form.values(site, "gpt2_smal")
