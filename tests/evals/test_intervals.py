"""The bootstrap over documents: its draws, its coverage, its figures against NumPy, and paired comparisons."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny.by_hand import (
    ROW,
    SIDES,
    captured_at,
    coder_of,
    documents,
    log_p,
    numpy_coder,
    pack_all,
    random_params,
    sites_of,
    source,
    tiny_lm,
)

from saejax.app.stages.evaluate import _documents as documents_content
from saejax.core.errors import DataError
from saejax.evals import Difference, Documents, EvalConfig, Evaluated, compare, evaluate, evaluate_together
from saejax.evals.breakdown import ReadText
from saejax.evals.centred import about_zero, variance
from saejax.evals.intervals import FEWEST, RESAMPLES, resample_interval, weights
from saejax.evals.resampled import Dimensions, Slots
from saejax.lm import LanguageModel
from saejax.text import PackedRows, Packer, Source, parts_of
from saejax.text.mixture import mixed
from saejax.trained import TrainedCoder


def test_the_draws_are_a_function_of_the_document() -> None:
    """In whatever order and company; and the same in every program: the first numbers are written down here."""
    drawn_WN = weights(np.arange(400))
    assert drawn_WN.shape == (RESAMPLES, 400) and drawn_WN.dtype == np.float32
    np.testing.assert_array_equal(weights(np.array([7, 3])), drawn_WN[:, [7, 3]])
    assert drawn_WN[:12, 7].tolist() == GOLDEN
    assert not np.array_equal(weights(np.arange(5), seed=1), drawn_WN[:, :5])
    # A Poisson number of mean 1: mean, variance, P(0), and no two documents alike.
    assert drawn_WN.mean() == pytest.approx(1, abs=0.01) and drawn_WN.var() == pytest.approx(1, abs=0.02)
    assert (drawn_WN == 0).mean() == pytest.approx(np.exp(-1), abs=0.005)
    assert np.abs(np.corrcoef(drawn_WN.T)[np.triu_indices(400, 1)]).max() < 0.2


GOLDEN = [0.0, 0.0, 0.0, 1.0, 3.0, 0.0, 0.0, 2.0, 2.0, 1.0, 2.0, 0.0]


def test_the_document_bootstrap_covers_the_truth_and_the_token_bootstrap_does_not() -> None:
    """200 texts of 40 documents whose tokens are alike: mean 0, half of the variance is the document's."""
    rng, n_documents, length = np.random.default_rng(0), 40, 20
    covered = {"documents": 0, "tokens": 0}
    for repetition in range(200):
        tokens_NT = rng.normal(size=(n_documents, 1)) + rng.normal(size=(n_documents, length))
        drawn_WN = weights(1000 * repetition + np.arange(n_documents))
        resampled = {"documents": drawn_WN @ tokens_NT.mean(1) / drawn_WN.sum(1)}
        of_tokens = rng.poisson(size=(200, tokens_NT.size))
        resampled["tokens"] = of_tokens @ tokens_NT.ravel() / of_tokens.sum(1)
        for name, values in resampled.items():
            ends = resample_interval(values, n_documents)
            assert ends is not None
            covered[name] += ends[0] <= 0 <= ends[1]
    assert 0.90 <= covered["documents"] / 200 <= 0.98
    assert covered["tokens"] / 200 < 0.55


def test_an_interval_needs_documents_and_finite_figures() -> None:
    values = np.linspace(0, 1, 1001)
    assert resample_interval(values, FEWEST) == pytest.approx([0.025, 0.975])
    assert resample_interval(values, FEWEST - 1) is None and resample_interval(values, 1) is None
    assert resample_interval(np.where(values < 0.03, np.nan, values), 50) is not None
    assert resample_interval(np.where(values < 0.3, np.nan, values), 50) is None


# ------------------------------------------------------------------------------------- an evaluation done by hand


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm()


@pytest.fixture(scope="module")
def packed(lm: LanguageModel) -> PackedRows:
    return pack_all(lm)


def trained(topology: str, seed: int = 0) -> TrainedCoder:
    reads, writes = SIDES[topology]
    coder = coder_of(topology, "topk", reads, writes)
    params = {name: value * (1 + 0.2 * seed) for name, value in random_params(coder).items()}
    return TrainedCoder(coder, params, sites_of(coder, reads, writes))


def evaluated(lm: LanguageModel, *saes: TrainedCoder, texts: list[str] | None = None) -> list[Evaluated]:
    packer = Packer(source(documents() if texts is None else texts), lm.tokenizer, ROW)
    return evaluate_together(saes, lm, packer, EvalConfig(tokens=10**6, batch_rows=4))


@pytest.fixture(scope="module")
def both(lm: LanguageModel) -> list[Evaluated]:
    return evaluated(lm, trained("layernorm_autoencoder"), trained("layernorm_autoencoder", 1))


def by_hand(lm: LanguageModel, packed: PackedRows, topology: str) -> dict[str, np.ndarray]:
    """Of each kept token y, y_hat and L0; of each predicted token the losses; and the documents of both."""
    reads, writes = SIDES[topology]
    x, y = (captured_at(lm, packed, side) for side in (reads, writes))
    f, y_hat = numpy_coder(topology, "topk", random_params(coder_of(topology, "topk", reads, writes)), x)
    keep, own = packed.keep.ravel(), packed.segments
    found = {"y": y[keep], "y_hat": y_hat[keep], "l0": (f[keep] != 0).sum(1), "at": packed.documents.ravel()[keep]}
    predicted = (own[:, 1:] == own[:, :-1]) & (own[:, 1:] >= 0)
    following = packed.tokens[:, 1:, None]
    sides = {name: y_hat[:, i].reshape(*packed.tokens.shape, -1) for i, name in enumerate(writes)}
    for kind, values in (("clean", {}), ("sae", sides), ("zero", {n: 0 * v for n, v in sides.items()})):
        if len(values) < 2:  # one site is replaced by constants; several would have to be, one after the other
            clean = {n: captured_at(lm, packed, (n,)).reshape(sides[n].shape) for n in values}
            constants = {n: np.where(packed.keep[:, :, None], values[n], clean[n]) for n in values}
            lost = -np.take_along_axis(log_p(lm, packed, constants)[:, : ROW - 1], following, 2)[:, :, 0]
            found[kind] = lost[predicted]
    return found | {"predicted_at": packed.documents[:, :-1][predicted]}


def metrics_by_hand(found: dict[str, np.ndarray], weight: np.ndarray) -> dict[str, float]:
    """The definitions, each token so often as its document."""
    w = weight[found["at"]].astype(np.float64)
    y, e = found["y"].reshape(len(w), -1), (found["y"] - found["y_hat"]).reshape(len(w), -1)
    mean = (w @ y) / w.sum()
    variance, error = w @ (y - mean) ** 2, w @ e**2
    values = {
        "l0": (w @ found["l0"]) / w.sum(),
        "fve": 1 - error.sum() / variance.sum(),
        "r2": (1 - error / variance).mean(),
        "fve_centred_error": 1 - (w @ (e - (w @ e) / w.sum()) ** 2).sum() / variance.sum(),
        "relative_error": error.sum() / (w @ y**2).sum(),
        "mse": error.sum() / w.sum() / y.shape[1],
    }
    if "sae" in found:
        v = weight[found["predicted_at"]].astype(np.float64)
        clean, sae, zero = ((v @ found[kind]) / v.sum() for kind in ("clean", "sae", "zero"))
        values |= {"ce_clean": clean, "ce_sae": sae, "loss_recovered": (zero - sae) / (zero - clean)}
    return values


@pytest.mark.parametrize("topology", ["layernorm_autoencoder", "clt"])
def test_the_resampled_metrics_are_those_of_the_documents_drawn(
    lm: LanguageModel, packed: PackedRows, topology: str
) -> None:
    """Documents that go on in the next batch are one; the sites of a transcoder of several layers have their own."""
    (done,) = evaluated(lm, trained(topology))
    found = by_hand(lm, packed, topology)
    drawn_WN = weights(np.arange(14))
    for w in (0, 1, 617, 999):
        for name, value in metrics_by_hand(found, drawn_WN[w]).items():
            assert done.documents.resampled[name][w] == pytest.approx(value, rel=2e-3, abs=1e-5), (w, name)
        for i, site in enumerate(SIDES[topology][1] if topology == "clt" else ()):
            own = {**found, "y": found["y"][:, i], "y_hat": found["y_hat"][:, i]}
            want = metrics_by_hand(own, drawn_WN[w])["fve"]
            assert done.documents.resampled[f"fve/{site}"][w] == pytest.approx(want, rel=2e-3, abs=1e-5)
    without = {"dead_fraction", "gram_rms"}
    assert done.documents.resampled.keys() == done.metrics.keys() - without
    for name, ends in done.documents.intervals.items():
        assert ends is not None and ends[0] <= ends[1], name
        np.testing.assert_allclose(ends, np.quantile(done.documents.resampled[name], [0.025, 0.975]))


def test_the_sums_of_each_document(lm: LanguageModel, packed: PackedRows) -> None:
    (done,) = evaluated(lm, trained("layernorm_autoencoder"))
    found, columns = by_hand(lm, packed, "layernorm_autoencoder"), done.documents.columns
    assert done.documents.numbers.tolist() == list(range(14))
    y, e = found["y"].reshape(len(found["y"]), -1), (found["y"] - found["y_hat"]).reshape(len(found["y"]), -1)
    of_token = {
        "tokens": np.ones(len(y)),
        "variance": ((y - y.mean(0)) ** 2).sum(1),
        "error2": (e**2).sum(1),
        "norm2": (y**2).sum(1),
        "relative": np.linalg.norm(e, axis=1) / np.linalg.norm(y, axis=1),
        "l0": found["l0"],
    }
    for name, values in of_token.items():
        np.testing.assert_allclose(columns[name], np.bincount(found["at"], values, 14), rtol=2e-3, err_msg=name)
    for name, values in (("ce_clean", found["clean"]), ("ce_sae", found["sae"]), ("ce_zero", found["zero"])):
        np.testing.assert_allclose(columns[name], np.bincount(found["predicted_at"], values, 14), rtol=2e-3)
    assert columns["predicted"].sum() == len(found["predicted_at"])
    assert 1 - columns["error2"].sum() / columns["variance"].sum() == pytest.approx(done.metrics["fve"], rel=1e-4)


def test_the_same_evaluation_has_the_same_bits(lm: LanguageModel, both: list[Evaluated]) -> None:
    (again,) = evaluated(lm, trained("layernorm_autoencoder"))
    assert again.documents.intervals == both[0].documents.intervals
    assert again.breakdown == both[0].breakdown and again.coactivation == both[0].coactivation
    assert again.documents.text == both[1].documents.text


def test_one_document_has_no_interval(lm: LanguageModel) -> None:
    (done,) = evaluated(lm, trained("transcoder"), texts=documents()[:1])
    assert set(done.documents.intervals.values()) == {None} and done.metrics["l0"] > 0
    assert documents_content(done.documents)["note"] == "no intervals: 1 documents, and they need 10"
    assert "note" not in documents_content(dataclasses.replace(done.documents, numbers=np.arange(10)))


# --------------------------------------------------------------------------------------------------------- paired


def test_a_file_of_documents_comes_back(both: list[Evaluated], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "documents.npz"
    both[0].documents.save(path)
    first = path.read_bytes()
    back = Documents.load(path)
    assert back.intervals == both[0].documents.intervals and back.sites == (SIDES["layernorm_autoencoder"][1])
    assert back.metrics == both[0].documents.metrics and back.text == both[0].documents.text
    for name, values in both[0].documents.columns.items():
        np.testing.assert_array_equal(back.columns[name], values)
    back.save(path)
    assert path.read_bytes() == first
    path.write_bytes(first[:200])
    with pytest.raises(DataError, match=r"documents\.npz is damaged.*--redo"):
        Documents.load(path)


def test_paired_differences_are_those_of_the_same_draws(both: list[Evaluated]) -> None:
    one, two = (done.documents for done in both)
    found = compare(one, two)
    for name, difference in found.items():
        apart = one.resampled[name] - two.resampled[name]
        assert difference.value == one.metrics[name] - two.metrics[name]
        assert difference.interval == pytest.approx(np.quantile(apart, [0.025, 0.975]).tolist())
    assert compare(one, one)["fve"].interval == [0.0, 0.0]
    assert compare(one, one)["fve"].verdict == "not distinguishable"


def test_a_pair_is_told_apart_where_single_intervals_overlap() -> None:
    """What all documents lose alike says nothing of the difference."""
    rng = np.random.default_rng(0)
    drawn_WN, hard_N = weights(np.arange(50)), rng.normal(0.5, 0.2, 50)

    def documents_of(values_N: np.ndarray) -> Documents:
        resampled = {"fve": drawn_WN @ values_N / drawn_WN.sum(1)}
        return Documents("text", ("h",), np.arange(50), {}, {"fve": float(values_N.mean())}, resampled)

    one, two = documents_of(hard_N + 0.01 + rng.normal(0, 0.01, 50)), documents_of(hard_N)
    (low, high), (other_low, other_high) = (d.intervals["fve"] or [0, 0] for d in (one, two))
    assert low < other_high and other_low < high
    assert compare(one, two)["fve"].verdict == "better" and compare(two, one)["fve"].verdict == "worse"
    noise = documents_of(hard_N + rng.normal(0, 0.01, 50))
    assert compare(noise, two)["fve"].verdict == "not distinguishable"


@pytest.mark.parametrize(
    ("metric", "ends", "verdict"),
    [
        ("fve", [0.1, 0.2], "better"),
        ("fve/blocks.0.mlp_out", [-0.2, -0.1], "worse"),
        ("ce_sae", [0.1, 0.2], "worse"),
        ("kl", [-0.2, -0.1], "better"),
        ("l0", [1.0, 2.0], "higher"),
        ("fve", [-0.1, 0.2], "not distinguishable"),
        ("fve", None, "no interval"),
    ],
)
def test_verdicts(metric: str, ends: list[float] | None, verdict: str) -> None:
    assert Difference(metric, 0.1, ends).verdict == verdict


def test_resampled_sums_keep_the_variance_of_what_lies_far_from_zero() -> None:
    """Errors of a coder without the bias of 30,000: each resample's mean and variance against float64, two batches."""
    rng, n, width = np.random.default_rng(0), 24, 3
    error = (3e4 * np.array([1, -1, 0.5]) + rng.normal(size=(2, n, width))).astype(np.float32)
    keep = rng.random((2, n)) < 0.8
    drawn = weights(np.arange(2 * n)).astype(np.float64)
    sums = Dimensions()
    for b in range(2):
        own = drawn[:, b * n : (b + 1) * n]
        batch = Slots(np.arange(n), np.arange(n, dtype=np.int32), np.zeros((0, n), np.int32), own,
                      jnp.asarray(own, jnp.float32), 0)  # fmt: skip
        sums.add(batch, jnp.asarray(error[b]), keep[b])
    weight = drawn * keep.ravel()
    found = variance(weight.sum(1), *about_zero(weight.sum(1), sums.centre_R, *sums.sums()))
    rows = error.reshape(-1, width).astype(np.float64)
    mean = weight @ rows / weight.sum(1)[:, None]
    want = np.stack([w @ np.square(rows - m) / w.sum() for w, m in zip(weight, mean, strict=True)])
    np.testing.assert_allclose(found, want, rtol=1e-4)


def test_other_text_is_refused(lm: LanguageModel, both: list[Evaluated]) -> None:
    (other,) = evaluated(lm, trained("layernorm_autoencoder"), texts=documents(seed=1))
    with pytest.raises(DataError, match="of different text"):
        compare(both[0].documents, other.documents)


# ----------------------------------------------------------------------------------------------------- breakdowns


def test_breakdowns_are_the_metrics_of_their_tokens(lm: LanguageModel, packed: PackedRows) -> None:
    (done,) = evaluated(lm, trained("layernorm_autoencoder"))
    found, keep = by_hand(lm, packed, "layernorm_autoencoder"), packed.keep
    y, e = found["y"].reshape(len(found["y"]), -1), (found["y"] - found["y_hat"]).reshape(len(found["y"]), -1)
    variance, error = ((y - y.mean(0)) ** 2).sum(1), (e**2).sum(1)
    predicted = np.zeros(packed.tokens.shape, bool)
    predicted[:, :-1] = (packed.segments[:, 1:] == packed.segments[:, :-1]) & (packed.segments[:, 1:] >= 0)
    counts = np.bincount(packed.tokens[keep], minlength=62)
    before = packed.positions - 1  # the model sees bos too, which is no token of the document
    for kind, value in (("position", before), ("frequency", counts[packed.tokens])):
        part = done.breakdown[kind]
        assert sum(part["tokens"]) == keep.sum() and len(part["groups"]) > 2
        for i, label in enumerate(part["groups"]):
            low, high = (int(end) for end in (label.split("-") * 2)[:2])
            own = ((value >= low) & (value <= high))[keep]
            assert own.sum() == part["tokens"][i] > 0
            assert part["fve"][i] == pytest.approx(1 - error[own].sum() / variance[own].sum(), rel=1e-3)
            assert part["l0"][i] == pytest.approx(found["l0"][own].mean(), rel=1e-6)
            assert part["documents"][i] == len(np.unique(packed.documents[keep][own]))
            if kind == "position":
                there = ((value >= low) & (value <= high))[predicted]
                clean, sae, zero = (found[name][there].mean() for name in ("clean", "sae", "zero"))
                assert part["loss_recovered"][i] == pytest.approx((zero - sae) / (zero - clean), rel=5e-3, abs=1e-3)
            ends = part["fve_interval"][i]
            assert (ends is None) == (part["documents"][i] < FEWEST)
            assert ends is None or ends[0] < part["fve"][i] < ends[1]
    # Every document has its own source here: that says nothing.
    assert "source" not in done.breakdown


@pytest.mark.parametrize("bos", [True, False])
def test_positions_count_the_documents_tokens_before_each(lm: LanguageModel, bos: bool) -> None:
    """A document of 13 tokens and one of 5: places 0, 1, 2-3, ... of the text itself, with bos in front or without."""
    texts = [" ".join(f"w{i}" for i in range(length)) for length in (13, 5)]
    text = Source({}, lambda start: iter([(i, str(i), str(i), one) for i, one in enumerate(texts)][start:]), 1.0)
    read = ReadText(Packer(text, lm.tokenizer, 40, prepend_bos=bos), 2, 100)
    (position, *_), counts = read.breakdowns, dict[str, int]()
    for packed, codes in read.batches():
        for code in codes[0][packed.keep.ravel()]:
            label = position.labels[code - position.first]
            counts[label] = counts.get(label, 0) + 1
        assert (codes[0][~packed.keep.ravel()] == -1).all()
    lengths = [len(lm.tokenizer.encode(one)) for one in texts]
    places = np.concatenate([np.arange(length) for length in lengths])
    want = {label: ((places >= low) & (places <= high)).sum() for label, low, high in
            [("0", 0, 0), ("1", 1, 1), ("2-3", 2, 3), ("4-7", 4, 7), ("8-15", 8, 15)]}  # fmt: skip
    assert max(lengths) < 20 and counts == {label: count for label, count in want.items() if count}


def stdlib_like(identity: dict[str, Any], names: list[str]) -> Source:
    texts = [" ".join(f"w{(i + j) % 60}" for j in range(5 + i % 7)) for i in range(len(names))]
    rows = [(i, name, str(i), text) for i, (name, text) in enumerate(zip(names, texts, strict=True))]
    return Source(identity, lambda start: iter(rows[start:]), 1.0)


def test_sources_are_packages_files_and_parts_of_a_mixture(lm: LanguageModel) -> None:
    sae, config = trained("transcoder"), EvalConfig(tokens=10**6, batch_rows=4)

    def groups(text: Source) -> dict[str, int]:
        part = evaluate(sae, lm, Packer(text, lm.tokenizer, ROW), config).breakdown["source"]
        return dict(zip(part["groups"], part["documents"], strict=True))

    names = ["abc.py", "json/a.py", "json/b.py", "os.py"]
    assert groups(stdlib_like({"source": "stdlib"}, names)) == {"single modules": 2, "json": 2}
    rows = [*(f"a.jsonl:{i}" for i in range(3)), "b.jsonl:1"]
    assert groups(stdlib_like({"source": "files"}, rows)) == {"a.jsonl": 3, "b.jsonl": 1}
    many = [f"p{i}/{j}.py" for i in range(25) for j in range(2)]
    found = groups(stdlib_like({"source": "stdlib"}, many))
    assert len(found) == 20 and found["other"] == 2 * (25 - 19)

    parts = [stdlib_like({"source": "files", "files": [name]}, ["x"] * 12) for name in ("one", "two")]
    text = mixed(parts, [2, 1], 0, 1.0)
    numbers = [index for index, *_ in text.rows(0)]
    own = parts_of(text.identity, numbers)
    assert groups(text) == {name: own.count(c) for c, name in enumerate(("one", "two"))} == {"one": 12, "two": 12}
    # Which source it is, is what the mixture itself does.
    named = mixed([stdlib_like({}, [f"{c}"] * 12) for c in range(2)], [2, 1], 0, 1.0)
    assert [int(name) for _, name, *_ in named.rows(0)] == own


def test_a_breakdown_knows_text_that_comes_after_what_was_read_ahead(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are those of all tokens; a token that was not seen ahead is of the least frequent."""
    (whole,) = evaluated(lm, trained("transcoder"))
    monkeypatch.setattr("saejax.evals.breakdown._AHEAD", 50)
    (short,) = evaluated(lm, trained("transcoder"))
    assert short.metrics == whole.metrics and short.breakdown["position"] == whole.breakdown["position"]
    assert sum(short.breakdown["frequency"]["tokens"]) == whole.tokens
    assert short.breakdown["frequency"] != whole.breakdown["frequency"]
