"""Whole runs on windows of neighbouring tokens: stopped and continued to the bit, swept, loaded; what is refused."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import D_IN, planted_experiment, tiny_experiment

import saejax
from saejax.app.experiment import Experiment
from saejax.app.stages import run_train
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.coders import CoderConfig
from saejax.core.errors import EXIT_PREEMPTED, ConfigError
from saejax.core.metrics import read_metrics
from saejax.store import Batches, StoreLayout, StoreWriter


def _experiment(folder: Path, name: str, **train: Any) -> Experiment:
    """`planted_experiment` on documents of 40 tokens, of which half are alike within each 20 tokens."""
    for split, rows in (("train", 4000), ("heldout", 600)):
        path = folder / "stores" / "planted" / split
        if not path.exists():
            rng, number = np.random.default_rng(rows), np.arange(rows)
            x = rng.normal(size=(rows, D_IN)) + rng.normal(size=(rows // 20, D_IN))[number // 20]
            layout = StoreLayout(512, 64)
            with StoreWriter.open(
                path, identity={"imported": "planted"}, hook_points={"h": D_IN}, n_tokens=rows, layout=layout
            ) as writer:
                tokens = {"token_id": number, "document": number // 40, "position": number % 40}
                writer.append({"h": x.astype(np.float32)}, tokens, cursor={})
                writer.finish()
    e = planted_experiment(folder, name, tokens=24 * 64, batch_size=64, **({"neighbours": 2} | train))
    coder = CoderConfig("temporal", d_sae=32, k=4, dead_after_tokens=2000, matmul_dtype="float32")
    return dataclasses.replace(e, coder=coder)


@pytest.mark.ci
def test_a_run_that_was_stopped_comes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = _experiment(tmp_path, "whole"), _experiment(tmp_path, "stopped")
    assert run_train(Workspace(whole)) == 0
    assert "windows of 2 neighbouring tokens: 3," in capsys.readouterr().out
    original = Batches.iterate

    def until(self: Batches, start_step: int = 0) -> Iterator[dict[str, np.ndarray]]:
        for step, batch in enumerate(original(self, start_step), start_step):
            if step == 13:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(Batches, "iterate", until)
    assert run_train(Workspace(stopped)) == EXIT_PREEMPTED
    monkeypatch.setattr(Batches, "iterate", original)
    assert run_train(Workspace(stopped)) == 0
    one, other = (saejax.load(e.run_dir) for e in (whole, stopped))
    assert one.step == other.step == 24
    for name, value in one.params.items():
        assert np.asarray(value).tobytes() == np.asarray(other.params[name]).tobytes(), name
    rows = [row for row in read_metrics(whole.run_dir / "metrics.jsonl") if "train/contrastive" in row]
    assert rows[-1]["train/contrastive"] < rows[0]["train/contrastive"] < 2 * np.log(32)
    assert one.encode(np.ones((3, D_IN), np.float32)).shape == (3, 32)


def test_members_of_a_sweep_share_the_windows(tmp_path: Path) -> None:
    e = _experiment(tmp_path, "swept")
    e = dataclasses.replace(e, sweep=dataclasses.replace(e.sweep, lrs=(1e-3, 3e-3)))
    assert run_sweep(Workspace(e)) == 0
    members = [path for path in e.run_dir.iterdir() if (path / "metrics.jsonl").is_file()]
    assert len(members) == 2
    assert all(any("train/contrastive" in row for row in read_metrics(m / "metrics.jsonl")) for m in members)


def test_what_has_no_windows_is_refused_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss contrastive .*train\.neighbours=2"):
        run_train(Workspace(_experiment(tmp_path, "alone", neighbours=1)))
    streaming = tiny_experiment(tmp_path, capture={"into": "training"}, train={"neighbours": 2})
    with pytest.raises(ConfigError, match=r"train\.neighbours=2 needs a store.*set capture\.into=store"):
        Workspace(streaming).build()
    assert not (tmp_path / "runs" / "alone" / "config.json").exists()
