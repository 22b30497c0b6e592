"""Calibration: what is measured ends in a device that plans can take, and the host's part by hand."""

from pathlib import Path

import pytest

from saejax.core.errors import ConfigError
from saejax.plans import calibrate
from saejax.plans.calibrate import Ran, experiment_with, host_of, run_calibrate
from saejax.plans.devices import VARIABLE, device
from saejax.plans.estimate import stage_of
from saejax.plans.laws import Law, law_of
from saejax.plans.outline import Outline
from saejax.plans.stage import Host
from saejax.plans.train_stages import law_of_step, step_kind

ALL = ("topk", "standard", "gated", "p_anneal")


def ran(tokens: float, stored: float, beside: float, latents: int, pages: float, steps: int) -> Ran:
    loop = ((1.0, 10.0), steps, 0.5 + steps * 0.1)
    return Ran((tokens, stored, beside), loop, ((1.0,), 1.0), ((1.0,), 1.0), (latents, pages), 7.0)


def test_the_host_s_part_is_what_two_experiments_took_beside_the_device() -> None:
    # 2 us a token, 10 ns a stored byte; 4 ms a latent; 0.1 s a step of which 0.06 compute, half a second a checkpoint.
    found = [ran(1e6, 1e8, 2 + 1, 512, 1 + 512 * 0.004, 40), ran(1e6, 4e8, 2 + 4, 2048, 1 + 2048 * 0.004, 160)]
    host = host_of(found, Law((0.01, 0.005), (((1.0, 10.0), 1.0),)))
    wanted = {"token": 2e-6, "stored_byte": 1e-8, "step": 0.04, "save": 0.5, "latent": 0.004, "start": 7.0}
    assert {name: host[name] for name in wanted} == pytest.approx(wanted)


def test_a_step_is_measured_with_the_amounts_that_a_plan_has_of_it() -> None:
    kind, (amounts, seconds) = calibrate.step_point("standard", 16, 64, 128, 4)
    outline = Outline.of(
        experiment_with(
            {"coder.preset": "standard", "coder.d_sae": 64, "coder.k": 4, "train.batch_size": 128, "train.tokens": 1280}
        )
    )
    assert kind == step_kind(outline.coder()) == "relu.l1+lift+mse" and 0 < seconds < 5
    assert amounts[0] == 1 and amounts[3] == 0 and amounts[4] == 2 * 16 * 64 + 64 + 2 * 16
    assert outline.coder().topology.d_sae == 64


def test_the_name_of_a_data_sheet_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "devices.yaml"))
    with pytest.raises(ConfigError, match="--name=h100 is the name of a data sheet"):
        run_calibrate("h100")


@pytest.mark.soak
def test_a_calibrated_machine_is_planned_by_its_own_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "devices.yaml"))
    monkeypatch.setattr(calibrate, "PRESETS", ("topk", "standard"))
    lines: list[str] = []
    run_calibrate("mine", lines.append)
    mine = device("mine")
    steps = {preset: law_of_step(mine, Outline.of(experiment_with({"coder.preset": preset})).coder()) for preset in ALL}
    assert steps["topk"] and steps["standard"] and steps["standard"] is not steps["topk"] and not steps["gated"]
    assert steps["p_anneal"] == steps["standard"] and law_of(mine, "forward")
    assert Host.of(mine).token > 0 and mine.bandwidth > 1e8 and "kept as 'mine'" in lines[-1]
    e = experiment_with(
        {"coder.preset": "standard", "coder.d_sae": 1024, "train.batch_size": 2048, "train.tokens": 204_800}
    )
    found = stage_of(Outline.of(e), mine, 1, "train")
    assert 1 < found.seconds < 1000
