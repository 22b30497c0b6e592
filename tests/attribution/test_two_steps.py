"""A model whose circuit is known, token -> A -> B -> answer: what its graphs show, and where a CLT skips step B."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import two_steps
from tiny.attributed import LAYERS, lm_of, mlp_dictionaries, prompt
from tiny.by_hand import MLPS_IN, MLPS_OUT, coder_of, sites_of, tiny_lm

from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.attribution.influence import influence, pruned, scores
from saejax.attribution.skipping import response_errors, skipped
from saejax.core.errors import ConfigError, DataError
from saejax.trained import TrainedCoder

ALL = AttributionConfig(max_features=0, chunk=8, block=64)
P = np.exp(8) / (np.exp(8) + 7)  # of the answer, whose logit is 8; seven tokens have 0
DICTIONARIES = {
    "transcoders": two_steps.transcoders(),
    "faithful": two_steps.clt(),
    "half": two_steps.clt((0.5, 0.5)),
    "skips": two_steps.clt((1, 1)),
}
FAITHFUL = ("transcoders", "faithful")


@functools.cache
def graph_of(name: str) -> Graph:
    return attribute(two_steps.lm(), DICTIONARIES[name], two_steps.PROMPT, ALL)


def edges(graph: Graph, mask: np.ndarray) -> dict[tuple[str, str], float]:
    """{(source, target): weight}, A and B called by name."""
    names = [f"{'AB'[layer]}{latent} {place}" for layer, place, latent in graph.features.tolist()]
    names += [f"error {i}" for i in range(graph.n_errors)]
    names += [f"token {i}" for i in range(len(graph.tokens))] + [f"y{token}" for token in graph.logits]
    return {(names[s], names[graph.targets[r]]): float(graph.weights[r, s]) for r, s in np.argwhere(mask)}


def test_the_model_answers_in_two_steps() -> None:
    """Exactly so on all prompts; half of step A is nothing in step B; and all that A does goes through MLP 1."""
    lm, tokens = two_steps.lm(), two_steps.prompts(40)
    logits, seen = lm.run(tokens, capture=["blocks.0.mlp_act", "blocks.1.mlp_act", "blocks.1.mlp_out"])
    asked = np.array([two_steps.X.index(row[np.isin(row, two_steps.X)][0]) for row in tokens])
    np.testing.assert_array_equal(logits[:, -1], 8.0 * np.eye(8)[np.array(two_steps.Y)[asked]])
    for layer in range(2):
        at_end = np.c_[np.eye(2)[asked], np.ones(40)]
        np.testing.assert_array_equal(seen[f"blocks.{layer}.mlp_act"][:, -1], at_end)
        assert not np.any(seen[f"blocks.{layer}.mlp_act"][:, :-1])
    halved, _ = lm.run(tokens, edits={"blocks.0.mlp_act": lambda h: 0.5 * h})
    assert not np.any(halved)
    held = {"blocks.0.mlp_act": jnp.zeros_like, "blocks.1.mlp_out": lambda _: seen["blocks.1.mlp_out"]}
    np.testing.assert_array_equal(lm.run(tokens, edits=held)[0], logits)


def test_the_dictionaries_are_exact_on_all_prompts() -> None:
    tokens = two_steps.prompts(40)
    _, seen = two_steps.lm().run(tokens, capture=[*two_steps.READS, *two_steps.WRITES])
    for saes in DICTIONARIES.values():
        for sae in saes:
            x, y = (np.stack([seen[name] for name in names], -2) for names in (sae.sites.reads, sae.sites.writes))
            x, y = (a.reshape(-1, *a.shape[2:]) if sae.coder.topology.stacked else a.reshape(-1, 16) for a in (x, y))
            np.testing.assert_array_equal(sae.decode(sae.encode(x), x), y)


@pytest.mark.parametrize("name", FAITHFUL)
@pytest.mark.parametrize("shares", [(0.8, 0.98), (1.0, 1.0)])
def test_the_graph_shows_exactly_both_steps(name: str, shares: tuple[float, float]) -> None:
    graph = graph_of(name)
    kept = pruned(graph, *shares)
    # 2 seen, 2 a, and 8 less the mean of eight logits. Attention 0 moves the token's 1 to `end` as it is.
    assert edges(graph, kept.edges) == {("token 1", "A0 3"): 2, ("A0 3", "B0 3"): 2, ("B0 3", "y4"): 7}
    assert kept.nodes.sum() == 2 + 4 + 1  # tokens stay always
    assert graph.n_features == 4  # the third latents were there, and without influence
    np.testing.assert_allclose(influence(graph)[kept.nodes], P * np.array([1, 1, 0, 1, 0, 0, 0]), rtol=1e-6)
    assert scores(graph) == (1, 1)


def test_the_graph_of_a_clt_that_skips_has_no_second_step() -> None:
    graph = graph_of("skips")
    kept = pruned(graph, 0.8, 0.98)
    assert edges(graph, kept.edges) == {("token 1", "A0 3"): 2, ("A0 3", "y4"): 7}
    assert [1, 3, 0] not in graph.features.tolist() and scores(graph) == (1, 1)
    half = graph_of("half")
    others = {("token 3", "A2 3"): 2, ("A2 3", "B2 3"): 2}
    steps = {("token 1", "A0 3"): 2, ("A0 3", "B0 3"): 2, ("A0 3", "y4"): 3.5, ("B0 3", "y4"): 3.5}
    assert edges(half, half.weights != 0) == steps | others


# What passes through what features write at MLP 0 and 1, in units of P: of earlier layers, and of their own.
@pytest.mark.parametrize(
    ("name", "early", "own", "share"),
    [
        ("transcoders", [0, 0], [1, 1], 0),
        ("faithful", [0, 0], [1, 1], 0),
        ("half", [0, 1 / 2], [1 / 2, 1 / 2], 1 / 3),  # half of the influence goes by B, which reads what A writes
        ("skips", [0, 1], [0, 0], 1),
    ],
)
def test_influence_that_skips_the_second_step(name: str, early: list[float], own: list[float], share: float) -> None:
    saes = DICTIONARIES[name]
    found = skipped(two_steps.lm(), saes, graph_of(name), ALL)
    np.testing.assert_allclose((found.early, found.own), P * np.array([early, own]), rtol=1e-6)
    np.testing.assert_allclose(found.shares, [0, early[1] / (early[1] + own[1])], rtol=1e-6)
    assert found.share == pytest.approx(share)


def test_a_clt_may_skip_in_some_prompts_alone() -> None:
    saes = two_steps.clt((1, 0))
    for question, skips in enumerate((1, 0)):
        tokens = np.array([two_steps.BOS, two_steps.WORD, two_steps.X[question], two_steps.END], np.int32)
        found = skipped(two_steps.lm(), saes, attribute(two_steps.lm(), saes, tokens, ALL), ALL)
        assert found.shares.tolist() == [0, skips]


def test_what_passes_through_each_mlp_is_that_of_its_decoder_rows_alone() -> None:
    """Random parameters: a graph of each m, of a CLT that has no rows but those for MLP m."""
    lm, (sae,) = lm_of("qwen3"), mlp_dictionaries("skip_clt", seed=3)
    config = dataclasses.replace(ALL, chunk=64)
    graph = attribute(lm, [sae], prompt(), config)
    found = skipped(lm, [sae], graph, config)
    p = np.r_[np.zeros(graph.n_nodes - len(graph.logits)), graph.probabilities]
    h = (influence(graph) + p) / np.maximum(np.abs(graph.matrix.astype(np.float64)).sum(1), 1e-10)
    layer, place = graph.features[:, 0], graph.features[:, 1]
    for m in range(LAYERS):
        rows = {f"W_dec_{g}": np.array(sae.params[f"W_dec_{g}"]) for g in range(LAYERS)}
        for g, W_FWD in enumerate(rows.values()):
            W_FWD[:, [i for i in range(LAYERS - g) if g + i != m]] = 0
        of_m = attribute(lm, [dataclasses.replace(sae, params=sae.params | rows)], prompt(), config)
        assert np.array_equal(of_m.features, graph.features) and np.array_equal(of_m.logits, graph.logits)
        effects = of_m.matrix[:, : graph.n_features].astype(np.float64)
        for mass, sources in ((found.early[m], layer < m), (found.own[m], layer == m)):
            at_places = [effects[:, sources & (place == s)].sum(1) for s in range(len(graph.tokens))]
            assert mass == pytest.approx(float(h @ np.abs(at_places).sum(0)), rel=1e-4)
    assert found.early[0] == 0 and (found.early[1:] > 1e-3).all() and (found.own > 1e-3).all()


# At half of A, MLP 1 writes 8 less for the answer, and 1 less where nobody reads. A skip of a share s says 4 s less
# for the answer by A, and 8 (1 - s) by B. At a quarter less, b is 1/2: 4 and 1/2 less; said are 2 s and 4 (1 - s).
@pytest.mark.parametrize(
    ("name", "cut", "error"),
    [
        ("transcoders", 0.5, 0),
        ("faithful", 0.5, 0),
        ("half", 0.5, 2 / 65**0.5),
        ("skips", 0.5, 4 / 65**0.5),
        ("skips", 0.25, 2 / 16.25**0.5),
        ("skips", 1.0, 0),  # without any A there is no answer, as it says
    ],
)
def test_a_step_that_is_skipped_is_not_what_the_model_does(name: str, cut: float, error: float) -> None:
    found = response_errors(two_steps.lm(), DICTIONARIES[name], two_steps.PROMPT, cut)
    np.testing.assert_allclose(found, [0, error], rtol=1e-6)


def test_transcoders_that_equal_the_mlps_respond_as_these_do() -> None:
    """Of a random model with attention and norms; with decoders that are zero they say that nothing happens."""
    lm = tiny_lm(activation="relu")
    saes = []
    for i, block in enumerate(lm.params["blocks"]):
        reads, writes, mlp = MLPS_IN[i : i + 1], MLPS_OUT[i : i + 1], block["mlp"]
        coder = coder_of("transcoder", "relu", reads, writes, 24)
        params = {"W_enc": mlp["W_in"], "b_enc": mlp["b_in"], "W_dec": mlp["W_out"], "b_dec": mlp["b_out"]}
        saes.append(TrainedCoder(coder, params, sites_of(coder, reads, writes)))
    tokens = np.arange(9, dtype=np.int32)
    np.testing.assert_allclose(response_errors(lm, saes, tokens, silent=0), 0, atol=1e-5)
    saes[1] = dataclasses.replace(saes[1], params=saes[1].params | {"W_dec": 0 * saes[1].params["W_dec"]})
    np.testing.assert_allclose(response_errors(lm, saes, tokens, silent=0), [0, 1], atol=1e-5)


def test_what_does_not_go_together_is_refused() -> None:
    lm, saes = two_steps.lm(), DICTIONARIES["faithful"]
    with pytest.raises(DataError, match="write elsewhere"):
        skipped(lm, saes, attribute(lm, DICTIONARIES["transcoders"][:1], two_steps.PROMPT, ALL), ALL)
    with pytest.raises(DataError, match=r"\(1, 3, 0\) of the graph is not active"):
        skipped(lm, DICTIONARIES["skips"], graph_of("faithful"), ALL)
    for cut in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="cut is"):
            response_errors(lm, saes, two_steps.PROMPT, cut)
