"""Which number of devices a plan recommends, and the smallest change that makes a stage fit."""

import dataclasses
from typing import Any

import pytest

from saejax.app.experiment import default_config, experiment
from saejax.plans.devices import Device, device
from saejax.plans.estimate import Estimate, estimate
from saejax.plans.outline import Outline
from saejax.plans.recommendation import changes, recommend, remedy
from saejax.plans.stage import StageEstimate

CARD = Device("card", 10e9, 1e12, 1e14, 1e13, 1e11)


def whole(devices: int, gigabytes: float, seconds: float, refused: str = "") -> Estimate:
    stage = StageEstimate("train", devices, {"state": gigabytes * 1e9}, 0, 0, seconds, flops=1e15)
    return Estimate(CARD, devices, (devices, 1), (stage,), refused)


def test_the_least_that_fits_is_taken_and_waste_is_named() -> None:
    found = [whole(1, 12, 4000), whole(2, 8, 2000), whole(4, 7, 1200), whole(8, 6, 1100)]
    advice = recommend(found)
    assert advice.estimate is found[1] and advice.wasteful == {8: "2.2 times the device-hours of 2 for 55% of its time"}
    assert found[0].over == ["train"] and found[1].over == []
    # 0.85 of the card's 10 GB are for a stage.
    assert whole(1, 8.6, 1).over == ["train"] and whole(1, 8.4, 1).over == []


def test_the_deadline_asks_for_more_and_may_be_out_of_reach() -> None:
    found = [whole(1, 5, 4000), whole(2, 5, 2000), whole(4, 5, 1200)]
    assert recommend(found, deadline=2500).estimate is found[1]
    assert recommend(found, deadline=60).estimate is None and "4 are the quickest" in recommend(found, deadline=60).why
    assert recommend([whole(1, 50, 1)]).estimate is None
    assert recommend([dataclasses.replace(found[0], refused="no")]).estimate is None


def test_used_and_cost_follow_from_the_stages() -> None:
    one = whole(2, 5, 100)
    assert one.utilisation == pytest.approx(1e15 / (100 * 2 * 1e14))
    assert one.device_hours == pytest.approx(200 / 3600)


def made(**values: Any) -> Outline:
    config = default_config()
    config.update_from_flattened_dict(
        {"coder.preset": "standard", **{k.replace("__", "."): v for k, v in values.items()}}
    )
    return Outline.of(experiment(config))


def test_the_smallest_change_that_fits_is_found_and_does_fit() -> None:
    outline = made(coder__d_sae=4096, train__batch_size=4096, train__tokens=409_600)
    small = dataclasses.replace(device("h100"), memory=150e6)
    found = estimate(outline, small, [1])[0]
    assert found.over == ["train", "evaluate", "report"]
    said = remedy(outline, small, 1, ["train"])
    assert said[0].startswith("train: --config.train.accumulate=") and "fits" in said[0]
    parts = int(said[0].split("=")[1].split()[0])
    e = outline.experiment
    fewer, enough = (
        estimate(
            outline.with_experiment(dataclasses.replace(e, train=dataclasses.replace(e.train, accumulate=n))),
            small,
            [1],
        )[0]
        for n in (max(1, parts // 2), parts)
    )
    assert "train" in fewer.over and "train" not in enough.over
    nothing = remedy(outline, dataclasses.replace(small, memory=1e6), 1, ["evaluate"])
    assert nothing == ["evaluate: no change of the mesh, the batch or the dtype makes it fit on 1 x h100"]


def test_changes_are_those_of_their_stage_and_can_be_configured() -> None:
    e = made(train__batch_size=64, train__tokens=640).experiment
    for stage, key in (("train", "fsdp"), ("evaluate", "eval.batch_rows"), ("capture", "capture.batch_rows")):
        flags = [flag for flag, _ in changes(e, stage, 4)]
        assert flags and any(key in flag for flag in flags)
        assert all(word.startswith("--config.") for flag in flags for word in flag.split())
    named = dict(changes(e, "train", 4))["--config.parallel.mesh=2,2 --config.parallel.fsdp=true"]
    assert named.parallel.mesh == (2, 2) and named.parallel.fsdp, "the flags say all that was changed"
