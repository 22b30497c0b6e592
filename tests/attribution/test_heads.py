"""Attention in a graph against the frozen model itself, and against a head's score in float64 by hand."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from tiny.attributed import FAMILIES, LAYERS, dictionary, lm_of, mlp_dictionaries, prompt

from saejax.attribution import AttributionConfig, attribute
from saejax.attribution.heads import Heads, HeadScore
from saejax.attribution.local import LocalModel
from saejax.core.errors import DataError
from saejax.lm import LanguageModel
from saejax.trained import TrainedCoder

ALL = AttributionConfig(max_features=0, chunk=16, block=64)
SCALES = ("ln1_scale", "ln2_scale", "ln1_post_scale", "ln2_post_scale", "ln_final_scale", "attn_pattern")
FEW = {("gpt2", "transcoder"), ("gpt_neox", "clt"), ("qwen3", "transcoder"), ("gemma2", "clt"), ("olmo2", "clt")}
CASES = [
    pytest.param(family, topology, marks=[] if (family, topology) in FEW else [pytest.mark.soak])
    for family in FAMILIES
    for topology in ("transcoder", "clt")
]


@functools.cache
def heads_of(family: str, topology: str) -> Heads:
    return Heads(LocalModel(lm_of(family), mlp_dictionaries(topology), prompt(), ALL))


def frozen_run(
    lm: LanguageModel, tokens: np.ndarray, points: list[str], source: dict[str, Any], gate: Any = None
) -> dict[str, np.ndarray]:
    """{point: value less what the source has added}: patterns, scales and what dictionaries write are held."""
    held = [name for name in lm.inner_points() if name.rpartition(".")[2] in SCALES]
    writes = [f"blocks.{i}.mlp_out" for i in range(LAYERS)]
    _, clean = lm.run(tokens[None], capture=[*held, *writes])

    def less(vector: np.ndarray) -> np.ndarray:
        out = np.zeros((1, len(tokens), 16), np.float32)
        out[0, source["position"]] = vector
        return out

    def moved(share: float) -> dict[str, Any]:
        edits = {name: functools.partial(lambda value, _: value, clean[name]) for name in held}
        for name, vector in zip(writes, source["writes"], strict=True):
            edits[name] = functools.partial(lambda value, _: value, clean[name] - share * less(vector))
        edits["blocks.0.resid_pre"] = lambda x: x - share * less(source["embedding"])
        if gate is not None:
            block, *place = gate
            name = f"blocks.{block}.attn_pattern"
            edits[name] = lambda _: clean[name].at[(0, *place)].set(0)
        return lm.run(tokens[None], capture=points, edits=edits)[1]

    one, other = moved(0.0), moved(1.0)
    return {name: np.asarray(one[name] - other[name], np.float64)[0] for name in points}


def side(lm: LanguageModel, block: int, head: int, name: str, position: int, x_M: Any, at_M: Any) -> np.ndarray:
    """Query or key in float64 by hand, norms' scales those at `at_M`; x - x' of two of them is linear."""
    c, p = lm.config, jax.tree.map(lambda a: np.asarray(a, np.float64), lm.params["blocks"][block])

    def norm(of: Any, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        if c.norm == "layer":
            x, at = x - x.mean(), at - at.mean()
        return x / np.sqrt((at**2).mean() + c.norm_eps) * of["w"] + of.get("b", 0)

    x_M, at_M = np.asarray(x_M, np.float64), np.asarray(at_M, np.float64)
    if "ln1" in p:
        x_M, at_M = norm(p["ln1"], x_M, at_M), norm(p["ln1"], at_M, at_M)
    W, b = p["attn"][f"W_{name}"], p["attn"].get(f"b_{name}", 0)
    y, at = np.einsum("m,mhd->hd", x_M, W) + b, np.einsum("m,mhd->hd", at_M, W) + b
    of = p["attn"].get(f"{name.lower()}_norm")
    if c.qk_norm_of_all:
        y = norm(of, y.ravel(), at.ravel()).reshape(y.shape)
    group = head if name == "Q" else head * c.kv_heads // c.n_head
    v = norm(of, y[group], at[group]) if c.qk_norm else y[group]
    if (rope := c.layer_ropes[block]) is not None:
        angle = position * np.asarray(rope.frequencies(), np.float64)
        n = len(angle)
        a, b, rest = v[:n], v[n : 2 * n], v[2 * n :]
        v = np.r_[a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest]
    return v


@pytest.mark.parametrize(("family", "topology"), CASES)
def test_a_score_is_the_sum_over_pairs_and_a_node_s_part_is_what_it_adds(family: str, topology: str) -> None:
    heads, lm = heads_of(family, topology), lm_of(family)
    local = heads.local
    tokens = local.tokens
    for block, head, query, key in ((2, 3, 6, 4), (1, 0, 5, 5)):
        found = heads.score(block, head, query, key)
        pairs = found.pairs
        assert pairs.shape == (local.n_sources + 1,) * 2
        np.testing.assert_allclose(pairs.sum(), found.score, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(pairs.sum(0), found.by_key, rtol=1e-6, atol=1e-9)
        resid = f"blocks.{block}.resid_pre"
        _, seen = lm.run(tokens[None], capture=[resid, f"blocks.{block}.attn_pattern"])
        x_SM, by_hand = np.asarray(seen[resid][0]), functools.partial(side, lm, block, head)
        q, k = by_hand("Q", query, x_SM[query], x_SM[query]), by_hand("K", key, x_SM[key], x_SM[key])
        scale = lm.config.attn_scale or lm.config.d_head**-0.5
        np.testing.assert_allclose(found.score, scale * q @ k, rtol=1e-4, atol=1e-6)
        _check_pattern(lm, heads, found, np.asarray(seen[f"blocks.{block}.attn_pattern"])[0, head, query])
        # Features at and before the tokens, an error, a token.
        strong = {s for s, t, _ in found.strongest(12)} | {t for s, t, _ in found.strongest(12)}
        some = [*sorted(strong - {local.n_sources})[:4], len(local.features) + 1, local.n_sources - 6]
        for node in some:
            less = frozen_run(lm, tokens, [resid], local.source(node))[resid]
            for name, at, parts in (("Q", query, found.query_ND), ("K", key, found.key_ND)):
                moved = by_hand(name, at, x_SM[at], x_SM[at]) - by_hand(name, at, x_SM[at] - less[at], x_SM[at])
                np.testing.assert_allclose(parts[node], moved, rtol=2e-3, atol=2e-5)


def _check_pattern(lm: LanguageModel, heads: Heads, found: HeadScore, pattern_S: np.ndarray) -> None:
    """Between two keys the capped scores differ as the logarithms of the pattern do."""
    assert found.pattern == pytest.approx(pattern_S[found.key], rel=1e-6)
    np.testing.assert_allclose(found.above_by_query.sum(), found.score - found.mean, rtol=1e-6, atol=1e-9)
    cap, window = lm.config.attn_softcap, lm.config.layer_windows[found.block]
    other = heads.score(found.block, found.head, found.query, found.key - 1)
    if window is None or found.query - other.key < window:
        scores = [one.score if cap is None else cap * np.tanh(one.score / cap) for one in (found, other)]
        want = np.log(pattern_S[found.key]) - np.log(pattern_S[other.key])
        np.testing.assert_allclose(scores[0] - scores[1], want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("family", "topology"), CASES)
def test_a_part_of_an_edge_is_what_it_loses_without_that_entry_of_the_pattern(family: str, topology: str) -> None:
    heads, lm = heads_of(family, topology), lm_of(family)
    local = heads.local
    target = _late(local)
    row = local.rows(np.array([target]), 1)[0]
    layer, position, latent = local.features[target]
    early = [node for node in np.argsort(-np.abs(row)).tolist() if local.source(node)["position"] < position]
    point = f"blocks.{layer}.mlp_in"
    vector = np.asarray(_encoder(mlp_dictionaries(topology), layer), np.float64)[:, latent]
    for source in early[:2]:
        parts = heads.passed(source, target, 3)
        assert parts and abs(parts[0].weight) >= abs(parts[-1].weight)
        whole = frozen_run(lm, local.tokens, [point], local.source(source))[point][position] @ vector
        np.testing.assert_allclose(whole, row[source], rtol=1e-3, atol=1e-5)
        for one in parts:
            gate = one.block, one.head, one.query, one.key
            left = frozen_run(lm, local.tokens, [point], local.source(source), gate)[point][position] @ vector
            np.testing.assert_allclose(whole - left, one.weight, rtol=2e-3, atol=2e-5)


def _late(local: LocalModel) -> int:
    """A feature of the highest layer, at as late a token as there is one."""
    return int(np.lexsort(local.features[:, 1::-1].T)[-1])


def _encoder(saes: tuple[TrainedCoder, ...], layer: int) -> np.ndarray:
    W = saes[0].params["W_enc"][layer] if len(saes) == 1 else saes[layer].params["W_enc"]
    return np.asarray(W)


def test_what_passes_attention_at_the_only_block_between_is_the_whole_edge() -> None:
    heads = heads_of("qwen3", "transcoder")
    local = heads.local
    # From an earlier token in one layer to the next there is no way but that block's attention.
    target = _late(local)
    row, (layer, end, _) = local.rows(np.array([target]), 1)[0], local.features[target].tolist()
    errors = len(local.features) + (layer - 1) * local.n_tokens + np.arange(end)
    source = int(errors[np.argmax(np.abs(row[errors]))])
    parts = heads.passed(source, target, 10**6)
    assert {one.block for one in parts} == {layer}
    places = {(one.query, one.key) for one in parts}
    assert places == {(end, int(source - errors[0]))}
    np.testing.assert_allclose(sum(one.weight for one in parts), row[source], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("olmo2", marks=pytest.mark.soak)])
def test_without_biases_nothing_is_left_for_the_bias(family: str) -> None:
    saes = tuple(
        dataclasses.replace(sae, params=sae.params | {"b_dec": np.zeros_like(sae.params["b_dec"])})
        for sae in mlp_dictionaries("transcoder")
    )
    lm = lm_of(family)
    local = LocalModel(lm, saes, prompt(), dataclasses.replace(ALL, silent=0))
    found = Heads(local).score(2, 1, 6, 3)
    for parts in (found.query_ND, found.key_ND):
        np.testing.assert_allclose(parts[-1], 0, atol=2e-5 * np.abs(parts).sum(0).max())
    assert np.abs(found.pairs[:-1, :-1]).max() > 1e-4


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_the_mean_is_of_the_keys_that_the_query_sees(family: str) -> None:
    heads = heads_of(family, "transcoder" if family == "gpt2" else "clt")
    window = heads.local.lm.config.layer_windows[2]
    keys = range(0 if window is None else 6 - window + 1, 7)
    mean = np.mean([heads.score(2, 1, 6, key).score for key in keys])
    assert heads.score(2, 1, 6, 5).mean == pytest.approx(mean, rel=1e-5)


def test_behind_an_autoencoder_a_feature_s_part_is_its_own_row_s() -> None:
    """In the residual stream every path ends at the next autoencoder, so that nothing else carries a feature."""
    lm = lm_of("qwen3")
    saes = [dictionary("autoencoder", (f"blocks.{i}.resid_post",), (f"blocks.{i}.resid_post",), i) for i in (0, 1)]
    local = LocalModel(lm, saes, prompt(), ALL)
    found = Heads(local).score(2, 1, 6, 3)
    x_M = np.asarray(lm.run(prompt()[None], capture=["blocks.2.resid_pre"])[1]["blocks.2.resid_pre"])[0]
    by_hand = functools.partial(side, lm, 2, 1)
    seen = 0
    for node, (layer, position, latent) in enumerate(local.features.tolist()):
        row_M = local.activations[node] * np.asarray(saes[layer].params["W_dec"])[latent]
        for name, at, parts in (("Q", 6, found.query_ND), ("K", 3, found.key_ND)):
            less = row_M if (layer, position) == (1, at) else 0 * row_M
            moved = by_hand(name, at, x_M[at], x_M[at]) - by_hand(name, at, x_M[at] - less, x_M[at])
            np.testing.assert_allclose(parts[node], moved, rtol=1e-3, atol=1e-5)
            seen += bool(np.abs(moved).max() > 1e-3)
    assert seen > 5


def test_the_strongest_pairs_are_those_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    found = heads_of("gpt2", "transcoder").score(2, 3, 6, 4)
    monkeypatch.setattr("saejax.attribution.heads._PAIRS", 3 * len(found.key_ND))
    order = np.argsort(-np.abs(found.pairs), axis=None)[:9]
    want = [float(found.pairs.flat[i]) for i in order]
    np.testing.assert_allclose([value for _, _, value in found.strongest(9)], want, rtol=1e-12)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((3, 0, 2, 1), "block is 3"),
        ((0, 4, 2, 1), "head is 4"),
        ((0, 0, 7, 1), "query is 7"),
        ((0, 0, 2, 3), "key is 3"),
    ],
)
def test_a_place_that_is_not_there_is_refused(place: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        heads_of("gpt2", "transcoder").score(*place)


def test_a_prompt_whose_patterns_are_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saejax.attribution.heads.LARGEST", 100)
    with pytest.raises(DataError, match="shorten the prompt"):
        Heads(heads_of("gpt2", "transcoder").local)


def test_heads_leave_the_graph_as_it_was() -> None:
    lm, saes = lm_of("gpt2"), mlp_dictionaries("transcoder")
    before = attribute(lm, saes, prompt(), ALL)
    heads_of("gpt2", "transcoder").score(1, 0, 3, 2)
    np.testing.assert_array_equal(attribute(lm, saes, prompt(), ALL).weights, before.weights)
