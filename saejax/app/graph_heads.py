"""The heads of a prompt's graph: which heads its edges pass, and why these heads attend, as JSON for page and file."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from saejax.attribution.export import error_id
from saejax.attribution.graph import Graph
from saejax.attribution.heads import Heads, HeadScore
from saejax.attribution.influence import Pruned
from saejax.attribution.local import LocalModel
from saejax.attribution.settings import AttributionConfig
from saejax.core.progress import Progress
from saejax.lm import LanguageModel
from saejax.trained import TrainedCoder

EDGES, PARTS, SCORES, PAIRS = 24, 5, 8, 10
BIAS = "bias"


def heads_json(
    lm: LanguageModel, saes: Sequence[TrainedCoder], graph: Graph, kept: Pruned, config: AttributionConfig
) -> dict[str, Any]:
    """{"edges", "scores"}: of the edges between two tokens that matter most, and of the heads that carry them.

    An edge matters as much as its share of the influence. A head between two tokens matters as much as what passes it
    of these edges.

    Returns:
        edges: {"source", "target", "weight", "parts": [{"block", "head", "query", "key", "weight"}]}, the nodes' ids.
        scores: {"block", "head", "query", "key", "score", "mean", "pattern", "bias", "queries", "keys", "pairs"}. Of
            `pairs` each is {"query", "key", "value"}, a node an id, or "bias"; `bias` is the pair of both. `keys` are
            sums of pairs over the queries, {"node", "value"}; `queries` {"node", "value"} of `above_by_query`.

    Raises:
        DataError: as `Heads`.
    """
    local = LocalModel(lm, saes, graph.tokens, config, answers=graph.logits.tolist())
    heads, places = Heads(local), local.numbers(graph)
    name = _namer(local, graph)
    edges, carried = [], defaultdict[tuple[int, int, int, int], float](float)
    chosen = _between_tokens(graph, kept)
    with Progress("heads", len(chosen), unit="edges") as bar:
        for source, target, weight, share in chosen:
            parts = heads.passed(int(places[source]), int(places[target]), PARTS)
            for one in parts:
                carried[one.block, one.head, one.query, one.key] += share * abs(one.weight / weight)
            shown = [dataclasses.asdict(part) | {"weight": _short(part.weight)} for part in parts]
            ends = {"source": name(int(places[source])), "target": name(int(places[target]))}
            edges.append(ends | {"weight": _short(weight), "parts": shown})
            bar.advance(1)
    best, scores = sorted(carried, key=lambda place: -carried[place])[:SCORES], []
    with Progress("heads", len(best), unit="scores") as bar:
        for place in best:
            scores.append(_score(heads.score(*place), name))
            bar.advance(1)
    return {"edges": edges, "scores": scores}


def _between_tokens(graph: Graph, kept: Pruned) -> list[tuple[int, int, float, float]]:
    """(source, target, weight, share of the influence) of the kept edges between two tokens that have most of it."""
    position = _positions(graph)
    rows, sources = np.nonzero(kept.edges)
    targets = graph.targets[rows]
    between = position[sources] < position[targets]
    rows, sources, targets = rows[between], sources[between], targets[between]
    ends_N = kept.influence.copy()
    ends_N[graph.parts["logits"]] += graph.probabilities
    sizes = np.abs(graph.weights).sum(1, dtype=np.float64)[rows]
    weights = graph.weights[rows, sources]
    shares = ends_N[targets] * np.abs(weights) / np.maximum(sizes, 1e-10)
    order = np.argsort(-shares, kind="stable")[:EDGES]
    return [(int(sources[i]), int(targets[i]), float(weights[i]), float(shares[i])) for i in order]


def _positions(graph: Graph) -> np.ndarray:
    """The token of each node, [N]."""
    every = np.arange(len(graph.tokens))
    of_errors = np.tile(every, len(graph.hook_points))
    return np.r_[graph.features[:, 1], of_errors, every, np.full(len(graph.logits), every[-1])]


def _namer(local: LocalModel, graph: Graph) -> Callable[[int], str]:
    """The id that `node_ids` gives a node, whether the graph shows it or not; "bias" behind the sources."""
    taken = {f"{layer}_{latent}_{position}" for layer, position, latent in graph.features.tolist()}

    def name(node: int) -> str:
        place = node - len(local.features)
        if place < 0:
            layer, position, latent = local.features[node].tolist()
            return f"{layer}_{latent}_{position}"
        if place < local.n_errors:
            return error_id(*divmod(place, local.n_tokens), taken)
        if node < local.n_sources:
            position = place - local.n_errors
            return f"E_{int(graph.tokens[position])}_{position}"
        token = int(local.logits[node - local.n_sources])
        return f"{len(local.layers) + 1}_{token}_{local.n_tokens - 1}"

    return name


def _score(found: HeadScore, name: Callable[[int], str]) -> dict[str, Any]:
    bias = len(found.query_ND) - 1

    def named(node: int) -> str:
        return BIAS if node == bias else name(node)

    def side(parts_N: np.ndarray) -> list[dict[str, Any]]:
        order = np.argsort(-np.abs(parts_N), kind="stable")[:PAIRS]
        return [{"node": named(int(node)), "value": _short(parts_N[node])} for node in order]

    return {
        **{key: getattr(found, key) for key in ("block", "head", "query", "key")},
        "score": _short(found.score),
        "mean": _short(found.mean),
        "pattern": _short(found.pattern),
        "bias": _short(found.scale * float(found.query_ND[bias] @ found.key_ND[bias])),
        "queries": side(found.above_by_query),
        "keys": side(found.by_key),
        "pairs": [{"query": named(s), "key": named(t), "value": _short(v)} for s, t, v in found.strongest(PAIRS)],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
