"""What the comparison's tables stand on: the search for an L0, and figures at equal L0 with their intervals."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quality import behind, losses, runs
from benchmarks.quality.changes import by_frequency
from benchmarks.quality.losses import Text, loss_tables, measure_losses
from benchmarks.quality.probes import table as probes_table
from benchmarks.quality.runs import Results, Run, compare
from benchmarks.quality.sets import SETS
from benchmarks.quality.table import Figures, default_table, difference, figures_at
from saejax.coders import CoderConfig, Sites, build
from saejax.evals import EvalConfig, evaluate
from saejax.trained import TrainedCoder

pytestmark = pytest.mark.ci

DATA = SETS["truth"]
DEMO = dataclasses.replace(SETS["demo"], families=("topk",), l0s=(12, 24), seeds=(0,), experiment="quickstart")


def _row(run: Run, l0: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": list(run.key()),
        "set": run.data.name,
        "l0": l0,
        "fve": 0.5,
        "error": [1.0],
        "kept": [1],
    }
    names = ("family", "trainer", "target", "seed", "lr", "dead_share", "l1")
    return row | {name: getattr(run, name) for name in names}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Run], float]], list[Run]]:
    """Replaces training by a function of the run that says its L0; the list holds what was trained."""

    def replace(l0: Callable[[Run], float]) -> list[Run]:
        done: list[Run] = []

        def train(self: Run) -> dict[str, Any]:
            done.append(self)
            return _row(self, l0(self))

        monkeypatch.setattr(runs.Run, "train", train)
        return done

    return replace


@pytest.mark.parametrize("target", [6, 12, 24, 48])
@pytest.mark.parametrize(
    "l0",
    [
        lambda l1: 30 / l1,
        lambda l1: 30 / l1**0.3,
        lambda l1: 8 / l1 + 200 / (1 + math.exp(20 * (math.log(l1) + 0.3))),  # gated's: it jumps
    ],
    ids=["line", "slow", "jump"],
)
def test_the_search_meets_an_l0(tmp_path: Path, trained: Any, l0: Callable[[float], float], target: int) -> None:
    done = trained(lambda run: l0(run.l1))
    row = Results(tmp_path / "r.jsonl").near(Run(DATA, "gated", "saejax", target, 0, None, None), 12)
    assert abs(math.log(row["l0"] / target)) < 0.1
    assert len({run.l1 for run in done}) == len(done) <= 12


def test_a_search_begins_with_what_is_known_of_another_rate(tmp_path: Path, trained: Any) -> None:
    done = trained(lambda run: 30 / run.l1**0.5)
    results, run = Results(tmp_path / "r.jsonl"), Run(DATA, "gated", "saejax", 12, 0, 0.001)
    results.near(run, 12)
    before = len(done)
    results.near(dataclasses.replace(run, lr=0.01), 12)
    assert before > 1 and len(done) == before + 1


def test_where_an_end_is_missed_another_target_is_asked_for(tmp_path: Path, trained: Any) -> None:
    done = trained(lambda run: 0.7 * run.target if run.target > 12 else 1.2 * run.target)
    list(compare(Results(tmp_path / "r.jsonl"), DATA, "jumprelu", ["saejax"]))
    assert {run.target for run in done} == {5, 6, 12, 24, 34}
    assert {run.seed for run in done if run.target in (5, 34)} == set(DATA.seeds)


def _figures(l0s: list[float], errors: list[float]) -> list[dict[str, Any]]:
    return [
        {"seed": 0, "l0": l0, "error": [e], "dead": 0.1 * i} for i, (l0, e) in enumerate(zip(l0s, errors, strict=True))
    ]


def test_figures_at_an_l0_lie_between_the_two_next_to_it_along_its_logarithm() -> None:
    found = figures_at(_figures([9, 16, 64], [4.0, 2.0, 1.0]), np.array([8.0]), 12)
    assert found is not None
    assert found.fve == pytest.approx(1 - 3.0 / 8.0)
    assert found.of_seeds["dead"] == pytest.approx([0.05])


def test_nothing_is_said_where_no_training_is_near() -> None:
    def known(*l0s: float) -> bool:
        return figures_at(_figures(list(l0s), [4.0, 3.0]), np.array([8.0]), 24) is not None

    assert known(16, 36) and not known(12, 104)
    assert known(12, 17) and not known(12, 15)
    assert known(30, 48) and not known(40, 48)


def test_rates_and_defaults_are_compared_at_the_middle_l0() -> None:
    """FVE is 0.5 + 0.1 log L0, and 0.02 less at the largest rate: no other difference is shown."""
    l0s = {0.001: (9, 30), 0.003: (12,), 0.01: (10, 11, 20), None: (6, 14, 24)}
    rows = [
        _row(Run(DATA, "standard", "saejax", 12, 0, lr, None, float(l0)), l0)
        | {"fve": 0.5 + 0.1 * math.log(l0) - (0.02 if lr == 0.01 else 0)}
        for lr, several in l0s.items()
        for l0 in several
    ]
    cells = [cell.strip() for cell in list(default_table(DATA, rows))[-1].strip("|").split("|")]
    assert cells == ["standard", "0.7485", "0.7485", "0.7285", "0.7485", "+0.0000"]


def test_the_interval_of_a_difference_holds_the_true_one_as_often_as_it_says() -> None:
    """Groups of equal variance, errors with noise of seeds and of groups; b is worse by 0.01."""
    held, random, variance = 0, np.random.default_rng(0), np.ones(100)
    for _ in range(40):
        groups = 0.1 * random.normal(size=100)
        a, b = (
            Figures(0.1 + worse + groups + 0.03 * random.normal(size=(5, 100)), variance, {}) for worse in (0.0, 0.01)
        )
        shown = difference(a, b).strip("*")
        low, high = (float(end) for end in shown[shown.index("[") + 1 : -1].split(","))
        held += low <= 0.01 <= high
    assert 34 <= held <= 40


def _dictionary(k: int) -> TrainedCoder:
    """Of the demo model, with random weights."""
    coder = build(CoderConfig(preset="topk", k=k, d_sae=256), DEMO.d_in, 10)
    alone, params = coder.inference(coder.init(jax.random.key(0)), coder.init_stats())
    return TrainedCoder(alone, params, Sites((DEMO.hook_point,), (DEMO.hook_point,), (1.0,), (1.0,)))


def test_a_dictionary_costs_what_the_evaluation_says() -> None:
    text, sae = Text(DEMO, tokens=1), _dictionary(12)
    work, found = text.work, text.line(sae)
    rows = work.experiment.eval.batch_rows
    there = evaluate(sae, work.lm, work.packer, EvalConfig(tokens=1, batch_rows=rows), work.experiment.capture.sinks)
    assert 1 - sum(found["lost"]) / sum(found["zeroed"]) == pytest.approx(there.metrics["loss_recovered"], abs=1e-4)
    assert sum(found["kl"]) / sum(found["predicted"]) == pytest.approx(there.metrics["kl"], rel=1e-4)
    assert found["lost"] == pytest.approx(
        there.documents.columns["ce_sae"] - there.documents.columns["ce_clean"], rel=1e-3, abs=1e-2
    )


def test_only_missing_dictionaries_of_the_table_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each trainer two dictionaries; what they cost is that of random weights: the two differ in k alone."""
    data = dataclasses.replace(DEMO, name=str(tmp_path / "demo"))
    tried = Run(data, "topk", "saelens", 12, 0, 0.1)
    kept = [Run(data, "topk", trainer, k, 0, None) for trainer in runs.TRAINERS for k in data.l0s]
    rows = [_row(run, run.target) for run in (*kept, tried)]
    for run in kept:
        _dictionary(run.target).save(data.dictionary(run.key()) or tmp_path)
    monkeypatch.setattr(losses, "LOSSES", tmp_path / "losses.jsonl")
    monkeypatch.setattr(losses, "Text", lambda data: Text(data, tokens=1))
    assert loss_tables(data) == ""
    measure_losses(data, rows[:4], math.inf)
    first = runs.read(losses.LOSSES)
    measure_losses(data, rows, math.inf)
    lines = runs.read(losses.LOSSES)
    assert lines[:4] == first and [line["key"] for line in lines] == [list(run.key()) for run in kept]
    recovered = [[cell.strip() for cell in line.split("|")[1:-1]] for line in loss_tables(data).splitlines()]
    of_12 = next(cells for cells in recovered if cells[:2] == ["topk", "12"])
    expected = 1 - sum(lines[0]["lost"]) / sum(lines[0]["zeroed"])
    assert of_12[2:] == [f"{expected:.4f}"] * 3 + ["+0.0000 [+0.0000, +0.0000]"] * 2


def test_probes_are_compared_seed_by_seed_and_data_set_by_data_set() -> None:
    """The peers differ by much from data set to data set, and from saejax by 0.01 in every one of them."""
    of_set = {f"set {i}": 0.5 + 0.04 * i for i in range(10)}
    lower = {name: auc - 0.01 for name, auc in of_set.items()}
    scores = {
        ("topk", trainer, seed, 2): of_set if trainer == "saejax" else lower
        for trainer in runs.TRAINERS[:2]
        for seed in (0, 1)
    }
    cells = [cell.strip() for cell in list(probes_table(DEMO, scores, [2]))[-1].split("|")[1:-1]]
    assert cells == ["topk", "2", "0.6800", "0.6700", "-", "**+0.0100 [+0.0100, +0.0100]**", "-"]


@pytest.mark.usefixtures("by_blocks")  # a long list's rows must rise
def test_prefixes_by_frequency_are_those_of_latents_put_in_that_order() -> None:
    coder = build(CoderConfig(preset="matryoshka", d_sae=64, k=5), 16, 1000, tokens=10**6)
    sorted_in_the_loss = dataclasses.replace(coder, terms=tuple(map(by_frequency, coder.terms)))
    x = jax.random.normal(jax.random.key(2), (128, 16))
    params = coder.init(jax.random.key(1)) | {"b_enc": 0.3 * jax.random.normal(jax.random.key(3), (64,))}
    # Of the coder's own code, not of the list that the term sees.
    fires_F = np.asarray(coder.encode(params, x).dense() != 0).sum(0)
    order_F = np.argsort(-fires_F, kind="stable")

    def put(tree: Any, order: Any) -> Any:
        along = {"W_enc": (slice(None), order), "b_enc": order, "W_dec": order}
        return {name: leaf[along[name]] if name in along else leaf for name, leaf in tree.items()}

    def loss(coder: Any, params: Any) -> Any:
        return coder.loss(params, {"x": x, "y": x}, coder.init_stats(), jnp.int32(5))[0]

    got, want = (
        jax.value_and_grad(lambda p, one=one: loss(one, p))(params)
        for one, params in ((sorted_in_the_loss, params), (coder, put(params, order_F)))
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert abs(got[0] - loss(coder, params)) > 1e-3
    for name, leaf in put(want[1], np.argsort(order_F)).items():
        np.testing.assert_allclose(got[1][name], leaf, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("tries", "wanted"),
    [
        ({"a": (0.8785, 0.70), "b": (0.8750, 0.80), "c": (0.8905, 0.66)}, "a"),  # b loses too much
        ({"a": (0.8200, 0.70), "b": (0.8150, 0.80)}, "b"),  # all do
    ],
)
def test_the_best_try_is_ahead_where_saejax_is_behind_and_loses_little(
    monkeypatch: pytest.MonkeyPatch, tries: dict[str, tuple[float, float]], wanted: str
) -> None:
    monkeypatch.setattr(behind, "ahead", lambda cell: ("a peer", [{"fve": 0.878, "f1": 0.77}]))
    cell = behind.Cell("truth", "jumprelu", 24, "f1")
    lines = {behind.DEFAULT: (0.89, 0.64)} | tries
    rows = [
        {"cell": cell.name, "what": what, "seed": seed, "l0": 24.0, "fve": fve, "f1": f1 if seed == 0 else 1.0}
        for what, (fve, f1) in lines.items()
        for seed in (0, 1)
    ]
    assert behind.best(rows, cell) == wanted
