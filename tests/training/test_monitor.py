"""Monitoring says what a training takes, warns once, and changes nothing."""

import re
import statistics
import sys
import types
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny.trainings import assert_same, final, run

from saejax.core.host import processors
from saejax.core.metrics import read_metrics
from saejax.reports.curves import monitored
from saejax.training import Profiler
from saejax.training.monitor import Growth, Monitor, Waiting, utilisation_of

LOOP = {"loop/data", "loop/step", "loop/metrics", "loop/validation", "loop/checkpoint", "loop/other"}


def test_rows_say_what_it_takes_and_no_number_changes(store: Path, tmp_path: Path) -> None:
    """Alone and together with a profile: the end is bitwise that of a run that nobody watches."""
    said: list[str] = []
    assert run(store, tmp_path / "plain").finished
    for name in ("alone", "profiled"):
        folder = tmp_path / name
        folder.mkdir()
        watches: list[Any] = [Monitor(jax.devices()[:1], said.append)]
        if name == "profiled":
            watches.append(Profiler(folder, jax.devices()[:1], said.append))
        assert run(store, folder, watches=watches).finished
        assert_same(final(tmp_path / "plain"), final(folder))
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row]
        assert rows and all({"host/cpu", "host/memory_bytes", *LOOP} <= row.keys() for row in rows)
        for row in rows:
            assert sum(row[key] for key in LOOP) == pytest.approx(1)
            assert all(-1e-9 <= row[key] <= 1 for key in LOOP)
            assert 1e7 < row["host/memory_bytes"] < 1e12 and row["host/cpu"] >= 0
            assert "device/memory_bytes" not in row, "JAX knows no memory of CPU devices"
        # Of some milliseconds the two clocks may say 1.6: the kernel counts a thread's time when it looks.
        assert statistics.median(row["host/cpu"] for row in rows) < 1.5
    assert (tmp_path / "profiled" / "profile.json").is_file()
    assert not any("warning" in line for line in said)


def test_waiting_is_said_once_with_its_remedy() -> None:
    waiting = Waiting("Buy a disk.")
    assert [waiting.after(5.0, 0.2) for _ in range(20)] == [""] * 20
    lines = [waiting.after(5.0, 0.9) for _ in range(20)]
    assert lines == ["it waited for data in 32% of the last 30 seconds. Buy a disk.", *[""] * 19]
    brief = Waiting("")
    assert brief.after(29.0, 1.0) == "" and brief.after(2.0, 1.0).startswith("it waited for data in 100%")


def said_of(values: list[float], **settings: Any) -> list[str]:
    growth = Growth("host memory", **settings)
    lines = [growth.after(10 * i, 2.0 * i, value, 10_000) for i, value in enumerate(values)]
    return [line for line in lines if line]


def test_growth_is_said_once() -> None:
    leak = [1e9 + 5e6 * i for i in range(1000)]
    (said,) = said_of(leak)
    assert said.startswith("host memory keeps growing: ") and "Ctrl-C saves all" in said
    # 5 MB in 10 steps: what is said to come until step 10,000 is that pace.
    step, more = (
        int(re.findall(pattern, said)[-1].replace(",", "")) for pattern in (r"step ([\d,]*\d)", r"about ([\d,]+)")
    )
    assert step and more == pytest.approx((10_000 - step) * 0.5, rel=0.02)


def test_what_is_no_leak_is_not_called_one() -> None:
    warm_up = [1e9 + 2e9 * min(i, 100) / 100 for i in range(1000)]
    saturating = [3e9 - 2e9 * 0.97**i for i in range(1000)]
    saw = [1e9 + (i % 50) * 1e7 for i in range(1000)]
    small = [1e9 + 1e4 * i for i in range(1000)]
    assert [said_of(values) for values in (warm_up[150:], saturating, saw, small, leak_of_ten_minutes())] == [[]] * 5


def leak_of_ten_minutes() -> list[float]:
    return [1e9 + 5e7 * i for i in range(300)]


def test_utilisation_of_cards_that_jax_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES renumbers cards for JAX, and not for NVML. (pynvml is played: there is no card here.)"""

    class NVMLError(Exception):
        pass

    asked: list[Any] = []
    fake = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: asked.append(index) or index,
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid) or 1,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=10 * handle),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    cards: Any = [types.SimpleNamespace(platform="gpu", local_hardware_id=i) for i in range(2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    sample = utilisation_of(cards)
    assert sample is not None and asked == [3, "GPU-abc"] and sample() == pytest.approx(0.2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    sample = utilisation_of(cards)
    assert sample is not None and sample() == pytest.approx(0.05)

    def fails(handle: Any) -> Any:
        raise NVMLError

    fake.nvmlDeviceGetUtilizationRates = fails
    assert sample() is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert utilisation_of(cards) is None, "a card that is not in the list"
    assert utilisation_of(jax.devices()[:1]) is None and processors() >= 1


def test_the_page_weighs_shares_by_time() -> None:
    shares = dict.fromkeys(LOOP, 0.0)
    rows = [
        {"step": 0, "time": 0.0, **shares, "host/memory_bytes": 1e9, "host/cpu": 0.5},
        {"step": 10, "time": 1.0, **shares, "loop/data": 1.0, "host/memory_bytes": 3e9},
        {"step": 20, "time": 4.0, **shares, "loop/step": 1.0, "host/memory_bytes": 2e9, "host/cpu": None},
        {"step": 20, "val/fve": 0.5},
    ]
    content = monitored(rows)
    assert content is not None and content["steps"] == 20 and content["most"] == {"host": 3000.0}
    by_name = {row["name"]: (row["ms"], row["share"]) for row in content["phases"]}
    assert by_name["wait for data"] == (pytest.approx(50.0), pytest.approx(0.25))
    assert by_name["the step"] == (pytest.approx(150.0), pytest.approx(0.75))
    assert content["memory"]["host"]["values"] == [1000.0, 3000.0, 2000.0] and list(content["use"]) == ["CPUs"]
    assert monitored([{"step": 1, "train/loss": 1.0}]) is None
