"""A whole study of the demo model with a small random dictionary: its tables, its page, and the same after any stop."""

import csv
import html
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.studies import brackets, dictionary, never, small, tables

import saejax
from saejax.app.experiment import experiment
from saejax.attribution import Graph, attribute
from saejax.attribution.prediction import predicted
from saejax.core.errors import DataError
from saejax.interventions import Interventions, set_to
from saejax.lm import load_lm
from saejax.studies import graphs
from saejax.studies.baseline import as_prompts
from saejax.studies.behaviours import read_pairs
from saejax.studies.run import run_study
from saejax.studies.table import Table
from saejax.trained import TrainedCoder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("study")
    dictionary(folder / "clt")
    brackets(folder), never(folder)
    assert run_study(experiment(config(folder, folder))) == 0
    yield folder


def config(whole: Path, folder: Path, **changes: Any) -> Any:
    """The study below `folder`, with the dictionary and the pairs of `whole`, which the page names."""
    c = small(folder, behaviours=(f"own={whole}/own.jsonl", f"never={whole}/never.jsonl"), **changes)
    c.study.dictionaries = (str(whole / "clt"),)
    return c


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with open(folder / "runs" / "mine" / "study" / name, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_effects_are_those_of_single_runs(whole: Path) -> None:
    """Ablations and patches of the table, each by one run of its own."""
    lm, sae = load_lm("demo"), TrainedCoder.from_folder(whole / "clt")
    inside = Interventions(lm, {"sae": sae})
    prompts = as_prompts(read_pairs(whole / "runs/mine/study/pairs/own.test.jsonl"), lm)
    clean, corrupt = inside.run(prompts.clean), inside.run(prompts.corrupt)
    found = rows(whole, "effects.own.csv")
    assert len(found) == 2 * (1 + 2 + 2 + 1) * 4
    before = np.asarray(prompts.difference(clean.logits))
    np.testing.assert_allclose([float(row["clean"]) for row in found[:4]], before, rtol=1e-4)
    features = rows(whole, "features.own.csv")
    place_S = np.arange(prompts.clean.shape[1])

    def changed(latents: list[int], row: int, values: np.ndarray, at_S: np.ndarray) -> np.ndarray:
        change = set_to(latents, np.broadcast_to(values, (1, len(place_S), 2)).astype(np.float32), at_S[None])
        return np.asarray(inside.run(prompts.clean[row : row + 1], {"sae": change}).logits)

    for name in dict.fromkeys(row["group"] for row in found):
        layer, place = (int(part) for part in name.removeprefix("L").split("."))
        own = [int(f["latent"]) for f in features if int(f["layer"]) == layer and int(f["prompts"]) == 2]
        latents = [40 * layer + latent for latent in own[2 * (place - 1) : 2 * place]]
        other = np.asarray(corrupt.latents["sae"]).reshape(4, -1, 80)[..., latents]
        runs = {("ablate", 0): [changed(latents, row, np.zeros(2), place_S >= 1) for row in range(4)]}
        for back in (0, 1):
            last = [int(at) - back for at in prompts.last]
            runs["patch", back] = [changed(latents, r, other[r, at], place_S == at) for r, at in enumerate(last)]
        for (kind, number), logits in runs.items():
            want = prompts.difference(np.concatenate(logits))
            got = [
                float(r["value"]) for r in found if (r["group"], r["kind"], int(r["number"])) == (name, kind, number)
            ]
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_the_page_and_its_graphs(whole: Path) -> None:
    folder = whole / "runs" / "mine" / "study"
    page = (folder / "study.html").read_text()
    for word in ("own.jsonl", "never", "rows/baseline.html", "graphs/own-0.html", "rows/effects.own.html"):
        assert word in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert (folder / "graphs" / "own-1.html").stat().st_size > 10_000


def test_a_program_gets_what_is_on_the_page(whole: Path) -> None:
    made = saejax.study(config(whole, whole))
    assert made.summary == json.loads((made.page.parent / "summary.json").read_text())
    assert repr(made).startswith("own: ") and "never: refused" in repr(made)
    assert html.escape("<title>") in made._repr_html_() and made.page == whole / "runs/mine/study/study.html"


class Killed(BaseException):
    """Nothing catches it."""


@pytest.mark.ci
def test_a_study_killed_while_it_writes_ends_with_the_same_bytes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with half a block on the disk in each table, and behind the first graph; no whole block comes twice."""
    c = config(whole, tmp_path)
    written: Counter[str] = Counter()
    append = Table._append
    stops = [("baseline.csv", 2), ("graph", 2), ("effects.own.csv", 4), ("singles.own.csv", 2)]

    def half(table: Table, raw: bytes) -> None:
        written[table.path.name] += 1
        if stops and (table.path.name, written[table.path.name]) == stops[0]:
            append(table, raw[: len(raw) // 2 + 3])
            raise Killed
        append(table, raw)

    def drawn(*args: Any, **settings: Any) -> Graph:
        written["graph"] += 1
        if stops and ("graph", written["graph"]) == stops[0]:
            raise Killed
        return attribute(*args, **settings)

    monkeypatch.setattr(Table, "_append", half)
    monkeypatch.setattr(graphs, "attribute", drawn)
    while stops:
        with pytest.raises(Killed):
            run_study(experiment(c))
        del stops[0]
    run_study(experiment(c))
    assert tables(tmp_path) == tables(whole)
    # Headings and blocks of an undisturbed run, and one more of each that was cut.
    n_jobs = 2 * (1 + 2 + 2 + 1)
    assert written == {
        "baseline.csv": 1 + 4 + 1,
        "graph": 2 + 1,
        "effects.own.csv": 1 + n_jobs // 2 + 1,
        "singles.own.csv": 1 + 1 + 1,
    }


def test_a_finished_study_computes_nothing(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables(whole)
    (whole / "runs" / "mine" / "study" / "study.html").unlink()
    monkeypatch.setattr(Table, "_append", None)
    monkeypatch.setattr(graphs, "attribute", None)
    monkeypatch.setattr(Interventions, "blocks", None)
    run_study(experiment(config(whole, whole, least_accuracy=0.7)))
    assert tables(whole).keys() == before.keys()
    changed = {Path(name).name for name, raw in tables(whole).items() if raw != before[name]}
    assert changed == {"summary.json", "study.html"}, "the bar stands there"
    run_study(experiment(config(whole, whole)))
    assert tables(whole) == before


def test_a_prediction_is_the_linear_effect_through_all_others() -> None:
    """Three features after each other, by hand: what the first gives to the logit directly, and through the others."""
    f = np.float32
    weights = np.zeros((6, 6), f)
    weights[1, 0], weights[2, 0], weights[2, 1] = 1.0, 0.5, 2.0
    weights[5, 0], weights[5, 1], weights[5, 2] = 0.1, 0.2, 0.3
    graph = Graph(
        np.zeros(1, np.int32), ("a",), ("x",), np.array([[0, 0, 1], [0, 0, 2], [0, 0, 3]], np.int32),
        np.array([2.0, 4.0, 5.0], f), np.array([7], np.int32), np.ones(1, f), weights[[0, 1, 2, 5]],
    )  # fmt: skip
    d1 = -1 * 1.0 / 4
    d2 = (-1 * 0.5 + d1 * 2.0) / 5
    want = -1 * 0.1 + d1 * 0.2 + d2 * 0.3
    np.testing.assert_allclose(predicted(graph, [[0], [0, 1], []]), [[want], [-0.1 - 0.2 + (-0.5 - 2) / 5 * 0.3], [0]])
    with pytest.raises(DataError, match="no feature 3; it has 3"):
        predicted(graph, [[3]])
