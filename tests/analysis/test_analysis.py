"""The feature browser's data against a brute-force search over every token, and logits in float64."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from tiny.by_hand import SIDES, coder_of, numpy_coder, sites_of
from tokenizers import models, pre_tokenizers

from saejax.analysis import ReportConfig, collect_features
from saejax.analysis.features import promoted_logits
from saejax.coders import Coder, Sites
from saejax.core.errors import ConfigError, DataError
from saejax.lm import HOOK_NAMES, LanguageModel, decoder
from saejax.lm.conventions import DecoderConfig
from saejax.text import Packer, Source, Tokenizer
from saejax.trained import TrainedCoder

BOS, ROW, LATENTS = 60, 24, 40
HOOK = "blocks.0.resid_post"
CONFIG = ReportConfig(
    tokens=10**6,
    examples=4,
    quantiles=3,
    quantile_examples=2,
    before=5,
    after=3,
    logits=6,
    histogram_bins=8,
    max_features=0,
    batch_rows=4,
)


def tiny_lm(tied: bool) -> LanguageModel:
    """Two random layers, 62 tokens; `mlp_act` is wider than the model."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(BOS)}, unk_token="w1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<mask>"])
    tokenizer = Tokenizer(backend, BOS, frozenset({BOS, BOS + 1}), "0")
    config = DecoderConfig(2, 16, 2, 8, 24, 62, ROW, "gelu_new", 1e-5, tied)
    shapes = jax.eval_shape(lambda: decoder.init_params(config, jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(0.1, 0.4, leaf.shape).astype(np.float32), shapes)
    return LanguageModel(config, params, tokenizer, {"model": "tiny"})


def source(texts: Sequence[str]) -> Source:
    return Source({}, lambda start: ((i, f"doc{i}", str(i), t) for i, t in enumerate(texts) if i >= start), 1.0)


def documents(count: int = 30) -> list[str]:
    rng = np.random.default_rng(0)
    words = [rng.integers(0, BOS, rng.integers(1, 60)) for _ in range(count)]
    return [" ".join("<mask>" if rng.random() < 0.1 else f"w{w}" for w in text) for text in words]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A coder to show: sparse or dense latents, of which hook points, and how the report names them."""

    topology: str
    sparsity: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    title: str


def autoencoder(sparsity: str, hook_point: str = HOOK) -> Kind:
    return Kind("autoencoder", sparsity, (hook_point,), (hook_point,), hook_point)


CLT = Kind("clt", "topk", *SIDES["clt"], "blocks.0.mlp_in, blocks.1.mlp_in -> blocks.0.mlp_out, blocks.1.mlp_out")
KINDS = {
    "topk": autoencoder("topk"),
    "relu": autoencoder("relu"),
    "abs_topk": autoencoder("abs_topk"),
    "transcoder": Kind("transcoder", "topk", *SIDES["transcoder"], "blocks.0.mlp_in -> blocks.0.mlp_out"),
    "crosscoder": Kind("crosscoder", "topk", *SIDES["crosscoder"], "blocks.0.resid_post, blocks.1.resid_mid"),
    "clt": CLT,
    "dense clt": dataclasses.replace(CLT, sparsity="relu"),
}


def coder_and_params(kind: Kind) -> tuple[Coder, Sites, dict[str, np.ndarray]]:
    coder = coder_of(kind.topology, kind.sparsity, kind.reads, kind.writes, LATENTS)
    shapes = jax.eval_shape(coder.init, jax.random.key(0))
    rng = np.random.default_rng(5)
    params = {name: rng.normal(0, 0.3, shapes[name].shape).astype(np.float32) for name in sorted(shapes)}
    params["b_enc"][..., -3:] = -1e3  # never active
    if kind.sparsity == "abs_topk":
        params["W_enc"][..., -3:], params["b_enc"][..., -3:] = 0, 0
    params["W_enc"][..., 0], params["b_enc"][..., 0] = 0, 30.0  # always active with the same value
    return coder, sites_of(coder, kind.reads, kind.writes), params


@dataclasses.dataclass(frozen=True)
class Token:
    """A kept token with its latents [F]."""

    row: int
    column: int
    values: np.ndarray


@dataclasses.dataclass(frozen=True)
class Search:
    """What the browser should show, from a plain walk over all packed rows."""

    kind: Kind
    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    documents: np.ndarray
    f: np.ndarray
    kept: list[Token]


def brute_force(lm: LanguageModel, kind: Kind) -> Search:
    params = coder_and_params(kind)[2]
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    rows = list(packer.batches("heldout", 1))
    tokens, positions, segments, docs, keep = (
        np.concatenate([getattr(row, name) for row in rows])
        for name in ("tokens", "positions", "segments", "documents", "keep")
    )
    _, captured = lm.run(tokens, positions, segments, capture=kind.reads)
    x = np.stack([np.asarray(captured[name], np.float64).reshape(tokens.size, -1) for name in kind.reads], axis=1)
    f, _ = numpy_coder(kind.topology, kind.sparsity, params, x)
    f = np.where(keep[:, :, None], f.reshape(*tokens.shape, -1), 0)
    kept = [Token(r, s, f[r, s]) for r, s in np.argwhere(keep)]
    return Search(kind, tokens, positions, segments, docs, f, kept)


def collect(lm: LanguageModel, kind: Kind, config: ReportConfig = CONFIG) -> tuple[dict[str, Any], int]:
    coder, sites, params = coder_and_params(kind)
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    content, tokens, seconds = collect_features(TrainedCoder(coder, params, sites), lm, packer, config)
    assert seconds > 0
    return content, tokens


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_lm(tied=True)


@pytest.fixture(scope="module", params=list(KINDS))
def both(request: pytest.FixtureRequest, lm: LanguageModel) -> tuple[dict[str, Any], Search]:
    """(the content of features.sqlite, the search), for sparse and for dense latents, of one and of several sites."""
    content, tokens = collect(lm, KINDS[request.param])
    search = brute_force(lm, KINDS[request.param])
    assert tokens == content["n_tokens"] == len(search.kept)
    return content, search


def token_string(token: int) -> str:
    return ["<bos>", "<mask>"][token - BOS] if token >= BOS else f"w{token}"


def token_id(string: str) -> int:
    return {"<bos>": BOS, "<mask>": BOS + 1}[string] if string.startswith("<") else int(string[1:])


def test_the_frame(both: tuple[dict[str, Any], Search]) -> None:
    content, search = both
    layers = [0, 1] if search.kind.topology == "clt" else [None]
    assert (content["hook_point"], content["model"]) == (search.kind.title, "tiny")
    assert content["d_sae"] == len(layers) * LATENTS == search.f.shape[-1]
    assert [feature["id"] for feature in content["features"]] == list(range(content["d_sae"]))
    # The layer of a latent where there are layers, and no such key where there are none.
    assert [feature.get("layer") for feature in content["features"]] == np.repeat(layers, LATENTS).tolist()
    assert all(("layer" in feature) == (len(layers) > 1) for feature in content["features"])
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_the_examples_are_the_largest_of_all_tokens_one_for_each_row(both: tuple[dict[str, Any], Search]) -> None:
    content, search = both
    checked = 0
    for feature in content["features"]:
        i = feature["id"]
        best: dict[int, Token] = {}
        for token in search.kept:
            size = abs(token.values[i])
            if size > 0 and (token.row not in best or size > abs(best[token.row].values[i])):
                best[token.row] = token
        ranked = sorted(best.values(), key=lambda token: -abs(token.values[i]))
        want = ranked[: CONFIG.examples]
        got = feature["examples"]
        assert len(got) == len(want)
        peaks = [example["activations"][example["peak"]] for example in got]
        assert peaks == pytest.approx([token.values[i] for token in want], abs=2e-3)
        assert peaks == sorted(peaks, key=abs, reverse=True)
        gaps = -np.diff([np.inf, *(abs(token.values[i]) for token in ranked), -np.inf])
        for k, (token, example) in enumerate(zip(want, got, strict=True)):
            if min(gaps[k], gaps[k + 1]) > 1e-3:  # of equal values either may come first
                assert example["document"] == f"doc{search.documents[token.row, token.column]}"
                assert example["index"] == search.documents[token.row, token.column]
                assert example["position"] == search.positions[token.row, token.column]
                checked += 1
    assert checked > 20


def test_quantiles_are_equal_parts_of_the_range_and_hold_what_lies_in_them(both: tuple[dict[str, Any], Search]) -> None:
    content, search = both
    values = np.abs(np.stack([token.values for token in search.kept]))
    drawn = 0
    for feature in content["features"]:
        v, parts = values[:, feature["id"]], feature["quantiles"]
        edges = np.linspace(0, v.max(), CONFIG.quantiles + 1)
        wide = [(low, high) for low, high in itertools.pairwise(edges) if ((v > low) & (v <= high)).any()]
        assert len(parts) == len(wide)
        for part, (low, high) in zip(parts, wide[::-1], strict=True):
            assert (part["low"], part["high"]) == pytest.approx((low, high), abs=1e-3)
        assert sum(part["fraction"] for part in parts) == pytest.approx(feature["density"], abs=1e-12)
        for part in parts:
            # A value on an edge may fall to either side: the search is in float64.
            near = [((v > part["low"] + e) & (v <= part["high"] - e)).mean() for e in (2e-3, -2e-3)]
            assert near[0] - 1e-12 <= part["fraction"] <= near[1] + 1e-12 and part["fraction"] > 0
            assert len(part["examples"]) <= CONFIG.quantile_examples
            for example in part["examples"]:
                size = abs(example["activations"][example["peak"]])
                assert part["low"] - 2e-3 <= size <= part["high"] + 2e-3
                assert example not in feature["examples"]
                drawn += 1
    assert drawn > 10


def test_a_part_gives_as_many_passages_as_wanted_of_different_rows(both: tuple[dict[str, Any], Search]) -> None:
    content, search = both
    (part,) = content["features"][0]["quantiles"]  # active everywhere with one value: all in the highest part
    rows = len({token.row for token in search.kept})
    assert part["fraction"] == 1 and len(part["examples"]) == min(rows, CONFIG.quantile_examples) > 0


def window(search: Search, row: int, peak: int) -> list[int]:
    """Columns of the peak's piece of its document, at most `before` before it and `after` behind."""
    inside = np.flatnonzero(search.segments[row] == search.segments[row, peak])
    return [int(c) for c in inside if peak - CONFIG.before <= c <= peak + CONFIG.after]


def test_each_passage_is_a_window_within_its_piece(both: tuple[dict[str, Any], Search]) -> None:
    content, search = both
    cut_before = cut_after = full = 0
    for feature in content["features"][1:]:
        for example in feature["examples"]:
            tokens = [token_id(content["vocab"][t]) for t in example["tokens"]]
            places = [
                (row, peak, columns)
                for row, peak in np.argwhere(search.positions == example["position"])
                if example["document"] == f"doc{search.documents[row, peak]}"
                and (columns := window(search, row, peak))
                and search.tokens[row, columns].tolist() == tokens
            ]
            assert places, "no such passage in the document, around that position"
            row, peak, columns = places[0]
            assert example["activations"] == pytest.approx(search.f[row, columns, feature["id"]], abs=2e-3)
            assert columns[example["peak"]] == peak
            cut_before += peak - columns[0] < CONFIG.before
            cut_after += columns[-1] - peak < CONFIG.after
            full += len(columns) == CONFIG.before + CONFIG.after + 1
    assert min(cut_before, cut_after, full) > 0  # each kind occurs


def test_special_tokens_show_no_activation(both: tuple[dict[str, Any], Search]) -> None:
    content, _ = both
    shown = 0
    for example in content["features"][0]["examples"]:  # this latent is active wherever it is looked at
        for token, value in zip(example["tokens"], example["activations"], strict=True):
            special = content["vocab"][token] in ("<bos>", "<mask>")
            assert (value == 0) == special
            shown += special
    assert shown


def test_density_largest_mean_and_histogram(both: tuple[dict[str, Any], Search]) -> None:
    content, search = both
    values = np.stack([token.values for token in search.kept])
    for feature in content["features"]:
        v = values[:, feature["id"]]
        active = v[v != 0]
        counts, edges = np.array(feature["histogram"]["counts"]), np.array(feature["histogram"]["edges"])
        assert feature["density"] == pytest.approx(len(active) / len(v), rel=1e-12)
        assert counts.sum() == len(active) and len(counts) == CONFIG.histogram_bins == len(edges) - 1
        if not len(active):
            continue
        assert feature["max"] == pytest.approx(active.max(), abs=1e-3)
        assert feature["mean"] == pytest.approx(active.mean(), abs=1e-3)
        assert edges[0] == pytest.approx(min(active.min(), 0), abs=1e-3)
        assert edges[-1] == pytest.approx(max(active.max(), 0), abs=1e-3)
        assert feature.get("min", 0) == pytest.approx(min(active.min(), 0), abs=1e-3)
        assert ("min" in feature) == (active.min() < 0)
        # Counts of values safely inside each bin: rounding may move one that lies on an edge.
        for count, low, high in zip(counts, edges, edges[1:], strict=False):
            assert ((active > low + 2e-3) & (active < high - 2e-3)).sum() <= count
            assert count <= ((active > low - 2e-3) & (active < high + 2e-3)).sum()


def test_dead_latents_have_no_examples(both: tuple[dict[str, Any], Search]) -> None:
    for feature in both[0]["features"][-3:]:
        assert feature["examples"] == [] and feature["density"] == feature["max"] == feature["mean"] == 0
        assert set(feature["histogram"]["counts"]) == {0} and feature["histogram"]["edges"][-1] == 1
        assert len(feature["top_logits"]) == CONFIG.logits  # what it would promote is known all the same


def test_a_latent_active_everywhere(both: tuple[dict[str, Any], Search]) -> None:
    feature = both[0]["features"][0]
    assert feature["density"] == 1 and feature["max"] == pytest.approx(30) == feature["mean"]
    assert len(feature["examples"]) == CONFIG.examples


def test_latents_in_another_unit_give_the_same_report_in_that_unit(lm: LanguageModel) -> None:
    """No number is rounded away: activations of 0.00001 of the unit, decoder rows of 100,000."""
    coder, sites, params = coder_and_params(KINDS["relu"])
    packer = Packer(source(documents(8)), lm.tokenizer, ROW)
    sizes = []
    for unit in (1.0, 1e-5):
        own = {name: np.asarray(value) for name, value in coder.rescaled(params, unit).items()}
        features = collect_features(TrainedCoder(coder, own, sites), lm, packer, CONFIG)[0]["features"]
        numbers = [
            [f["max"], f["mean"], *f["histogram"]["edges"], *(q["high"] for q in f["quantiles"])]
            + [a for part in (f, *f["quantiles"]) for example in part["examples"] for a in example["activations"]]
            for f in features[1:]
            if f["examples"]
        ]
        sizes.append(np.concatenate(numbers) / unit)
    assert sizes[1] == pytest.approx(sizes[0], rel=2e-4, abs=1e-6)


# ---------------------------------------------------------------------------------------------- promoted logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_promoted_logits_against_float64(tied: bool) -> None:
    lm = tiny_lm(tied)
    rows = np.random.default_rng(3).normal(size=(700, 16)).astype(np.float32)  # more than one block of 512
    top, bottom = promoted_logits(lm, rows, 6)
    assert len(top) == len(bottom) == 700
    W_U = np.asarray(lm.params["W_E"]).T if tied else np.asarray(lm.params["W_U"])
    logits = (rows * np.asarray(lm.params["ln_final"]["w"], np.float64)) @ W_U.astype(np.float64)
    logits -= logits.mean(1, keepdims=True)
    for i in (0, 1, 511, 512, 699):
        order = np.argsort(logits[i])
        assert top[i][1] == pytest.approx(logits[i][order[::-1][:6]], abs=1e-4)
        assert bottom[i][1] == pytest.approx(logits[i][order[:6]], abs=1e-4)
        np.testing.assert_allclose(logits[i][list(top[i][0])], top[i][1], atol=1e-4)
        np.testing.assert_allclose(logits[i][list(bottom[i][0])], bottom[i][1], atol=1e-4)
        assert len(set(top[i][0])) == 6


def test_promoted_logits_are_the_change_of_the_models_own_logits(lm: LanguageModel) -> None:
    """Up to the norm's division: adding a little of d to the last residual stream moves the logits along them."""
    d = np.random.default_rng(4).normal(size=16).astype(np.float64)
    d -= d.mean()  # the norm takes the mean away

    def logits(step: float) -> np.ndarray:
        edit = {"blocks.1.resid_post": lambda x: x + (step * d).astype(np.float32)[None, None]}
        return np.asarray(lm.run([[1, 2, 3]], edits=edit)[0][0, -1], np.float64)

    _, captured = lm.run([[1, 2, 3]], capture=["blocks.1.resid_post"])
    x = np.asarray(captured["blocks.1.resid_post"][0, -1], np.float64)
    x -= x.mean()
    across = d - x * (x @ d) / (x @ x)  # moving along x itself changes only what the norm divides by
    change = (logits(1e-2) - logits(-1e-2)) / 2e-2 * np.sqrt((x @ x) / len(x))
    (ids,), (values,) = zip(*promoted_logits(lm, across[None].astype(np.float32), 62)[0], strict=True)
    np.testing.assert_allclose((change - change.mean())[list(ids)], values, atol=2e-2)
    assert np.ptp(values) > 1


def written(kind: Kind) -> np.ndarray:
    """[G F, D]: what each latent adds to the residual stream, for a crosscoder at its last site."""
    p = coder_and_params(kind)[2]
    if kind.topology == "clt":
        return np.concatenate([p["W_dec_0"][:, 0] + p["W_dec_0"][:, 1], p["W_dec_1"][:, 0]])
    return p["W_dec"][:, 1] if kind.topology == "crosscoder" else p["W_dec"]


def test_the_browser_shows_those_logits(lm: LanguageModel, both: tuple[dict[str, Any], Search]) -> None:
    content, search = both
    top, bottom = promoted_logits(lm, written(search.kind), CONFIG.logits)
    for feature, (ids, values), (low_ids, low) in zip(content["features"], top, bottom, strict=True):
        pairs = zip([*ids, *low_ids], [*values, *low], strict=True)
        want = [[token_string(t), float(f"{v:.5g}")] for t, v in pairs]
        assert feature["top_logits"] + feature["bottom_logits"] == want


def test_more_logits_than_tokens_gives_all(lm: LanguageModel) -> None:
    top, bottom = promoted_logits(lm, np.ones((1, 16), np.float32), 1000)
    assert sorted(top[0][0]) == sorted(bottom[0][0]) == list(range(62))


# What else reads the residual stream after a row is added; the direct path leaves it out.
READERS = {"resid_pre": ("attn_out", "mlp_out"), **dict.fromkeys(("attn_z", "attn_out", "resid_mid"), ("mlp_out",))}


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_what_a_latent_promotes_is_what_its_row_adds_where_it_is_written(lm: LanguageModel, name: str) -> None:
    """Measured by edits: the change of the last residual stream, with the parts that read it held as they were."""
    kind, last = autoencoder("topk", f"blocks.1.{name}"), "blocks.1.resid_post"
    content, _ = collect(lm, kind, dataclasses.replace(CONFIG, max_features=3, logits=62))
    shown = [feature["top_logits"] for feature in content["features"]]
    assert any(feature["examples"] for feature in content["features"])
    if name == "mlp_in":  # what stands there is read, and is added to nothing
        assert shown == [[]] * 3 == [feature["bottom_logits"] for feature in content["features"]]
        return
    _, clean = lm.run([[1, 2, 3]], capture=["blocks.1.attn_out", "blocks.1.mlp_out", last])
    held = {f"blocks.1.{part}": lambda _, part=part: clean[f"blocks.1.{part}"] for part in READERS.get(name, ())}
    W_U, scale = np.asarray(lm.params["W_E"], np.float64).T, np.asarray(lm.params["ln_final"]["w"], np.float64)
    for pairs, row in zip(shown, coder_and_params(kind)[2]["W_dec"][:3], strict=True):
        _, edited = lm.run(
            [[1, 2, 3]], capture=[last], edits=held | {kind.reads[0]: lambda x, row=row: x + row[None, None]}
        )
        added = np.asarray(edited[last][0, -1], np.float64) - np.asarray(clean[last][0, -1])
        logits = (added * scale) @ W_U
        wanted = dict(enumerate(logits - logits.mean()))
        assert {token_id(token): value for token, value in pairs} == pytest.approx(wanted, abs=2e-3)


def test_each_site_goes_through_its_own_matrix_and_none_through_a_norm(lm: LanguageModel) -> None:
    heads = ("blocks.0.attn_z", "blocks.1.attn_z")
    kind = Kind("clt", "topk", heads, heads, "heads")
    content, _ = collect(lm, kind, dataclasses.replace(CONFIG, logits=62))
    p = coder_and_params(kind)[2]
    W_O = [np.asarray(block["attn"]["W_O"], np.float64).reshape(-1, 16) for block in lm.params["blocks"]]
    rows = [p["W_dec_0"][:, 0] @ W_O[0] + p["W_dec_0"][:, 1] @ W_O[1], p["W_dec_1"][:, 0] @ W_O[1]]
    top, _ = promoted_logits(lm, np.concatenate(rows).astype(np.float32), 62)
    for feature, (ids, values) in zip(content["features"], top, strict=True):
        wanted = dict(zip(ids, values, strict=True))
        assert {token_id(token): value for token, value in feature["top_logits"]} == pytest.approx(wanted, abs=2e-3)
    normed = dataclasses.replace(lm, config=dataclasses.replace(lm.config, post_norms=True))
    assert normed.into_residual("blocks.0.attn_z", rows[0]) is None
    assert normed.into_residual("blocks.0.attn_out", rows[0]) is rows[0]


# --------------------------------------------------------------------------------------------------- configuration


def test_max_features_shows_the_first_ones_and_changes_nothing_else(lm: LanguageModel) -> None:
    full, _ = collect(lm, KINDS["topk"])
    few, _ = collect(lm, KINDS["topk"], dataclasses.replace(CONFIG, max_features=7))
    assert few["d_sae"] == LATENTS and len(few["features"]) == 7

    def spelt_out(content: dict[str, Any]) -> list[Any]:
        return [[[content["vocab"][t] for t in e["tokens"]] for e in f["examples"]] for f in content["features"]]

    assert spelt_out(few) == spelt_out(full)[:7]
    assert [f["density"] for f in few["features"]] == [f["density"] for f in full["features"][:7]]
    shown = {t for f in few["features"] for e in f["examples"] for t in e["tokens"]}
    assert max(shown) < len(few["vocab"]) <= len(full["vocab"]) and len(set(few["vocab"])) == len(few["vocab"])


def test_the_scan_finds_the_same_however_many_tokens_it_encodes_at_once(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collected() -> tuple[Any, list[float]]:
        """(the content with null for each number with a point, these numbers)"""
        numbers: list[float] = []
        content = json.dumps(collect(lm, KINDS["topk"])[0])
        return json.loads(content, parse_float=lambda number: numbers.append(float(number))), numbers

    whole, numbers = collected()
    monkeypatch.setattr(Coder, "few_tokens", 13)
    assert collected() == (whole, pytest.approx(numbers, rel=1e-3, abs=1e-6)) and whole["features"]


def test_no_quantiles_where_none_are_asked_for(lm: LanguageModel) -> None:
    content, _ = collect(lm, KINDS["topk"], dataclasses.replace(CONFIG, quantiles=0, max_features=3))
    assert [f["quantiles"] for f in content["features"]] == [[]] * 3
    assert any(f["examples"] for f in content["features"])


def test_the_scan_stops_after_the_batch_that_is_enough(lm: LanguageModel) -> None:
    packer = Packer(source(documents()), lm.tokenizer, ROW)
    kept = [int(b.keep.sum()) for b in packer.batches("heldout", 4)]
    content, tokens = collect(lm, KINDS["topk"], dataclasses.replace(CONFIG, tokens=kept[0] + 1))
    assert tokens == content["n_tokens"] == kept[0] + kept[1] < sum(kept)


def test_without_text_it_says_so(lm: LanguageModel) -> None:
    coder, sites, params = coder_and_params(KINDS["topk"])
    for texts in ([], ["<mask> <mask>"]):
        packer = Packer(source(texts), lm.tokenizer, ROW)
        with pytest.raises(DataError, match="no held-out text"):
            collect_features(TrainedCoder(coder, params, sites), lm, packer, CONFIG)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(ReportConfig)])
def test_report_config_refuses_negative_numbers(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"report\.{name} is -1"):
        dataclasses.replace(CONFIG, **{name: -1})
