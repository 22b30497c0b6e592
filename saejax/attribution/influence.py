"""Importance in a graph for the logits: influence, pruning, and the share that features explain.

    A_ts = |w_ts| / sum_s |w_ts|,   B = (I - A)^-1 - I = A + A^2 + ...,   influence = p B

p is the probability of each logit, 0 for all other nodes. Effects go from earlier to later, so that the sum ends.
(Ameisen et al. 2025, "Circuit Tracing"; circuit-tracer 0.5, graph.py)

Shape letters: N nodes; R of them have a row, features first, then logits.
"""

import dataclasses

import numpy as np

from saejax.attribution.graph import Graph
from saejax.core.errors import ConfigError, DataError

_MOST_STEPS = 1000
_LEAST_SUM = 1e-10


@dataclasses.dataclass(frozen=True)
class Pruned:
    """The rest of a graph.

    Attributes:
        nodes: bool [N]. edges: bool [R, N], target by source as in the graph's weights, between these nodes.
        influence: float64 [N], of the whole graph's nodes.
        counted: bool [N], the nodes whose influence shares are of; all of them if None.
    """

    nodes: np.ndarray
    edges: np.ndarray
    influence: np.ndarray
    counted: np.ndarray | None = None

    @property
    def cumulative(self) -> np.ndarray:
        """For each node the share of all influence that it and those of more have, float64 [N]; 0 if not counted."""
        counted = np.ones(len(self.influence), bool) if self.counted is None else self.counted
        score = np.where(counted, self.influence, 0.0)
        order = np.argsort(-score, kind="stable")
        shares = np.empty(len(order))
        shares[order] = np.cumsum(score[order]) / max(score.sum(), _LEAST_SUM)
        return np.where(counted, shares, 0.0)


def influence(graph: Graph) -> np.ndarray:
    """p B, float64 [N]."""
    return _influence(graph, _normalised(graph.weights))


def pruned(graph: Graph, node_share: float, edge_share: float, count_tokens: bool = True) -> Pruned:
    """The fewest nodes that have `node_share` of the influence, then the fewest edges with `edge_share` of theirs.

    An edge of the graph of these nodes, normalised anew, has A_ts (influence_t + p_t). Tokens and logits stay always.
    A feature or error from which no edge leads anywhere goes, and so does a feature to which none leads, until none is
    left of these.

    Args:
        count_tokens: False: both shares are of what features and errors have. Where dictionaries stand for a few MLPs,
            all that passes through the others is the tokens' and would leave nothing else in sight.

    Raises:
        ConfigError: a share outside of [0, 1].
        DataError: as `influence`.
    """
    for name, share in (("node_share", node_share), ("edge_share", edge_share)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{name} is {share}; it must be between 0 and 1.")
    rows, parts = graph.targets, graph.parts
    score = influence(graph)
    counted_N = np.ones(graph.n_nodes, bool)
    counted_N[parts["tokens"]] = counted_N[parts["logits"]] = count_tokens
    nodes = score >= _threshold(score[counted_N], node_share)
    nodes[parts["tokens"].start :] = True
    normalised_RN = _normalised(np.where(nodes[rows][:, None] & nodes[None], graph.weights, 0))
    ends_N = _influence(graph, normalised_RN) + _p(graph)
    scores_RN = normalised_RN * ends_N[rows][:, None]
    there_RN = scores_RN > 0
    edges_RN = there_RN & (scores_RN >= _threshold(scores_RN[there_RN & counted_N], edge_share))
    features, inner = parts["features"], slice(0, parts["tokens"].start)
    while True:
        before = nodes.copy()
        nodes[inner] &= edges_RN.any(0)[inner]
        nodes[features] &= edges_RN[features].any(1)
        edges_RN &= nodes[rows][:, None] & nodes[None]
        if np.array_equal(nodes, before):
            break
    return Pruned(nodes, edges_RN, score, counted_N)


def scores(graph: Graph) -> tuple[float, float]:
    """(replacement, completeness) of a graph, each in [0, 1].

    replacement = tokens' influence / (tokens' + errors'): what comes from the prompt and not from what is unexplained.
    completeness = sum_t (1 - the errors' share of A_t) (influence_t + p_t) / sum_t (influence_t + p_t).
    """
    parts, rows = graph.parts, graph.targets
    normalised_RN = _normalised(graph.weights)
    score = _influence(graph, normalised_RN)
    tokens, errors = (float(score[parts[name]].sum()) for name in ("tokens", "errors"))
    ends_N = score + _p(graph)
    explained_N = np.ones(graph.n_nodes)
    explained_N[rows] -= normalised_RN[:, parts["errors"]].sum(1)
    replacement = tokens / (tokens + errors) if tokens + errors else 0.0
    return replacement, float(explained_N @ ends_N / ends_N.sum())


def path_length(graph: Graph) -> float:
    """Mean number of edges of the paths from tokens to logits, each weighted by its influence; 0 where there is none.

        sum_k k m_k / sum_k m_k       m_k = tokens' part of p A^k

    A path of a model that thinks in many steps is long; a dictionary that skips steps makes it shorter. (Ameisen et al.
    2025, "Circuit Tracing", who compare cross-layer transcoders with those of single layers by it)
    """
    rows, step_N, normalised_RN = graph.targets, _p(graph), _normalised(graph.weights)
    total = weighted = 0.0
    for edges in range(1, _MOST_STEPS):
        step_N = step_N[rows] @ normalised_RN
        if not step_N.any():
            break
        mass = float(step_N[graph.parts["tokens"]].sum())
        total, weighted = total + mass, weighted + edges * mass
    return weighted / total if total else 0.0


def _p(graph: Graph) -> np.ndarray:
    p_N = np.zeros(graph.n_nodes)
    p_N[graph.parts["logits"]] = graph.probabilities
    return p_N


def _normalised(weights_RN: np.ndarray) -> np.ndarray:
    absolute_RN = np.abs(weights_RN)
    return absolute_RN / np.maximum(absolute_RN.sum(1, keepdims=True, dtype=np.float64), _LEAST_SUM)


def _influence(graph: Graph, normalised_RN: np.ndarray) -> np.ndarray:
    rows, step_N, total_N = graph.targets, _p(graph), np.zeros(graph.n_nodes)
    for _ in range(_MOST_STEPS):
        step_N = step_N[rows] @ normalised_RN
        if not step_N.any():
            return total_N
        total_N += step_N
    raise DataError(f"The graph's effects go in a circle: after {_MOST_STEPS} steps there is influence left to give.")


def _threshold(scores: np.ndarray, share: float) -> float:
    """The least of the largest scores that have this share of the sum."""
    falling = -np.sort(-scores.ravel().astype(np.float64))
    if not len(falling):
        return 0.0
    reached = np.searchsorted(np.cumsum(falling), share * falling.sum())
    return float(falling[min(reached, len(falling) - 1)])
