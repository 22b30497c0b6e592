"""Latents that are alike, within a dictionary and between two, against double loops."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny.by_hand import HOOK

from saejax.coders import CoderConfig, Latents, Sites, build
from saejax.core.errors import DataError
from saejax.evals import similarity, stability
from saejax.evals.similarity import CoActivation, cosine_histogram, firing, largest_cosines
from saejax.trained import TrainedCoder


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return abs(float(a @ b)) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30)


@pytest.mark.parametrize("at_once", [1, 30, 10**6], ids=["rows", "blocks", "all"])
def test_the_largest_cosines_equal_a_double_loop(at_once: int) -> None:
    rng = np.random.default_rng(0)
    rows, others = rng.normal(size=(11, 5)), rng.normal(size=(7, 5))
    rows[3], rows[4] = 0, -2 * rows[9]
    want = [max(cosine(a, b) for j, b in enumerate(rows) if j != i) for i, a in enumerate(rows)]
    np.testing.assert_allclose(largest_cosines(rows, at_once=at_once), want, atol=1e-6)
    assert want[3] == 0 and want[4] == pytest.approx(1)
    between = [max(cosine(a, b) for b in others) for a in rows]
    np.testing.assert_allclose(largest_cosines(rows, others, at_once), between, atol=1e-6)
    assert largest_cosines(rows[:1]).tolist() == [0]


def test_the_cosine_histogram_is_of_each_group() -> None:
    got = cosine_histogram([np.eye(3, 8), np.ones((4, 6))])
    assert (
        sum(got["counts"]) == 7
        and got["counts"][0] == 3
        and got["counts"][-1] == 4
        and got["median"] == pytest.approx(1)
    )
    assert len(got["edges"]) == 41 and got["edges"][0] == 0 and got["edges"][-1] == 1


def fires(tokens: int, latents: int, seed: int = 0) -> np.ndarray:
    """Latent 1 fires with latent 0, and on its own half as often; the last fires on 3 tokens only."""
    rng = np.random.default_rng(seed)
    found = rng.random((tokens, latents)) < 0.1
    found[:, 1] = found[:, 0] | (rng.random(tokens) < 0.05)
    found[:, -1] = np.arange(tokens) < 3
    return found


def jaccard(found: np.ndarray) -> list[float]:
    often = [i for i in range(found.shape[1]) if found[:, i].sum() >= 8]
    index = lambda a, b: (a & b).sum() / (a | b).sum()  # noqa: E731
    return [max(index(found[:, i], found[:, j]) for j in often if j != i) for i in often]


def bits(found: np.ndarray) -> np.ndarray:
    return np.asarray(firing(Latents(jnp.asarray(found, jnp.float32), None, found.shape[1])))


def test_coactivation_equals_a_double_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kept tokens alone, in blocks of latents; a latent that fires on 3 tokens is left out."""
    monkeypatch.setattr(similarity, "_PAIRS_AT_ONCE", 60)
    found, keep = fires(300, 21), np.random.default_rng(1).random(300) < 0.7
    together = CoActivation(21, 100, 300)
    for start in range(0, 300, 100):
        part = slice(start, start + 100)
        together.add(bits(found[part]), keep[part])
    got, want = together.histogram(), jaccard(found[keep])
    np.testing.assert_array_equal(got["counts"], np.histogram(want, 40, (0, 1))[0])
    assert got["median"] == pytest.approx(np.median(want)) and got["tokens"] == keep.sum()
    assert got["rare"] == 1 and got["latents"] == 20 and max(want) > 0.5


def test_coactivation_of_many_tokens_and_latents_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fires(4000, 21)
    monkeypatch.setattr(similarity, "_TOKENS", 1000)
    together = CoActivation(21, 400, 4000)
    for start in range(0, 4000, 400):
        together.add(bits(found[start : start + 400]), np.ones(400, bool))
    got = together.histogram(most=5)
    assert got["tokens"] == 1000 and got["latents"] == sum(got["counts"]) == 5
    assert together.histogram(most=5) == got
    monkeypatch.setattr(similarity, "_PRODUCTS", 1000)  # pairs of latents that fire together: about 4 a token
    assert 100 < together.histogram()["tokens"] < 500


def test_coactivation_of_nothing() -> None:
    got = CoActivation(21, 100, 300).histogram()
    assert sum(got["counts"]) == 0 and got["median"] is None and got["rare"] == 21


def dictionary(rows: np.ndarray) -> TrainedCoder:
    coder = build(CoderConfig(preset="topk", d_sae=len(rows), k=2, encoder_centre=False), rows.shape[1], 10)
    params = {"W_enc": rows.T, "b_enc": np.zeros(len(rows)), "W_dec": rows, "b_dec": np.zeros(rows.shape[1])}
    arrays = {name: value.astype(np.float32) for name, value in params.items()}
    return TrainedCoder(coder, arrays, Sites((HOOK,), (HOOK,), (1.0,), (1.0,)))


@pytest.mark.parametrize("most", [4096, 5], ids=["matched", "largest"])
def test_stability_finds_the_latents_that_two_dictionaries_share(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 of 12 rows, in another order and turned round; the other two are at right angles to all of the first's."""
    monkeypatch.setattr(similarity, "MOST", most)
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    first = basis[:12]
    second = np.concatenate([-3 * basis[:10], basis[12:14]])[rng.permutation(12)]
    got = stability(dictionary(first), dictionary(second))
    assert got.method == ("matched" if most > 5 else "largest")
    assert got.mean == pytest.approx(10 / 12, abs=1e-6) and got.share_above == pytest.approx(10 / 12)
    assert stability(dictionary(first), dictionary(first)).mean == pytest.approx(1, abs=1e-6)


def test_stability_of_other_sizes_is_refused() -> None:
    with pytest.raises(DataError, match="different sizes"):
        stability(dictionary(np.eye(4, 6)), dictionary(np.eye(4, 5)))
