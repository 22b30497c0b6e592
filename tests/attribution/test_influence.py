"""Influence, pruning and scores of a graph of 12 nodes, worked by hand in fractions."""

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from saejax.attribution import AttributionConfig, Graph
from saejax.attribution.chunks import Chunks
from saejax.attribution.influence import Pruned, influence, path_length, pruned, scores
from saejax.core.errors import ConfigError, DataError

# Four features (f0, f1 read layer 0, f2, f3 layer 1), errors of 2 layers at 2 tokens, 2 tokens, logits a and b.
NAMES = ("f0", "f1", "f2", "f3", "e00", "e01", "e10", "e11", "t0", "t1", "a", "b")
ROWS = {
    "f0": {"t0": 2, "t1": -2},
    "f1": {"t0": 1, "t1": 3},
    "f2": {"f0": 4, "f1": -2, "e00": 1, "t1": 1},
    "f3": {"f1": 1, "e01": -2, "t0": 1},
    "a": {"f2": 8, "f3": 2, "e10": 2, "t0": 4},
    "b": {"f2": 1, "f3": -1, "e11": 2},
}
# In 512ths. f2 gets 1/2 of a's 3/4 and 1/4 of b's 1/4: 7/16. f0 gets half of f2's, and so on down.
INFLUENCE = {"f0": 112, "f1": 76, "f2": 224, "f3": 80, "e00": 28, "e01": 40, "e10": 48, "e11": 64, "t0": 191, "t1": 141}


TARGETS = [0, 1, 2, 3, 10, 11]  # features and logits: the nodes with a row


def graph(rows: dict[str, dict[str, int]] = ROWS) -> Graph:
    weights = np.zeros((12, 12), np.float32)
    for target, sources in rows.items():
        for source, value in sources.items():
            weights[NAMES.index(target), NAMES.index(source)] = value
    return Graph(
        np.array([5, 6], np.int32),
        ("x", "y"),
        ("blocks.0.mlp_out", "blocks.1.mlp_out"),
        np.array([[0, 0, 7], [0, 1, 8], [1, 1, 3], [1, 1, 4]], np.int32),
        np.ones(4, np.float32),
        np.array([1, 2], np.int32),
        np.array([0.75, 0.25], np.float32),
        weights[TARGETS],
    )


def named(mask: np.ndarray) -> set[str]:
    return {name for name, kept in zip(NAMES, mask, strict=True) if kept}


def edges(mask: np.ndarray) -> set[str]:
    return {f"{NAMES[TARGETS[r]]}<{NAMES[s]}" for r, s in np.argwhere(mask)}


ALL_EDGES = {f"{target}<{source}" for target, sources in ROWS.items() for source in sources}


def test_influence_by_hand() -> None:
    expected = [Fraction(INFLUENCE.get(name, 0), 512) for name in NAMES]
    np.testing.assert_allclose(influence(graph()), np.array(expected, float), rtol=1e-6)


def test_scores_by_hand() -> None:
    # All influence ends in tokens (191 + 141) or errors (180). Of the 1516 / 512 of all nodes, with p, errors are 180.
    np.testing.assert_allclose(scores(graph()), (332 / 512, (1516 - 180) / 1516), rtol=1e-6)


def test_nodes_with_four_fifths_of_the_influence_stay_and_of_their_edges_the_largest() -> None:
    # 0.8 of 1004 is 803.2: f2, t0, t1, f0, f3 have 748, f1 makes it 824. No error is among them.
    nodes = {"f0", "f1", "f2", "f3", "t0", "t1", "a", "b"}
    without_errors = {edge for edge in ALL_EDGES if edge.partition("<e")[1] == ""}
    whole = pruned(graph(), 0.8, 0.98)
    assert named(whole.nodes) == nodes and edges(whole.edges) == without_errors
    # Normalised anew, the edges have, in 784ths: a<f2 336, f2<f0 248, a<t0 168, f1<t1 161.25, f0<t0, f0<t1 and f2<f1
    # 124 each, b<f2 and b<f3 98 each, f3<f1 and f3<t0 91 each, a<f3 84, f2<t1 62, f1<t0 53.75: 1863 together.
    most = pruned(graph(), 0.8, 0.9)
    assert named(most.nodes) == nodes and edges(most.edges) == without_errors - {"f2<t1", "f1<t0"}


def test_what_has_no_way_on_or_from_goes_until_nothing_of_the_kind_is_left() -> None:
    # 0.45 of 1863: the first four edges. f1 leads nowhere now, nothing leads to f0; without f0 nothing leads to f2.
    found = pruned(graph(), 0.8, 0.45)
    assert named(found.nodes) == {"t0", "t1", "a", "b"} and edges(found.edges) == {"a<t0"}


def test_a_share_of_one_keeps_all_that_matters() -> None:
    found = pruned(graph(), 1.0, 1.0)
    assert named(found.nodes) == set(NAMES) and edges(found.edges) == ALL_EDGES
    assert found.cumulative[NAMES.index("f2")] == pytest.approx(224 / 1004)
    assert found.cumulative[NAMES.index("t1")] == pytest.approx((224 + 191 + 141) / 1004)


def test_shares_of_what_features_and_errors_have() -> None:
    """Tokens stay, whatever they have, and take nothing from the others' shares."""
    score, inner = influence(graph()), slice(0, NAMES.index("t0"))
    found = pruned(graph(), 0.5, 1.0, count_tokens=False)
    falling = np.sort(score[inner])[::-1]
    fewest = int(np.searchsorted(np.cumsum(falling), 0.5 * falling.sum())) + 1
    assert named(found.nodes) == {NAMES[i] for i in np.argsort(-score[inner])[:fewest]} | {"t0", "t1", "a", "b"}
    assert found.cumulative[np.argmax(score[inner])] == pytest.approx(falling[0] / falling.sum())
    assert found.cumulative[NAMES.index("t0")] == 0 and len(edges(found.edges)) > 0


def test_influence_accumulates_from_the_largest() -> None:
    for given, shares in (([1.0, 5.0, 0.0, 4.0], [1.0, 0.5, 1.0, 0.9]), ([0.0, 0.0, 0.0], [0, 0, 0])):
        nodes = np.ones(len(given), bool)
        assert Pruned(nodes, nodes[:, None] & nodes, np.array(given)).cumulative.tolist() == shares


def test_a_graph_without_any_effect() -> None:
    found = pruned(graph({}), 0.8, 0.98)
    assert named(found.nodes) == {"t0", "t1", "a", "b"} and not found.edges.any() and scores(graph({})) == (0.0, 1.0)


def test_what_is_no_graph_of_effects_is_refused() -> None:
    with pytest.raises(DataError, match="circle"):
        influence(graph(ROWS | {"f0": {"f2": 1}}))
    with pytest.raises(ConfigError, match=r"edge_share is 1\.5"):
        pruned(graph(), 0.8, 1.5)
    with pytest.raises(ConfigError, match="node_share is nan"):
        pruned(graph(), float("nan"), 0.98)
    with pytest.raises(DataError, match="weights"):
        dataclasses.replace(graph(), weights=np.zeros((12, 12), np.float32))
    for name, value in (("features", np.array([[0, 1, 8]] * 4, np.int32)), ("logits", np.array([1, 1], np.int32))):
        with pytest.raises(DataError, match="twice"):
            dataclasses.replace(graph(), **{name: value})


class _Made:
    """Stands for a prompt's model: the rows of the graph by hand, whichever are asked for."""

    features, n_sources, n_errors, n_tokens = graph().features, 10, 4, 2
    probabilities = graph().probabilities

    def rows(self, targets: np.ndarray, chunk: int) -> np.ndarray:
        return graph().weights[[TARGETS.index(target) for target in targets], :10]


@pytest.mark.parametrize("order", [[[10, 11], [2, 3], [0, 1]], [[0, 1], [2, 3], [10, 11]], [[3, 0], [11, 1], [2, 10]]])
def test_influence_over_rows_does_not_depend_on_the_order_in_which_they_came(order: list[list[int]]) -> None:
    made: Any = _Made()
    chunks = Chunks(made, AttributionConfig(chunk=2), None)
    for targets in order:
        chunks.add(np.array(targets))
    np.testing.assert_allclose(512 * chunks.influence(), [INFLUENCE[name] for name in NAMES[:4]], rtol=1e-12)


def test_the_length_of_paths_is_that_of_all_paths_one_by_one() -> None:
    """From each logit down to the tokens, a path's weight the product of its edges' shares."""

    def paths(node: str, weight: Fraction, edges: int) -> list[tuple[Fraction, int]]:
        if node.startswith("t"):
            return [(weight, edges)]
        into = ROWS.get(node, {})
        total = sum(map(abs, into.values()))
        return [
            one for name, value in into.items() for one in paths(name, weight * Fraction(abs(value), total), edges + 1)
        ]

    found = paths("a", Fraction(3, 4), 0) + paths("b", Fraction(1, 4), 0)
    want = sum(weight * edges for weight, edges in found) / sum(weight for weight, _ in found)
    assert path_length(graph()) == pytest.approx(float(want), rel=1e-6)
    assert path_length(graph({"a": {"e10": 1}, "b": {"e11": 1}})) == 0
