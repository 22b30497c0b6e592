"""The known truth against SAELens' own samples and scores, which benchmarks/peers/make_truth_fixtures.py wrote."""

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import ROOT

from saejax.core.config import from_config_dict
from saejax.core.rng import stream
from saejax.evals.similarity import largest_cosines
from saejax.evals.truth import Planted, World, plant
from saejax.evals.truth.hierarchy import make_hierarchy
from saejax.evals.truth.planted import apart, common_causes, magnitudes, probabilities, thresholds
from saejax.evals.truth.scores import block_sums, pair, scored, stacked

pytestmark = pytest.mark.ci

FOLDER = ROOT / "tests" / "fixtures" / "peers" / "truth"
ABOUT = json.loads((FOLDER / "worlds.json").read_text())
WORLDS, SAMPLES = ABOUT["worlds"], ABOUT["samples"]
SCORES = json.loads((FOLDER / "scores.json").read_text())
# Samples of ours, and how many standard errors a statistic may be from theirs, with some 1,600 compared in each world.
OURS, PIECE, FAR = 60_000, 10_000, 6.0


def fixture(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name.replace(' ', '_')}.npz", allow_pickle=False) as file:
        return {key: np.asarray(file[key]) for key in file.files}


def world(name: str) -> World:
    return from_config_dict(World, WORLDS[name])


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_not_drawn_is_equal(name: str) -> None:
    w, theirs = world(name), fixture(name)
    np.testing.assert_allclose(probabilities(w), theirs["base"], atol=1e-6, rtol=0)
    own = probabilities(w) * make_hierarchy(w).factors(probabilities(w)) if w.compensate else probabilities(w)
    np.testing.assert_allclose(np.minimum(own, 1), theirs["probability"], atol=1e-6, rtol=0)
    for of, values in ((w.mean, theirs["mean"]), (w.std, theirs["std"])):
        if of.kind != "folded_normal":
            np.testing.assert_allclose(magnitudes(of, w.n_features, stream(0, "")), values, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", WORLDS)
def test_the_hierarchy_is_theirs_for_the_same_seed(name: str) -> None:
    w, theirs = world(name), fixture(name)
    hierarchy = make_hierarchy(w)
    parent, exclusive = np.full(w.n_features, -1), np.zeros(w.n_features, bool)
    for above, child in hierarchy.pairs():
        parent[child] = above
    for g in hierarchy.generations:
        exclusive[g.first_parent : g.first_parent + len(g.exclusive)] = g.exclusive
    np.testing.assert_array_equal(parent, theirs["parent"])
    np.testing.assert_array_equal(exclusive, theirs["exclusive"])


@pytest.mark.parametrize("name", [name for name, w in WORLDS.items() if w.get("rank")])
def test_thresholds_are_theirs_but_for_their_rounding(name: str) -> None:
    """SAELens takes erfinv(1 - 2 p) in float32; t moves by sqrt(2 pi) exp(t^2 / 2) / 2 times what 1 - 2 p is off."""
    theirs = fixture(name)
    exact_N = thresholds(theirs["probability"].astype(np.float64))
    rounding_N = np.sqrt(2 * np.pi) / 2 * np.exp(exact_N**2 / 2) * 2**-24
    assert (np.abs(exact_N - theirs["threshold"]) <= rounding_N + 1e-6 * np.maximum(1, np.abs(exact_N))).all()


@pytest.mark.parametrize("name", [name for name, w in WORLDS.items() if w.get("rank")])
def test_common_causes_have_their_lengths(name: str) -> None:
    """The factors are drawn, by another stream; rows that are too long are cut to the same length."""
    w, theirs = world(name), fixture(name)
    squared_N = np.square(common_causes(dataclasses.replace(w, n_features=20_000))).sum(1)
    np.testing.assert_allclose(theirs["own"], 1 - np.square(theirs["causes"].astype(np.float64)).sum(1), atol=1e-5)
    longest = np.square(theirs["causes"].astype(np.float64)).sum(1).max()
    assert squared_N.max() == pytest.approx(longest, abs=1e-5) if longest > 0.98 else squared_N.max() < 0.99 + 1e-9
    # The mean of min(chi-squared, 0.99) in both, at 40 rows of theirs.
    spread = squared_N.std() / np.sqrt(w.n_features)
    assert abs(squared_N.mean() - np.square(theirs["causes"]).sum(1).mean()) < 4 * spread


def ours(name: str) -> dict[str, np.ndarray]:
    """The statistics of our generator on what theirs had drawn: probabilities, magnitudes, causes, directions."""
    theirs, w = fixture(name), world(name)
    causes = theirs.get("causes", np.zeros((w.n_features, 0)))
    given = (theirs[key] for key in ("directions", "bias", "probability", "mean", "std"))
    planted = Planted(w, *given, make_hierarchy(w), causes)
    sums: dict[str, Any] = {}
    for piece in range(OURS // PIECE):
        x, a = (np.asarray(one, np.float64) for one in planted.sample(stream(1, "test", piece), PIECE))
        fires = (a > 0).astype(np.float64)
        count = fires.sum(1)
        now = {
            "rate": fires.sum(0), "size": a.sum(0), "active": np.array([count.sum(), np.square(count).sum()]),
            "together": fires.T @ fires, "product": a.T @ a, "x_mean": x.sum(0), "x_cov": x.T @ x,
        }  # fmt: skip
        sums = {key: sums.get(key, 0) + value for key, value in now.items()}
    s = {key: value / OURS for key, value in sums.items()}
    s["x_cov"] -= np.outer(s["x_mean"], s["x_mean"])
    return s


@pytest.mark.parametrize("name", WORLDS)
def test_samples_have_their_statistics(name: str) -> None:
    theirs, own = fixture(name), ours(name)
    both = 1 / SAMPLES + 1 / OURS

    def near(found: np.ndarray, wanted: np.ndarray, variance: np.ndarray, what: str) -> None:
        off = np.abs(found - wanted) / np.sqrt(variance * both + 1e-14)
        assert off.max() < FAR, (what, off.max())

    for what in ("rate", "together"):
        p = (SAMPLES * theirs[what].astype(np.float64) + OURS * own[what]) / (SAMPLES + OURS)
        near(own[what], theirs[what], p * (1 - p), what)
        # Who never fires together there never does here: exclusive siblings, children of silent parents.
        assert ((own[what] == 0) == (theirs[what] == 0))[own[what] + theirs[what] > 50 / OURS].all()
    # What a feature gives where it fires: its second moment is the diagonal of `product`.
    rate, size = np.maximum(theirs["rate"], 1e-9), theirs["size"].astype(np.float64)
    of_size = np.maximum(np.diag(theirs["product"]) / rate - size**2, 1e-6) / rate
    near(own["size"] / np.maximum(own["rate"], 1e-9), size, of_size, "size")
    # Of pairs that fire together 100 times or more: a variance cannot be told from fewer.
    often, squared = theirs["together"] >= 100 / SAMPLES, theirs["product"].astype(np.float64) ** 2
    near(own["product"][often], theirs["product"][often], (theirs["product2"] - squared)[often], "product")
    mean, variance = theirs["active"].astype(np.float64)
    assert abs(own["active"][0] - mean) < FAR * np.sqrt(variance * both)
    assert own["active"][1] - own["active"][0] ** 2 == pytest.approx(variance, rel=0.03)
    scale = np.sqrt(np.diag(theirs["x_cov"]))
    assert (np.abs(own["x_cov"] - theirs["x_cov"]) / np.outer(scale, scale)).max() < 0.03
    assert (np.abs(own["x_mean"] - theirs["x_mean"]) / scale).max() < FAR * np.sqrt(both)


def test_siblings_exclude_each_other_and_silent_parents_silence() -> None:
    """Exactly, not on average."""
    w = world("all")
    planted = plant(w)
    a_BN = np.asarray(planted.sample(stream(0, "test"), 20_000)[1])
    hierarchy, fires_BN = planted.hierarchy, a_BN > 0
    assert fires_BN.any(0).all()
    for parent, child in hierarchy.pairs():
        assert not (fires_BN[:, child] & ~fires_BN[:, parent]).any()
    for g in hierarchy.generations:
        for number in np.flatnonzero(g.exclusive):
            first = g.start + number * w.branching
            assert fires_BN[:, first : min(first + w.branching, g.stop)].sum(1).max() <= 1


def test_directions_are_pushed_apart_as_theirs() -> None:
    theirs = fixture("directions")
    for steps in (1, 100):
        found = np.asarray(apart(jnp.asarray(theirs["start"]), steps, 0.01))
        np.testing.assert_allclose(found, theirs[f"after_{steps}"], atol=2e-4)


def test_superposition_is_theirs() -> None:
    theirs = fixture("directions")
    assert largest_cosines(theirs["one"]).mean() == pytest.approx(theirs["mean_max_apart"][0], abs=1e-6)
    for name, steps in (("random", 0), ("apart", 200)):
        wanted = theirs[f"mean_max_{name}"]
        made = World(n_features=128, d_in=32, orthogonal_steps=steps)
        assert abs(largest_cosines(plant(made).directions).mean() - wanted.mean()) < 5 * wanted.std(ddof=1)


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_theirs(name: str) -> None:
    """On the same decoder, latents and samples; in blocks of other sizes than theirs."""
    case, theirs = fixture(f"scores_{name}"), SCORES[name]
    families = make_hierarchy(world("all")).pairs()
    pairing = pair(case["W_dec"], case["directions"], families)
    blocks = [
        block_sums(*(jnp.asarray(case[key][start : start + 60]) for key in ("z", "a", "x", "x_hat")), pairing.places)
        for start in range(0, 600, 60)
    ]
    found = scored(stacked(blocks), pairing)
    same = {
        "true_l0": "true_l0", "sae_l0": "l0", "dead_latents": "dead", "shrinkage": "shrinkage", "mcc": "mcc",
        "explained_variance": "fve", "uniqueness": "uniqueness", "precision": "precision", "recall": "recall",
        "f1_score": "f1", "accuracy": "accuracy",
    }  # fmt: skip
    assert same.keys() == theirs.keys()
    for there, here in same.items():
        assert found.figures[here] == pytest.approx(theirs[there], rel=1e-5, abs=1e-6), here
