"""Dictionaries beside each other: who is better, and what cannot be compared."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from tiny import replaced, tiny_experiment

from saejax.app.experiment import to_run_json
from saejax.app.stages.comparisons import comparisons
from saejax.app.stages.dictionaries import _trained
from saejax.evals import Documents
from saejax.evals.intervals import weights
from saejax.reports.dictionaries_page import render_dictionaries


def row(name: str, at: str = "h", fve: float = 0.9) -> dict[str, Any]:
    """eval.json of an earlier version: without intervals."""
    metrics = {"l0": 8.0, **documents(fve).metrics, "dead_fraction": 0.0}
    own = {"reads": [at], "writes": [at], "d_sae": 4, "coder": "c", "gates": [], "notes": []}
    return {"name": name, "metrics": metrics, **own}


def documents(fve: float, text: str = "text") -> Documents:
    values_N = fve + np.random.default_rng(0).normal(0, 0.02, 30)
    drawn_WN = weights(np.arange(30))
    resampled = {"fve": drawn_WN @ values_N / drawn_WN.sum(1)}
    return Documents(text, ("h",), np.arange(30), {}, {"fve": float(values_N.mean())}, resampled)


def test_each_is_compared_with_the_first_of_its_hook_point(tmp_path: Path) -> None:
    """Also where one was evaluated by an earlier version, on another text, or not at all."""
    for name, own in {
        "first": documents(0.9),
        "more": documents(0.91),
        "same": documents(0.9),
        "text": documents(0.9, "another"),
        "elsewhere": documents(0.5),
    }.items():
        own.save(tmp_path / name / "documents.npz")
    rows = [
        row("first"),
        row("elsewhere", "g", 0.5),
        row("more", fve=0.91),
        {"name": "bad", "error": "broken"},
        row("same"),
    ]
    rows += [row("text"), row("old")]
    (section,) = comparisons(tmp_path, rows, {})
    found = {line["name"]: line for line in section["rows"]}
    assert list(found) == ["more", "same", "text", "old"] and {line["against"] for line in found.values()} == {"first"}
    assert found["more"]["fve_verdict"] == "better" and found["more"]["fve"] == "+0.0100 [+0.0100, +0.0100]"
    assert found["same"]["fve_verdict"] == "not distinguishable"
    assert "different text" in found["text"]["fve_verdict"] and "--redo" in found["old"]["fve_verdict"]
    # The page takes rows without intervals beside such that have them.
    rows[0]["intervals"] = {"fve": [0.88, 0.92], "loss_recovered": None}
    text = render_dictionaries(tmp_path, "title", "lead", [dict(line) for line in rows], [section])
    assert "0.8800 to 0.9200" in text and "## Differences" in text and "bad: broken" in text
    page = (tmp_path / "table.html").read_text()
    assert "<h2>Differences</h2>" in page and "not distinguishable" in page
    assert comparisons(tmp_path, rows[:2], {}) == []


def test_figures_with_sinks_have_columns_where_a_dictionary_has_them(tmp_path: Path) -> None:
    rows = [row("plain"), row("long")]
    assert "sinks" not in render_dictionaries(tmp_path, "title", "lead", rows)
    rows[1]["metrics"] |= {"sinks": 0.0049, "fve_with_sinks": 0.98765, "l0_with_sinks": 31.25}
    head, _, plain, long = [
        line.split("|") for line in render_dictionaries(tmp_path, "t", "lead", rows).split("\n")[2:]
    ]
    at = {cell.strip(): i for i, cell in enumerate(head) if "sinks" in cell}
    assert list(at) == ["L0 with sinks", "FVE with sinks", "sinks"]
    assert [long[i].strip() for i in at.values()] == ["31.2", "0.9877", "0.49%"]
    assert [plain[i].strip() for i in at.values()] == ["", "", ""]


def test_documents_of_another_evaluation_are_not_compared(tmp_path: Path) -> None:
    """A process that is killed between the two files leaves the documents of one beside the figures of the other."""
    for name in ("first", "killed"):
        documents(0.9).save(tmp_path / name / "documents.npz")
    (section,) = comparisons(tmp_path, [row("first"), row("killed", fve=0.8)], {})
    assert "killed/documents.npz is of another evaluation" in section["rows"][0]["fve_verdict"]


def test_a_difference_needs_documents(tmp_path: Path) -> None:
    few = dataclasses.replace(documents(0.9), numbers=np.arange(3))
    for name in ("a", "b"):
        few.save(tmp_path / name / "documents.npz")
    (section,) = comparisons(tmp_path, [row("a"), row("b")], {})
    assert section["rows"][0]["fve_verdict"] == "no interval" and section["rows"][0]["fve"] == "+0.0000"


def test_dictionaries_of_two_seeds_are_one_setting(tmp_path: Path) -> None:
    def evaluated(name: str, settings: Any) -> dict[str, Any]:
        of = {"name": name, "step": 40, "reads": ["h"], "writes": ["h"], "metrics": {"l0": 4.0, "fve": 0.5}}
        return of | {"dictionary": {"settings": settings}}

    e = tiny_experiment(tmp_path)
    other_seeds = [dataclasses.replace(e, seed=7, name="b"), dataclasses.replace(e, coder_seed=3, runs_dir="c")]
    copy = dataclasses.replace(e, coder_seed=e.seed)
    one, two, three, four, wide = (
        _trained(evaluated(str(i), to_run_json(run)))
        for i, run in enumerate([e, *other_seeds, copy, replaced(e, "coder", d_sae=96)])
    )
    assert one.like == two.like == three.like == four.like != wide.like
    assert one.seed == four.seed and len({one.seed, two.seed, three.seed}) == 3
    array = {"seed": 0, "coder": {"k": 4}, "train": {"lr": 1e-3}, "lm": {"model": ""}}  # which one is not said
    of_others = (("w", array), ("x", array | {"seed": 1}), ("y", {}), ("z", {"coder": "topk"}))
    assert len({_trained(evaluated(name, settings)).like for name, settings in of_others}) == 4
