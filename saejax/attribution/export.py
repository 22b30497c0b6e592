"""A pruned graph as the JSON files that circuit-tracer's page opens, and its features' files beside it.

Written from circuit-tracer 0.5's `frontend/graph_models.py` and `frontend/feature_models.py`: the same fields, no
others. Its local page reads a folder: <slug>.json for each graph, graph-metadata.json for all of them, and under
features/ what each feature fires on. Two things differ. Every id is a function of the graph alone, equal in all
processes. And no two nodes share one: circuit-tracer gives the error of layer 3 and the feature 3 of layer 0 one id.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from saejax.attribution.graph import Graph
from saejax.attribution.influence import Pruned
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import read_json, write_json

INDEX = "graph-metadata.json"
# Where circuit-tracer's local page finds the folder that it serves.
_SERVED = "./data/"

FeatureKey = tuple[int, int]  # layer, latent


def graph_json(
    graph: Graph,
    kept: Pruned,
    *,
    slug: str,
    logit_strings: Sequence[str],
    node_threshold: float | None = None,
    labels: Mapping[FeatureKey, str] | None = None,
) -> dict[str, Any]:
    """{"metadata", "qParams", "nodes", "links"} of the nodes and edges that are kept.

    A node's influence in the file is cumulative, as circuit-tracer's reader wants it: the share of all influence that
    this node and those of more influence have. Keeping the nodes below a threshold prunes there. Logits have none.

    Args:
        kept: of `influence.pruned`.
        slug: the graph's name among others; its file is <slug>.json. Letters, digits, ".", "_" and "-".
        logit_strings: the tokens of the logits as text, in their order.
        node_threshold: the share of influence at which the nodes were pruned.
        labels: what a feature stands for, by (layer, latent).
    """
    checked_slug(slug)
    if len(kept.nodes) != graph.n_nodes:
        raise DataError(f"What is kept is of {len(kept.nodes)} nodes; the graph has {graph.n_nodes}.")
    if len(logit_strings) != len(graph.logits):
        raise DataError(f"There are {len(logit_strings)} logit_strings; the graph has {len(graph.logits)} logits.")
    rows, sources = np.nonzero(kept.edges)
    ids, targets = node_ids(graph), graph.targets[rows]
    weights = _floats(graph.weights[rows, sources])
    described = _nodes(graph, ids, kept.cumulative, labels or {}, logit_strings)
    return {
        "metadata": {
            "slug": slug,
            "scan": scan_of(graph.names),
            "transcoder_list": [graph.names["dictionaries"]] if "dictionaries" in graph.names else [],
            "prompt_tokens": list(graph.strings),
            "prompt": graph.names.get("prompt", "".join(graph.strings)),
            "node_threshold": node_threshold,
            "schema_version": 1,
        },
        "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
        "nodes": [node for node, keep in zip(described, kept.nodes, strict=True) if keep],
        "links": [
            {"source": ids[s], "target": ids[t], "weight": weight}
            for s, t, weight in zip(sources.tolist(), targets.tolist(), weights, strict=True)
        ],
    }


def checked_slug(slug: str) -> str:
    """`slug`, if it can name a file."""
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", slug) or slug == Path(INDEX).stem:
        raise ConfigError(f"The slug {slug!r} cannot name a graph's file: use at most 100 of A-Z a-z 0-9 . _ -")
    return slug


def scan_of(names: Mapping[str, str]) -> str:
    """The folder of the features' files, seen from circuit-tracer's page: one for each set of dictionaries.

    Its name is a digest of what the graph is of (`names` hold the content of model and dictionaries as a digest), the
    prompt left out, so graphs of several prompts share the folder.
    """
    content = json.dumps({key: value for key, value in names.items() if key != "prompt"}, sort_keys=True)
    return f"{_SERVED}features/{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def feature_number(layer: int, latent: int) -> int:
    """Cantor's number of the pair: one whole number for each (layer, latent)."""
    return (layer + latent) * (layer + latent + 1) // 2 + latent


def node_ids(graph: Graph) -> list[str]:
    """N ids: features and logits {layer}_{number}_{position}, errors 0_{layer}_{position}, tokens E_{id}_{position}.

    A logit's layer is two above the last one, its number the token's id. Where a feature of the graph has an error's
    id, the error's is longer.
    """
    last, n_layers = len(graph.tokens) - 1, len(graph.hook_points)
    features = [f"{layer}_{latent}_{position}" for layer, position, latent in graph.features.tolist()]
    taken = set(features)
    errors = [error_id(layer, position, taken) for layer in range(n_layers) for position in range(last + 1)]
    return [
        *features,
        *errors,
        *(f"E_{token}_{position}" for position, token in enumerate(graph.tokens.tolist())),
        *(f"{n_layers + 1}_{token}_{last}" for token in graph.logits.tolist()),
    ]


def error_id(layer: int, position: int, features: Set[str]) -> str:
    """The id of an error beside features with these ids."""
    name = f"0_{layer}_{position}"
    return f"{name}_error" if name in features else name


def _nodes(
    graph: Graph, ids: Sequence[str], shares: np.ndarray, labels: Mapping[FeatureKey, str], logit_strings: Sequence[str]
) -> list[dict[str, Any]]:
    """Every node of the graph as circuit-tracer describes it."""
    last, n_layers = len(graph.tokens) - 1, len(graph.hook_points)
    described: list[dict[str, Any]] = []
    for (layer, position, latent), activation in zip(graph.features.tolist(), _floats(graph.activations), strict=True):
        described.append(
            _node(layer, position, "cross layer transcoder", f"{layer}_{latent}-0", feature_number(layer, latent))
            | {"clerp": labels.get((layer, latent), ""), "activation": activation}
        )
    for layer in range(n_layers):
        for position in range(last + 1):
            described.append(_node(layer, position, "mlp reconstruction error", f"{layer}_{position}-0", -1))
    for position, token in enumerate(graph.tokens.tolist()):
        described.append(_node("E", position, "embedding", f"E_{token}-{position}", position))
    for node, share in zip(described, shares.tolist(), strict=False):
        node["influence"] = share
    logits = zip(graph.logits.tolist(), logit_strings, _floats(graph.probabilities), strict=True)
    for rank, (token, string, probability) in enumerate(logits):
        # circuit-tracer's page cuts the token and the probability out of this text.
        text = f'Output "{string}" (p={probability:.3f})'
        described.append(
            _node(n_layers + 1, last, "logit", f"L_{token}-{last}", token)
            | {"token_prob": probability, "is_target_logit": rank == 0, "clerp": text}
        )
    return [{"node_id": name, **node} for name, node in zip(ids, described, strict=True)]


def _node(layer: int | str, position: int, kind: str, shown: str, number: int) -> dict[str, Any]:
    return {
        "feature": number,
        "layer": str(layer),
        "ctx_idx": position,
        "feature_type": kind,
        "token_prob": 0.0,
        "is_target_logit": False,
        "run_idx": 0,
        "reverse_ctx_idx": 0,
        "jsNodeId": shown,
        "clerp": "",
        "influence": None,
        "activation": None,
    }


def write_graph(folder: str | Path, content: Mapping[str, Any]) -> Path:
    """Write <folder>/<slug>.json, and the graph into the folder's index in place of an earlier one of that slug.

    Raises:
        DataError: the index is damaged, or the folder cannot be written.
    """
    folder, metadata = Path(folder), content["metadata"]
    path, index = folder / f"{checked_slug(metadata['slug'])}.json", folder / INDEX
    listed = read_json(index) if index.exists() else {"graphs": []}
    graphs = listed.get("graphs") if isinstance(listed, dict) else None
    if not isinstance(graphs, list) or not all(isinstance(entry, dict) for entry in graphs):
        raise DataError(f"{index} holds no list of graphs; restore it or delete it.")
    write_json(path, content)
    others = [entry for entry in graphs if entry.get("slug") != metadata["slug"]]
    write_json(index, {"graphs": [*others, metadata]})
    return path


def write_features(folder: str | Path, names: Mapping[str, str], files: Mapping[FeatureKey, dict[str, Any]]) -> Path:
    """Write a file for each (layer, latent) into the folder in which the page looks for those of a graph's `names`."""
    within = Path(folder) / scan_of(names).removeprefix(_SERVED)
    for (layer, latent), content in files.items():
        write_json(within / f"{feature_number(layer, latent)}.json", content)
    return within


def _floats(values: np.ndarray) -> list[float]:
    """float32 values as the shortest numbers that stand for them."""
    return [float(text) for text in values.astype(str)]
