"""Devices: data sheets, the user's own lines, and what a wrong line or name is told."""

import dataclasses
from pathlib import Path

import pytest

from saejax.core.errors import ConfigError
from saejax.plans.devices import VARIABLE, Device, device, devices, keep


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file, which is not there yet."""
    path = tmp_path / "of" / "devices.yaml"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_every_device_that_the_issue_names_is_there() -> None:
    wanted = ("a100-40gb", "a100-80gb", "h100", "h200", "b200", "l40s", "rtx6000", "rtx4090")
    assert {*wanted, "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "cpu"} <= set(devices())
    for one in devices().values():
        # A float32 product is never quicker than a bfloat16 one, and memory is read at most once in 10 ms.
        assert one.float32 <= one.bfloat16 and 0.002 < one.memory / one.bandwidth < 60, one.name


def test_a_line_adds_a_device_and_goes_before_a_sheet(own: Path) -> None:
    write(own, "Mine: {memory: 48e9, bandwidth: 900e9, bfloat16: 180e12, float32: 45e12, link: 32e9}\n")
    assert device("mine") == Device("mine", 48e9, 900e9, 180e12, 45e12, 32e9)
    write(own, own.read_text() + "h100: {memory: 1e9, bandwidth: 1e9, bfloat16: 2e9, float32: 1e9, link: 1e9}\n")
    assert device("H100").memory == 1e9


def test_what_is_kept_comes_back_beside_the_other_lines(own: Path) -> None:
    write(own, "mine: {memory: 48e9, bandwidth: 900e9, bfloat16: 180e12, float32: 45e12, link: 32e9}\n")
    measured = {"host": {"token": 1e-6}, "forward": {"coefficients": [1.0], "points": [[[2.0], 1.5]]}}
    here = dataclasses.replace(device("mine"), name="here", measured=measured, source="measured")
    keep(here)
    assert device("here") == here and device("mine").memory == 48e9


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mine: {memory: 48e9, bandwidht: 1}", r"unknown key 'bandwidht'. Did you mean 'bandwidth'"),
        ("mine: {memory: 48e9}", r"mine lacks bandwidth, bfloat16, float32, link"),
        ("mine: {memory: -1, bandwidth: 1, bfloat16: 1, float32: 1, link: 1}", r"memory=-1; it must be a positive"),
        ("mine: {memory: many, bandwidth: 1, bfloat16: 1, float32: 1, link: 1}", r"memory='many'"),
        ("mine: 3", r"must hold lines such as"),
        ("mine: {memory: [", r"is no YAML"),
        ("mine: !!python/object/apply:os.system ['false']", r"is no YAML"),
    ],
)
def test_a_wrong_line_is_told_in_one(own: Path, line: str, said: str) -> None:
    write(own, line + "\n")
    with pytest.raises(ConfigError, match=said):
        device("h100")


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown device 'h10'. Did you mean 'h100'.*devices.yaml adds one"):
        device("h10")
    with pytest.raises(ConfigError, match="run `saejax calibrate` first"):
        device("here")
