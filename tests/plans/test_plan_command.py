"""`saejax plan`: every stage, bad input in a line, other projects' reports beside ours."""

import dataclasses
import io
import json
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny.commands import run_command

import saejax
from benchmarks.plan_reports import REPORTS, page
from saejax.app import experiments
from saejax.app.experiment import Experiment, default_config, experiment
from saejax.core.config import to_config_dict
from saejax.core.errors import ConfigError, DataError
from saejax.plans.command import of_jobs, seconds
from saejax.plans.devices import VARIABLE, device
from saejax.plans.estimate import estimates, stage_of
from saejax.plans.models import shape_of
from saejax.plans.outline import Outline
from saejax.prefix.encoder import Encoder

FLAGS: dict[str, Any] = {"device": "h100", "devices": (1, 2)}


def run_plan(e: Experiment, **flags: Any) -> int:
    return run_command("plan", config=to_config_dict(e), **FLAGS | flags)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No devices of the user's; and the virtual devices that the suite has already."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "devices.yaml"))
    monkeypatch.setattr("saejax.plans.command.virtual_devices", lambda count: None)


def made(**values: Any) -> Experiment:
    config = default_config()
    small = {"coder.preset": "standard", "coder.d_sae": 256, "train.batch_size": 64, "train.tokens": 6400}
    config.update_from_flattened_dict(small | {key.replace("__", "."): value for key, value in values.items()})
    return experiment(config)


def said(e: Experiment, **flags: Any) -> tuple[int, str]:
    out = io.StringIO()
    with redirect_stdout(out):
        code = run_plan(e, **flags)
    return code, out.getvalue()


def test_a_plan_names_every_stage_for_each_number_of_devices_and_what_to_take() -> None:
    code, text = said(made(), price=2.5, deadline="12h")
    assert code == 0
    for stage in ("capture", "train", "evaluate", "report", "graphs", "interventions", "all"):
        assert len(re.findall(rf"^\| \(?[12]\)? +\| {stage} ", text, re.M)) == 2, stage
    assert "Take 1 x h100: the least that fits and meets the deadline" in text
    assert "of the operations that it could do are done" in text and "| cost " in text


def test_the_figures_as_json_add_up() -> None:
    code, text = said(made(), json=True)
    one, two = json.loads(text)
    assert (code, one["devices"], two["mesh"]) == (0, 1, [2, 1])
    pipeline = [stage for stage in one["stages"] if stage["stage"] not in ("graphs", "interventions")]
    assert one["seconds"] == pytest.approx(sum(stage["seconds"] for stage in pipeline))
    assert two["device_hours"] == pytest.approx(2 * two["seconds"] / 3600)
    train = next(stage for stage in one["stages"] if stage["stage"] == "train")
    assert train["device_bytes"] == sum(train["parts"].values()) and train["parts"]["state"] > 12 * 2 * 128 * 256


def test_a_sweep_has_its_programs_in_one_row() -> None:
    code, text = said(made(sweep__seeds=(0, 1), sweep__d_saes=(128, 256)), devices=(1,))
    assert code == 0 and re.search(r"^\| 1 +\| sweep ", text, re.M) and "4 members as 2 programs" in text
    assert not re.search(r"^\| 1 +\| (train|evaluate) ", text, re.M)


def test_more_devices_than_rows_is_a_row_that_says_so() -> None:
    code, text = said(made(train__batch_size=63, train__tokens=6300), devices=(1, 2))
    assert code == 0 and "cannot be: train.batch_size 63 cannot be split over 2 devices" in text


def test_what_does_not_fit_exits_with_one_and_says_what_would(tmp_path: Path) -> None:
    (tmp_path / "devices.yaml").write_text(
        "small: {memory: 13e6, bandwidth: 1e9, bfloat16: 2e9, float32: 1e9, link: 1e9}\n"
    )
    code, text = said(
        made(eval__batch_rows=1, report__batch_rows=1, capture__batch_rows=1), device="small", devices=(1,)
    )
    assert code == 1 and "TOO MUCH" in text and "Nothing fits." in text
    assert re.search(r"Does not fit\. evaluate: no change", text)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"device": "h1000"}, r"Unknown device 'h1000'. Did you mean 'h100'"),
        ({"devices": ("1", "x")}, r"--devices\[0\] is '1'"),
        ({"devices": (2000,)}, r"--devices holds 2000; each must be between 1 and 1024"),
        ({"devices": (0,)}, r"--devices holds 0"),
        ({"price": -1.0}, r"--price is -1.0; it must be"),
        ({"deadline": "soon"}, r"--deadline is 'soon'; it must be a time such as 12h"),
    ],
)
def test_bad_flags_are_refused_in_a_line(flags: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run_plan(made(), **flags)


def test_bad_experiments_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 4 devices along latent, which does not divide 1"):
        run_plan(made(parallel__mesh=(1, 4)), devices=(1, 2))
    with pytest.raises(ConfigError, match=r"no hook point 'blocks\.9\.resid_post'"):
        run_plan(made(capture__hook_points=("blocks.9.resid_post",)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json is not a usable model configuration"):
        run_plan(made(lm__model=str(tmp_path), lm__backend="jax"))


def test_times_of_deadlines() -> None:
    assert [seconds(text) for text in ("", "12h", "90min", "2d", "3600", "1.5 h")] == [
        0,
        43200,
        5400,
        172800,
        3600,
        5400,
    ]


def test_a_program_gets_the_command_s_plan() -> None:
    """Made in a process of its own, which may have more devices than this one."""
    e = made()
    plan = saejax.plan(to_config_dict(e), "h100", (1, 16), deadline="12h")
    assert plan.fits and "Take 1 x h100" in repr(plan) and [one["devices"] for one in plan.estimates] == [1, 16]
    _, text = said(e, json=True, devices=(1,))
    ours, its = plan.estimates[0], json.loads(text)[0]
    assert ours["disk_bytes"] == its["disk_bytes"] and ours["seconds"] == pytest.approx(its["seconds"], rel=0.02)


def test_a_program_is_told_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, message in (
        ({"device": "h1000"}, "Unknown device 'h1000'"),
        ({"deadline": "soon"}, "deadline is 'soon'"),
        ({"devices": (0,)}, "devices"),
    ):
        with pytest.raises(ConfigError, match=message):
            saejax.plan(made(), **wrong)
    with pytest.raises(ConfigError, match="quickstart"):
        saejax.plan("quikstart")
    with pytest.raises(DataError, match=r"config\.json"):
        saejax.plan(made(lm__model=str(tmp_path), lm__backend="jax"), "h100", (1,))
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    with pytest.raises(DataError, match=r"ended with exit code 1"):
        saejax.plan(made(), "h100", (1,))


def test_a_batch_size_that_is_to_be_found_is_found_for_the_device() -> None:
    e = made(train__batch_size=0, train__tokens=2_000_000)
    found = stage_of(Outline.of(e), device("h100"), 1, "train")
    assert found.parts["batch"] in [2**n * 128 * 2 for n in range(8, 17)]


def test_a_training_straight_from_the_model_has_the_model_beside_it() -> None:
    both = (estimates(made(capture__into=into), device("h100"), 1) for into in ("store", "training"))
    plain, streamed = ({one.stage: one for one in stages} for stages in both)
    assert streamed["train"].parts["language model"] == streamed["capture"].parts["language model"] > 1e6
    assert streamed["train"].seconds > plain["train"].seconds and streamed["train"].flops > 2 * plain["train"].flops
    assert streamed["capture"].disk_bytes < plain["capture"].disk_bytes / 10
    assert "language model" not in plain["train"].parts


def test_others_get_the_stages_as_they_are() -> None:
    stages = {one.stage: one for one in estimates(made(), device("h100"), 1)}
    assert set(stages) == {"capture", "train", "evaluate", "report", "graphs", "interventions"}
    assert all(one.seconds > 0 and one.device_bytes > 0 for one in stages.values())


def test_jobs_get_a_study_as_one_stage_and_retries_as_one_training() -> None:
    plain = {one.stage: one for one in of_jobs(made(), "h100", 1)}
    again = {one.stage: one for one in of_jobs(made(gates__retries=2), "h100", 1)}
    assert plain["study"].seconds == plain["graphs"].seconds + plain["interventions"].seconds
    each = sum(plain[name].seconds for name in ("train", "evaluate", "report"))
    assert again["train"].seconds == pytest.approx(3 * each)
    with pytest.raises(ConfigError, match="Unknown device 'gpu'"):
        of_jobs(made(), "gpu", 1)


def test_a_report_that_divided_two_models_by_its_devices_is_told() -> None:
    text = "\n".join(page(["latentwire"]))
    assert (
        "| 4 x H100         | memory of each " in text and "8.5 GB" in text and "data parallelism each has both" in text
    )


def test_a_prefix_is_planned_as_what_it_is() -> None:
    """One stage; the weights of both models, 16 bytes a trained number; spread over two devices half of the weights."""
    e = experiment(experiments.shipped("latentwire"))
    one = of_jobs(e, "h100", 1)
    assert [stage.stage for stage in one] == ["prefix"]
    weights = 2 * sum(shape_of(model).n_parameters for model in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B"))
    assert one[0].parts["language model"] == weights
    encoder = Encoder(e.prefix, 256, (("a", 4096, 1.0), ("b", 3584, 1.0)))
    learned = sum(x.size for x in jax.tree.leaves(jax.eval_shape(encoder.init, jax.random.key(0))))
    assert one[0].parts["state"] == 16 * learned
    spread = dataclasses.replace(e, parallel=dataclasses.replace(e.parallel, mesh=(1, 2)))
    assert of_jobs(spread, "h100", 2)[0].parts["language model"] == weights / 2
    small = of_jobs(dataclasses.replace(e, lm=dataclasses.replace(e.lm, dtype="float32")), "rtx6000", 1)[0]
    assert small.device_bytes > 2 * weights, "and it does not fit, which a plan says"


@pytest.mark.soak
@pytest.mark.parametrize("name", REPORTS)
def test_every_report_has_a_figure_of_ours_for_each_of_its_own(name: str) -> None:
    rows = [line for line in "\n".join(page([name])).splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 4 and all(line.split("|")[4].strip() for line in rows)
