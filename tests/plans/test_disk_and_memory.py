"""What cannot end is refused before it starts: the disk, the memory; and what is there already is not asked for."""

import collections
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.app.stages import run_capture
from saejax.app.workspace import Workspace
from saejax.core.errors import ConfigError, DataError
from saejax.plans import disk_and_memory
from saejax.plans.disk_and_memory import check_disk_and_memory

Usage = collections.namedtuple("Usage", "total used free")


def made(folder: Path, **values: Any) -> Experiment:
    config = default_config()
    small = {
        "runs_dir": str(folder / "runs"),
        "stores_dir": str(folder / "stores"),
        "coder.preset": "standard",
        "coder.d_sae": 256,
        "capture.tokens": 8192,
        "capture.heldout_tokens": 1024,
        "capture.shard_rows": 1024,
        "train.batch_size": 64,
        "train.tokens": 640,
    }
    config.update_from_flattened_dict(small | {key.replace("__", "."): value for key, value in values.items()})
    return experiment(config)


def free(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, int(count)))


def test_a_disk_that_is_too_small_is_told_with_all_that_it_would_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = made(tmp_path)
    check_disk_and_memory(e)
    free(monkeypatch, 2e6)
    with pytest.raises(DataError, match=r"2 MB free, .* needs 3\.\d+ MB there \(the train store 2\.\d+ MB.*--anyway"):
        check_disk_and_memory(e)
    check_disk_and_memory(dataclasses.replace(e, lm=dataclasses.replace(e.lm, model="")))


def test_what_is_stored_already_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = made(tmp_path)
    run_capture(Workspace(e))
    (tmp_path / "runs" / "run").mkdir(parents=True, exist_ok=True)
    (tmp_path / "runs" / "run" / "config.json").write_text("{}")
    free(monkeypatch, 1e5)
    check_disk_and_memory(e)


def test_a_step_that_does_not_fit_is_told_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    e = made(tmp_path, parallel__mesh=(1, 1))
    monkeypatch.setattr(disk_and_memory, "room_on", lambda _: 1_000_000)
    with pytest.raises(ConfigError, match=r"A train step takes 1\.\d+ MB .* 1 MB of cpu can be had\. Split the batch"):
        check_disk_and_memory(e)
    monkeypatch.setattr(disk_and_memory, "room_on", lambda _: 3_000_000)
    check_disk_and_memory(e)
    # A sweep has many steps, and one without a batch size finds one that fits.
    check_disk_and_memory(made(tmp_path, sweep__seeds=(0, 1)))
