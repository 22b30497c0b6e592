"""Scores against a known truth: each by counting, sample by sample, and what dictionaries that are known must get."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from saejax.coders import CoderConfig, Sites, build
from saejax.core.errors import DataError
from saejax.evals.truth import Planted, World, plant, score
from saejax.evals.truth.hierarchy import make_hierarchy
from saejax.evals.truth.scores import block_sums, pair, parents_share, scored, stacked
from saejax.trained import TrainedCoder

D, N = 12, 20
TREES = World(n_features=N, d_in=D, roots=3, branching=2, depth=2, p_max=0.5, p_min=0.2, orthogonal_steps=50, bias=0.3)
FAMILIES = make_hierarchy(TREES).pairs()


def arrays(seed: int, width: int = 15, n: int = 80) -> dict[str, np.ndarray]:
    """Latents and magnitudes of no special kind; one latent is dead, one feature silent, one activation 0."""
    rng, truth = np.random.default_rng(seed), plant(TREES).directions
    rows = truth[rng.permutation(N)[:width]] + rng.normal(size=(width, D)) * 0.15
    rows[2] += 0.8 * rows[1]
    z = rng.normal(size=(n, width)) * (rng.random((n, width)) < 0.4)
    a = rng.random((n, N)) * (rng.random((n, N)) < 0.5)
    for parent, child in FAMILIES:
        a[:, child] *= a[:, parent] > 0
    z[:, 0], a[:, 5] = 0, 0
    x, x_hat = rng.normal(size=(2, n, D)) + 0.5
    x[7] = 0
    found = {"W_dec": rows, "z": z, "a": a, "x": x, "x_hat": x_hat}
    return {name: value.astype(np.float32) for name, value in found.items()}


@pytest.mark.parametrize("bias", [0.0, 300.0, 3e4])
def test_explained_variance_does_not_depend_on_where_the_activations_lie(bias: float) -> None:
    """Blocks of 16 of float32 numbers, against float64."""
    case, pairing = arrays(4), pair(arrays(4)["W_dec"], plant(TREES).directions, FAMILIES)
    x, x_hat = ((case[name] + np.float32(bias)).reshape(5, 16, D) for name in ("x", "x_hat"))
    z, a = (case[name].reshape(5, 16, -1) for name in ("z", "a"))
    found = scored(stacked([block_sums(*block, pairing.places) for block in zip(z, a, x, x_hat, strict=True)]), pairing)
    error = np.square(x.astype(np.float64) - x_hat).sum()
    want = 1 - error / np.square(x - x.reshape(-1, D).mean(0, dtype=np.float64)).sum()
    assert found.figures["fve"] == pytest.approx(want, rel=1e-5)
    low, high = found.intervals["fve"]
    assert low < want < high


def by_counting(case: dict[str, np.ndarray], truth: np.ndarray) -> dict[str, float]:
    """The definitions of docs/truth.md, in float64."""
    z, a, x, x_hat = (case[name].astype(np.float64) for name in ("z", "a", "x", "x_hat"))

    def detector(fires: np.ndarray, true: np.ndarray) -> list[float]:
        tp, fp = (fires & true).sum(), (fires & ~true).sum()
        fn, tn = (~fires & true).sum(), (~fires & ~true).sum()
        precision = tp / (tp + fp) if tp + fp else 0.0
        recall = tp / (tp + fn) if tp + fn else 0.0
        both = precision + recall
        return [precision, recall, 2 * precision * recall / both if both else 0.0, (tp + tn) / len(fires)]

    cosine = np.abs(case["W_dec"] @ truth.T) / np.linalg.norm(case["W_dec"], axis=1)[:, None]
    names = ("precision", "recall", "f1", "accuracy")
    latents = [detector(z[:, f] != 0, a[:, cosine[f].argmax()] > 0) for f in range(z.shape[1])]
    features = [detector(z[:, cosine[:, i].argmax()] != 0, a[:, i] > 0) for i in range(N)]
    norm = np.linalg.norm(x, axis=1)
    absorbed = together = 0
    for parent, child in FAMILIES:
        its, own = cosine[:, parent].argmax(), cosine[:, child].argmax()
        if its == own or min(cosine[its, parent], cosine[own, child]) < 0.5:
            continue
        row = case["W_dec"][own].astype(np.float64)
        sign = np.sign(row @ truth[child])
        beta = np.linalg.lstsq(truth[[child, parent]].T.astype(np.float64), sign * row / np.linalg.norm(row))[0][1]
        for i in range(len(z)):
            together += a[i, child] > 0
            absorbed += a[i, child] > 0 and z[i, own] != 0 and z[i, its] == 0 and beta >= 0.1
    return {
        **dict(zip(names, np.mean(latents, 0), strict=True)),
        **{f"feature_{name}": value for name, value in zip(names, np.mean(features, 0), strict=True)},
        "shrinkage": np.mean(np.linalg.norm(x_hat, axis=1)[norm > 1e-6] / norm[norm > 1e-6]),
        "fve": 1 - np.square(x - x_hat).sum() / np.square(x - x.mean(0)).sum(),
        "l0": (z != 0).sum(1).mean(),
        "true_l0": (a > 0).sum(1).mean(),
        "dead": (z == 0).all(0).sum(),
        "absorption": absorbed / together,
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_every_figure_is_what_counting_gives(seed: int) -> None:
    case, truth = arrays(seed), plant(TREES).directions
    pairing = pair(case["W_dec"], truth, FAMILIES)
    assert 3 < len(pairing.families) < len(FAMILIES) and 0 < pairing.shares.sum() < len(pairing.shares)
    parts = [
        block_sums(*(jnp.asarray(case[name][i : i + 16]) for name in ("z", "a", "x", "x_hat")), pairing.places)
        for i in range(0, 80, 16)
    ]
    found = scored(stacked(parts), pairing)
    wanted = by_counting(case, truth)
    assert {"mcc", "uniqueness"} | wanted.keys() == found.figures.keys()
    for name, value in wanted.items():
        assert found.figures[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert found.latents["f1"].mean() == pytest.approx(wanted["f1"], rel=1e-6)
    assert found.features["f1"].mean() == pytest.approx(wanted["feature_f1"], rel=1e-6)
    # Of weights alone there is no interval over samples, and none of what never happened.
    assert found.intervals.keys() == wanted.keys() - {"dead"}


def test_intervals_are_as_wide_as_the_samples_scatter() -> None:
    """L0 of 100 blocks is their mean: the interval is that of its standard error."""
    rng, case = np.random.default_rng(0), arrays(0)
    pairing = pair(case["W_dec"], plant(TREES).directions, FAMILIES)
    one = jax.device_get(block_sums(*(jnp.asarray(case[n]) for n in ("z", "a", "x", "x_hat")), pairing.places))
    fires_KF = rng.integers(0, 80, (100, 15))
    found = scored(stacked([one | {"fires": fires} for fires in fires_KF]), pairing)
    l0_K = fires_KF.sum(1) / 80
    low, high = found.intervals["l0"]
    assert high - low == pytest.approx(2 * 1.96 * l0_K.std() / 10, rel=0.1)
    assert (low + high) / 2 == pytest.approx(l0_K.mean(), rel=0.01)


def test_the_parents_share_is_that_of_least_squares_with_either_sign() -> None:
    truth = plant(TREES).directions.astype(np.float64)
    families = np.array([[0, 3], [1, 5]])
    rows = np.stack([truth[3] + 0.5 * truth[0], -(2 * truth[5] - 0.4 * truth[1])])
    wanted = [0.5 / np.linalg.norm(rows[0]), -0.4 / np.linalg.norm(rows[1])]
    np.testing.assert_allclose(parents_share(rows, truth, families), wanted, atol=1e-6)


# --- dictionaries that are known -----------------------------------------------------------------------------


def dictionary(W_dec: np.ndarray, W_enc: np.ndarray, b_enc: np.ndarray, b_dec: np.ndarray) -> TrainedCoder:
    coder = build(
        CoderConfig(preset="standard", d_sae=len(W_dec), encoder_centre=False), [W_dec.shape[1]], 10, [W_dec.shape[1]]
    )
    params = {"W_enc": W_enc, "b_enc": b_enc, "W_dec": W_dec, "b_dec": b_dec}
    float32 = {name: np.asarray(value, np.float32) for name, value in params.items()}
    return TrainedCoder(coder, float32, Sites(("x",), ("x",), (1.0,), (1.0,), False))


@pytest.fixture(scope="module")
def orthogonal() -> Planted:
    """Eight features in eight dimensions, one the other's parent, without noise: a linear encoder reads them off."""
    w = World(
        n_features=8,
        d_in=8,
        roots=1,
        branching=2,
        depth=1,
        exclusive=1.0,
        p_max=0.5,
        p_min=0.3,
        orthogonal_steps=0,
        bias=0.5,
    )
    made = plant(w)
    return dataclasses.replace(made, directions=np.eye(8, dtype=np.float32))


def test_the_truth_itself_scores_1(orthogonal: Planted) -> None:
    bias = orthogonal.bias
    found = score(dictionary(np.eye(8), np.eye(8), np.full(8, -0.01), bias), orthogonal, 2000)
    for name in ("mcc", "uniqueness", "precision", "recall", "f1", "accuracy", "feature_f1"):
        assert found.figures[name] == pytest.approx(1, abs=1e-6), name
    assert found.figures["absorption"] == 0 and found.families == 2
    assert found.figures["l0"] == found.figures["true_l0"]
    assert found.figures["fve"] == pytest.approx(1 - 0.01**2 * found.figures["l0"] / 2, abs=0.01)


def test_a_parent_that_its_children_absorb_is_counted(orthogonal: Planted) -> None:
    """Latent 0 is silent where feature 1 or 2 fires, and their latents write the parent too."""
    W_dec, W_enc, bias = np.eye(8), np.eye(8), orthogonal.bias
    W_dec[1:3, 0] = 1
    W_enc[1:3, 0] = -1
    found = score(dictionary(W_dec, W_enc, np.full(8, -0.01), bias), orthogonal, 2000)
    assert found.figures["absorption"] == pytest.approx(1, abs=1e-9)
    assert found.figures["precision"] == pytest.approx(1, abs=1e-6)
    assert found.features["recall"][0] < 0.8 and found.features["recall"][3:].min() == 1
    assert found.figures["fve"] > 0.99
    # The same latents with decoders of their own are merely blind: nothing is absorbed.
    blind = score(dictionary(np.eye(8), W_enc, np.full(8, -0.01), bias), orthogonal, 2000)
    assert blind.figures["absorption"] == 0 and blind.features["recall"][0] == found.features["recall"][0]


def test_without_families_there_is_no_absorption() -> None:
    planted = plant(dataclasses.replace(TREES, roots=0))
    found = score(_any(4), planted, 200)
    assert math.isnan(found.figures["absorption"]) and "absorption" not in found.intervals
    assert found.to_json()["figures"]["absorption"] is None


def _any(width: int) -> TrainedCoder:
    rng = np.random.default_rng(0)
    return dictionary(rng.normal(size=(width, D)), rng.normal(size=(D, width)), np.zeros(width), np.zeros(D))


def test_dictionaries_are_scored_on_the_same_samples_and_again_alike() -> None:
    planted = plant(TREES)
    first, again, other = score(_any(4), planted, 500), score(_any(4), planted, 500), score(_any(6), planted, 500)
    assert first.to_json() == again.to_json()
    np.testing.assert_array_equal(first.features["rate"], other.features["rate"])
    assert first.n_samples == 500


def test_another_width_is_refused() -> None:
    with pytest.raises(DataError, match=r"reads \(12,\) and writes \(12,\); the world's activations are \(9,\)"):
        score(_any(4), plant(dataclasses.replace(TREES, d_in=9)), 100)
