"""Reports on a phone of 390 pixels: every letter can be read, and every table reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny.browser import CHROMIUM
from tiny.phone import nothing_wrong

from saejax.reports import render
from saejax.reports.sweep_page import render_sweep

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path")

GATE = {"name": "loss_rise", "title": "Loss falls: largest rise between fifths of training", "comparison": "<"}
DENSITY = {"log10_edges": [-6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0], "counts": [1, 9, 30, 20, 5, 1], "dead": 3}


def test_a_run_on_a_phone(tmp_path: Path) -> None:
    """An axis whose values lie close together has labels that differ."""
    spreads = {"equal": 0.0, "rounding": 1e-6, "narrow": 1e-4, "wide": 1e-2}
    rows = [
        {"step": s, "train/loss": 1 / (s + 1), "train/l0": 24.0}
        | {f"train/{name}": 24 + spread * (s % 5) for name, spread in spreads.items()}
        for s in range(40)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text(json.dumps({"coder": {"preset": "topk"}}))
    gates = [GATE | {"value": -0.001918, "bar": 0.01, "passed": True, "advice": "Lower train.lr."}]
    evaluation = {"step": 39, "metrics": {"fve": 0.5}, "gates": gates, "density": DENSITY | {"n_tokens": 5000}}
    (tmp_path / "eval.json").write_text(json.dumps(evaluation))
    stage = {"tokens": 5_120_000_000, "seconds": 1e6, "tokens_per_second": 123456.7}
    (tmp_path / "stages.json").write_text(json.dumps({"train": stage, "capture heldout": stage}))
    nothing_wrong(render(tmp_path))


def test_a_table_with_a_picture_on_a_phone(tmp_path: Path) -> None:
    """The picture's letters, of 10 points, keep 9 pixels: it is scrolled, as the table is."""
    rows: list[dict[str, Any]] = [
        {"member": f"topk-k{k}", "preset": "topk", "d_sae": 1024, "k": k, "lr": 1e-3, "seed": 0, "sparsity_scale": 1.0}
        | {"l0": float(k), "fve": 0.5, "dead_fraction": 0.1, "relative_error": 0.3, "tokens_per_second": 3000.0}
        | {"status": "ok", "reads": ["blocks.0.resid_post"]}
        for k in (8, 16)
    ]
    none: dict[str, Any] = {"settings": [], "choice": []}
    render_sweep(tmp_path, {"name": "wide", "tokens": 1000, "tokens_per_second": 2000.0, "members": rows, **none})
    (scale,) = nothing_wrong(tmp_path / "sweep.html")["images"]
    assert 10 / 72 * 120 * scale >= 8.9
