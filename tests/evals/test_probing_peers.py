"""Probes, activations and absorption beside the code of sae-probes and SAEBench.

benchmarks/peers/make_probe_fixtures.py makes the fixtures.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saejax
from saejax.evals.probing.first_letter import absorbed, splits
from saejax.evals.probing.last_token import Reader
from saejax.evals.probing.sparse import probe_activations, probe_latents, split

pytestmark = pytest.mark.ci

FIXTURES = Path(__file__).parents[1] / "fixtures" / "peers" / "probes"
ROWS = json.loads((FIXTURES / "sparse.json").read_text())
CASES = sorted({(row["dataset"], row["penalty"], row["train_rows"]) for row in ROWS if row["k"]})


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / "sparse.npz"))


@pytest.mark.parametrize(("name", "penalty", "n_train"), CASES)
def test_latents_and_scores_of_sae_probes(arrays: dict[str, np.ndarray], name: str, penalty: str, n_train: int) -> None:
    pytest.importorskip("sklearn.linear_model", exc_type=ImportError)
    theirs = {r["k"]: r for r in ROWS if (r["dataset"], r["penalty"], r["train_rows"]) == (name, penalty, n_train)}
    theirs.pop(0, None)
    x, y = arrays[f"{name}/x"].astype(np.float32) / 8, arrays[f"{name}/y"].astype(np.int64)

    def encode(rows: np.ndarray) -> np.ndarray:
        return np.maximum(rows @ arrays["W_enc"] + arrays["b_enc"], 0)

    rows = split(name, y, 42, n_train)
    found, latents = probe_latents(encode, x, y, rows, sorted(theirs), penalty, 42)
    for k, one in theirs.items():
        # Latents that fire for no training row differ by nothing: which of them come last decides nothing.
        live = int((np.abs(encode(x[rows.train])).sum(0) > 0).sum())
        assert latents[: min(k, live)].tolist() == one["latents"][: min(k, live)]
        for key in ("auc", "accuracy", "f1", "val_auc"):
            assert getattr(found[k], key) == pytest.approx(one[key], abs=1e-6), (k, key)


def test_the_baseline_is_that_of_sae_probes(arrays: dict[str, np.ndarray]) -> None:
    pytest.importorskip("sklearn.linear_model", exc_type=ImportError)
    (first, *_) = (row for row in ROWS if not row["k"])
    x, y = (arrays[f"{first['dataset']}/{part}"] for part in ("x", "y"))
    labels = y.astype(np.int64)
    found = probe_activations(x.astype(np.float32) / 8, labels, split("a", labels, 42), 42)
    for key in ("auc", "accuracy", "f1", "val_auc"):
        assert getattr(found, key) == pytest.approx(first[key], abs=1e-6), key


def test_activations_of_the_last_token_are_those_of_sae_probes(tmp_path: Path) -> None:
    texts, theirs = json.loads((FIXTURES / "texts.json").read_text()), np.load(FIXTURES / "last_token.npz")
    lm = saejax.load_lm(dtype="float32")
    bos = bool((theirs["first"] == lm.tokenizer.bos_id).all())
    reader = Reader(lm, ("blocks.2.resid_post",), bos, 48, 128, "float32", tmp_path)
    assert max(map(len, reader.ids(texts))) == 48, "one text is cut"
    found = reader.of_texts("texts", texts)["blocks.2.resid_post"]
    np.testing.assert_allclose(found, theirs["x"], rtol=1e-5, atol=1e-5 * np.abs(theirs["x"]).max())


def test_absorption_of_saebench() -> None:
    given = np.load(FIXTURES / "absorption.npz")
    cases = sorted({name.split("/")[0] for name in given} - {"splits"})
    seen: list[Any] = []
    for case in cases:
        z, x, W_dec, p, main, fraction, full = (
            given[f"{case}/{key}"] for key in ("z", "x", "W_dec", "p", "main", "fraction", "full")
        )
        found = absorbed(z, x, W_dec, p, main.tolist())
        np.testing.assert_allclose(found.fraction, fraction, atol=1e-5)
        np.testing.assert_array_equal(found.full, full)
        seen += fraction.tolist()
        # A decoder with rows of other lengths, and latents that make up for it, is the same dictionary.
        length = np.linspace(0.5, 3, len(W_dec), dtype=np.float32)
        longer = absorbed(z / length, x, W_dec * length[:, None], p, main.tolist())
        np.testing.assert_allclose(longer.fraction, fraction, atol=1e-5)
    assert min(seen) == 0 and max(seen) == 1 and any(0 < f < 1 for f in seen), "each branch is taken"
    assert [splits(row, 0.03) for row in given["splits/f1"]] == given["splits/n"].tolist()
