"""A whole study of the demo model with a small random dictionary: its tables, its page, and the same after any stop."""

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.by_hand import coder_of, random_params, sites_of

from saejax.app import experiments
from saejax.attribution import Graph
from saejax.attribution.prediction import predicted
from saejax.core.errors import ConfigError, DataError
from saejax.experiment import default_config
from saejax.interventions import Interventions, zero
from saejax.lm import load_lm
from saejax.study import study
from saejax.study.baseline import as_prompts
from saejax.study.behaviours import read_pairs
from saejax.study.run import run_study
from saejax.trained import Origin, TrainedCoder

READS, WRITES = ("blocks.0.mlp_in", "blocks.1.mlp_in"), ("blocks.0.mlp_out", "blocks.1.mlp_out")


def small(folder: Path, **changes: Any) -> Any:
    """A study of seconds, with the dictionary of `dictionary`."""
    c = default_config()
    c.name, c.runs_dir = "mine", str(folder / "runs")
    c.study.dictionaries = (str(folder / "clt"),)
    c.study.behaviours = ("bracket",)
    c.study.train_pairs, c.study.test_pairs, c.study.graphs = 4, 4, 2
    c.study.groups, c.study.group_size, c.study.controls = 2, 2, 2
    c.study.positions, c.study.resamples, c.study.singles, c.study.every = 2, 1, 3, 8
    c.attribution.max_features = 40
    c.study.update(changes)
    return c


def dictionary(folder: Path) -> TrainedCoder:
    coder = coder_of("clt", "topk", READS, WRITES, 40, 128)
    sae = TrainedCoder(coder, random_params(coder), sites_of(coder, READS, WRITES), Origin(model="demo"))
    sae.save(folder)
    return sae


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("study")
    dictionary(folder / "clt")
    assert run_study(study(small(folder))) == 0
    yield folder


def tables(folder: Path) -> dict[str, bytes]:
    found = (folder / "runs" / "mine" / "study").rglob("*")
    return {path.name: path.read_bytes() for path in found if path.suffix in (".csv", ".html", ".json", ".jsonl")}


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with open(folder / "runs" / "mine" / "study" / name, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_effects_are_those_of_single_runs(whole: Path) -> None:
    """Ablations and patches of the table, each by one run of its own."""
    lm, sae = load_lm("demo"), TrainedCoder.from_folder(whole / "clt")
    inside = Interventions(lm, {"sae": sae})
    prompts = as_prompts(read_pairs(whole / "runs/mine/study/pairs/bracket.test.jsonl"), lm)
    clean, corrupt = inside.run(prompts.clean), inside.run(prompts.corrupt)
    found = rows(whole, "effects.bracket.csv")
    assert len(found) == 2 * (1 + 2 + 2 + 1) * 4
    before = np.asarray(prompts.difference(clean.logits))
    np.testing.assert_allclose([float(row["clean"]) for row in found[:4]], before, rtol=1e-4)
    features = rows(whole, "features.bracket.csv")
    for name in dict.fromkeys(row["group"] for row in found):
        layer, place = (int(part) for part in name.removeprefix("L").split("."))
        own = [int(f["latent"]) for f in features if int(f["layer"]) == layer and int(f["prompts"]) == 2]
        latents = [40 * layer + latent for latent in own[2 * (place - 1) : 2 * place]]
        at = np.arange(prompts.clean.shape[1])[None] >= np.ones((4, 1), int)
        want = prompts.difference(inside.run(prompts.clean, {"sae": zero(latents, at)}).logits)
        got = [float(r["value"]) for r in found if (r["group"], r["kind"]) == (name, "ablate")]
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
        for back in (0, 1):
            logits = []
            for row in range(4):
                from saejax.interventions import set_to

                last = int(prompts.last[row]) - back
                values = np.asarray(corrupt.latents["sae"]).reshape(4, -1, 80)[row, last, latents]
                here = np.arange(prompts.clean.shape[1])[None] == last
                change = set_to(latents, np.broadcast_to(values, (1, prompts.clean.shape[1], 2)), here)
                logits.append(inside.run(prompts.clean[row : row + 1], {"sae": change}).logits)
            want = prompts.difference(np.concatenate(logits))
            got = [
                float(r["value"]) for r in found if (r["group"], r["kind"], r["number"]) == (name, "patch", str(back))
            ]
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_the_page_and_its_graphs(whole: Path) -> None:
    folder = whole / "runs" / "mine" / "study"
    page = (folder / "study.html").read_text()
    for word in ("closes the bracket", "baseline.csv", "graphs/bracket-0.html", "effects.bracket.csv", "Spearman"):
        assert word in page
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert (folder / "graphs" / "bracket-1.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "stop",
    ["no page", "half a line of effects", "no effects", "one graph", "half of the baseline"],
)
def test_a_stopped_study_ends_with_the_same_bytes(stop: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    folder = tmp_path / "copy" / "runs" / "mine" / "study"
    (folder / "study.html").unlink()
    if stop == "half a line of effects":
        path = folder / "effects.bracket.csv"
        path.write_bytes(path.read_bytes()[:-700])
    if stop in ("no effects", "one graph"):
        (folder / "effects.bracket.csv").unlink()
        (folder / "singles.bracket.csv").unlink()
    if stop == "one graph":
        (folder / "graphs" / "bracket" / "1.npz").unlink()
        shutil.rmtree(folder / "graphs" / "bracket" / "1.rows")
    if stop == "half of the baseline":
        path = folder / "baseline.csv"
        path.write_bytes(path.read_bytes()[:200])
    config = small(tmp_path / "copy")
    config.study.dictionaries = (str(whole / "clt"),)
    run_study(study(config))
    assert tables(tmp_path / "copy") == tables(whole)


def test_what_cannot_be_studied_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"none of the behaviours: .* right for argument in \d+%, and study.least_accuracy is 80%"
    ):
        run_study(study(small(tmp_path, behaviours=("argument",))))
    with pytest.raises(ConfigError, match="No behaviour 'brackets'"):
        run_study(study(small(tmp_path, behaviours=("brackets",))))
    with pytest.raises(ConfigError, match=r"names .bracket.; names must differ"):
        study(small(tmp_path, behaviours=("bracket", "bracket")))
    with pytest.raises(ConfigError, match=r"study\.behaviours is empty"):
        study(small(tmp_path, behaviours=()))
    with pytest.raises(ConfigError, match="no section attribution or study"):
        study(experiments.shipped("quickstart"))
    with pytest.raises(DataError, match="holds another study"):
        run_study(study(small(whole, controls=3)))


def test_a_prediction_is_the_linear_effect_through_all_others() -> None:
    """Three features after each other, by hand: what the first gives to the logit directly, and through the others."""
    f = np.float32
    weights = np.zeros((6, 6), f)
    weights[1, 0], weights[2, 0], weights[2, 1] = 1.0, 0.5, 2.0
    weights[5, 0], weights[5, 1], weights[5, 2] = 0.1, 0.2, 0.3
    graph = Graph(
        np.zeros(1, np.int32), ("a",), ("x",), np.array([[0, 0, 1], [0, 0, 2], [0, 0, 3]], np.int32),
        np.array([2.0, 4.0, 5.0], f), np.array([7], np.int32), np.ones(1, f), weights,
    )  # fmt: skip
    d1 = -1 * 1.0 / 4
    d2 = (-1 * 0.5 + d1 * 2.0) / 5
    want = -1 * 0.1 + d1 * 0.2 + d2 * 0.3
    np.testing.assert_allclose(predicted(graph, [[0], [0, 1], []]), [[want], [-0.1 - 0.2 + (-0.5 - 2) / 5 * 0.3], [0]])
    with pytest.raises(DataError, match="no feature 3; it has 3"):
        predicted(graph, [[3]])
