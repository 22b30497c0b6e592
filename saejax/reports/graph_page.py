"""An attribution graph as one page that needs no other file: `render_graph` writes it.

It takes plain data: circuit-tracer's graph JSON, whoever wrote it, feature tables, and results of interventions. The
reader pins nodes and makes supernodes of them; the page saves both as JSON, which it and `render_graph` read again.
"""

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.errors import DataError
from saejax.core.files import finite, write_bytes
from saejax.reports.page import document, pack

_STYLES = ("page.css", "graph.css")
_SCRIPTS = (
    *("dom.js", "scales.js", "charts.js", "tokens.js", "unpack.js", "detail.js"),
    *("graph_model.js", "graph_layout.js", "graph_view.js", "graph_panel.js", "graph_effects.js"),
    *("graph_heads.js", "graph_faithful.js", "graph_page.js"),
)
# So many nodes take a browser about a second.
MOST_NODES = 20_000

FeatureKey = tuple[int, int]  # layer, latent


def render_graph(
    path: str | os.PathLike[str],
    graph: Mapping[str, Any],
    *,
    tables: Mapping[int, Mapping[str, Any]] | None = None,
    effects: Sequence[Mapping[str, Any]] = (),
    effects_of: str = "",
    heads: Mapping[str, Any] | None = None,
    faithful: Mapping[str, Any] | None = None,
    supernodes: Mapping[str, Any] | None = None,
    figures: Mapping[str, float | str] | None = None,
) -> Path:
    """Writes the page of one graph to `path` and returns it. Equal arguments give equal bytes.

    Args:
      graph: {"metadata", "qParams", "nodes", "links"} with circuit-tracer's fields.
      tables: by layer, {"vocab", "features"} as `read_features` gives; a row's id is the latent's number. Of a
        dictionary whose table holds several layers `layer_tables` makes them. Shown beside a feature's node.
      effects: {"nodes": [ids], "what": text, "predicted": number, "measured": number, "interval": [low, high] or None}
        of each intervention.
      effects_of: what changed, for instance "Change of the logit of Austin less that of Texas".
      heads: {"edges", "scores"} of `saejax.app.graph_heads.heads_json`: heads that edges pass, and why they attend.
      faithful: {"layers", "rows"} of `saejax.app.graph_faithful.faithfulness`: steps of the model that are skipped.
      supernodes: a file that the page saved, instead of the graph's own "qParams".
      figures: numbers of the graph to stand on top, such as its replacement score.

    Raises:
      DataError: an argument is not of its form, `supernodes` is of another graph, or the page cannot be written.
    """
    nodes, tokens = _nodes(graph)
    rows = [_effect(row) for row in effects]
    pairs = [(row["predicted"], row["measured"]) for row in rows]
    if not _words(dictionaries := graph["metadata"].get("transcoder_list") or []):
        raise DataError("The graph's transcoder_list is not a list of text.")
    summary = {
        "slug": _checked_text(graph["metadata"].get("slug"), "the slug"),
        "dictionaries": ", ".join(dictionaries),
        "tokens": tokens,
        **_layered(nodes),
        **_links(graph, [node["id"] for node in nodes]),
        "qParams": _pins(graph.get("qParams"), "the graph's qParams"),
        "effects": {
            "rows": rows,
            "of": _checked_text(effects_of, "effects_of"),
            "spearman": finite(spearman(*zip(*pairs, strict=True))) if len(pairs) > 2 else None,
        },
        "faithful": _faithful(faithful or {"layers": [], "rows": []}),
        "heads": _heads(heads or {"edges": [], "scores": []}, len(tokens)),
        "figures": {
            name: value if isinstance(value, str) else _finite_number(value, f"the figure {name!r}")
            for name, value in (figures or {}).items()
        },
    }
    if supernodes is not None:
        pins = summary["qParams"] = _pins(supernodes.get("qParams"), "supernodes")
        named = [*pins["pinnedIds"], *(name for _, *inside in pins["supernodes"] for name in inside)]
        if strangers := [name for name in named if name not in {node["id"] for node in nodes}]:
            raise DataError(
                f"supernodes names {len(strangers)} nodes that the graph does not have, {strangers[0]!r} for one: give "
                "the file of this graph, or prune it at a higher share."
            )
    shown = {(int(node["layer"]), node["latent"]) for node in nodes if node["kind"] == "feature"}
    packed = pack(_picked(shown, tables)) if tables else ""
    title = "".join(letter if letter.isprintable() else "." for letter in f"{summary['slug']} · attribution graph")
    write_bytes(path, document("graph_page.html", title, _STYLES, _SCRIPTS, summary, packed).encode())
    return Path(path)


def layer_tables(table: Mapping[str, Any], d_sae: int) -> dict[int, dict[str, Any]]:
    """The feature table of a dictionary with several groups of `d_sae` latents, one table for each group."""
    tables: dict[int, dict[str, Any]] = {}
    for row in table["features"]:
        layer, latent = divmod(row["id"], d_sae)
        rows = tables.setdefault(layer, {"vocab": table["vocab"], "features": []})["features"]
        rows.append({**row, "id": latent})
    return tables


def _nodes(graph: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """(what the page says of each node, the prompt's tokens)."""
    metadata, listed = graph.get("metadata"), graph.get("nodes")
    tokens = metadata.get("prompt_tokens") if isinstance(metadata, Mapping) else None
    if not _words(tokens) or not tokens:
        raise DataError("The graph's metadata has no prompt_tokens; give circuit-tracer's graph JSON.")
    if not isinstance(listed, list) or len(listed) > MOST_NODES:
        raise DataError(f"The graph has no list of at most {MOST_NODES:,} nodes; prune it at a lower share.")
    nodes = [_node(row, len(tokens)) for row in listed]
    if len(counts := Counter(node["id"] for node in nodes)) < len(nodes):
        raise DataError(f"Two nodes of the graph have the id {counts.most_common(1)[0][0]!r}; give each its own.")
    return nodes, list(tokens)


def _node(row: Any, n_tokens: int) -> dict[str, Any]:
    if not isinstance(row, Mapping) or not isinstance(row.get("node_id"), str):
        raise DataError(f"A node of the graph has no node_id: {str(row)[:80]}")
    name, feature_type = f"the node {row['node_id']!r}", _checked_text(row.get("feature_type"), "a node's feature_type")
    kinds = {"embedding": "token", "logit": "logit"}
    kind = "error" if "error" in feature_type else kinds.get(feature_type, "feature")
    column, layer, number = row.get("ctx_idx"), str(row.get("layer")), row.get("feature")
    if type(column) is not int or not 0 <= column < n_tokens:
        raise DataError(f"{name} is at token {column!r} of {n_tokens}.")
    if kind != "token" and not (layer.isascii() and layer.isdigit() and len(layer) < 6):
        raise DataError(f"{name} has the layer {layer!r}, which is not a whole number.")
    if type(number) is not int or abs(number) > 1 << 53:
        raise DataError(f"{name} has the feature {number!r}, which is not a whole number.")
    label = _checked_text(row.get("clerp") or "", f"the clerp of {name}")
    # What a logit is called: Output "<token>" (p=0.410)
    opened, closed = label.find('"'), label.rfind('"')
    return {
        "id": row["node_id"],
        "kind": kind,
        "layer": layer,
        "latent": _latent(int(layer), number) if kind == "feature" else number,
        "column": column,
        "label": label[opened + 1 : closed] if kind == "logit" and opened < closed else label,
        "influence": _finite_number(row.get("influence"), f"the influence of {name}", optional=True),
        "activation": _finite_number(row.get("activation"), f"the activation of {name}", optional=True),
        "probability": _finite_number(row.get("token_prob", 0.0), f"the token_prob of {name}")
        if kind == "logit"
        else None,
    }


def _latent(layer: int, number: int) -> int:
    """The latent of Cantor's number of (layer, latent); of another number that number itself."""
    diagonal = (math.isqrt(8 * number + 1) - 1) // 2 if number >= 0 else -1
    latent = number - diagonal * (diagonal + 1) // 2
    return latent if diagonal - latent == layer else number


def _layered(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """{"rows", "nodes"}: the embeddings' row, one of each layer that has a node, and the outputs' row, from below."""
    layers = sorted({int(node["layer"]) for node in nodes if node["kind"] in ("feature", "error")})
    place = {layer: i + 1 for i, layer in enumerate(layers)}
    ends = {"token": 0, "logit": len(layers) + 1}
    placed = [{**n, "row": ends[n["kind"]] if n["kind"] in ends else place[int(n["layer"])]} for n in nodes]
    return {"rows": ["emb", *(f"L{layer}" for layer in layers), "out"], "nodes": placed}


def _links(graph: Mapping[str, Any], ids: Sequence[str]) -> dict[str, list[Any]]:
    """{"sources", "targets", "weights"}: places of nodes, and numbers at 4 digits."""
    place = {name: i for i, name in enumerate(ids)}
    links = graph.get("links")
    if not isinstance(links, list):
        raise DataError("The graph has no list of links; give circuit-tracer's graph JSON.")
    ends: dict[str, list[Any]] = {"sources": [], "targets": [], "weights": []}
    for link in links:
        if not isinstance(link, Mapping):
            raise DataError(f"A link of the graph is not an object: {str(link)[:80]}")
        for key, into in (("source", "sources"), ("target", "targets")):
            if not isinstance(link.get(key), str) or link[key] not in place:
                raise DataError(f"A link's {key} is {link.get(key)!r}, which is no node of the graph.")
            ends[into].append(place[link[key]])
        ends["weights"].append(float(f"{_finite_number(link.get('weight'), 'the weight of a link'):.4g}"))
    return ends


def _pins(params: Any, whose: str) -> dict[str, Any]:
    """{"pinnedIds", "supernodes", "linkType"}."""
    if not isinstance(params, Mapping):
        raise DataError(f"{whose}: there is no qParams object; give a file that the graph's page saved.")
    pinned, groups = params.get("pinnedIds"), params.get("supernodes")
    if not _words(pinned) or not isinstance(groups, list) or not all(_words(group) and group for group in groups):
        raise DataError(f"{whose}: pinnedIds is a list of ids, supernodes one of lists [name, id, ...].")
    kind = params.get("linkType")
    return {"pinnedIds": pinned, "supernodes": groups, "linkType": kind if isinstance(kind, str) else "both"}


def _effect(row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping) or not _words(row.get("nodes")):
        raise DataError(f"An effect has no list of node ids: {str(row)[:80]}")
    what = _checked_text(row.get("what"), "what an effect says was done")
    interval = row.get("interval")
    if interval is not None and (not isinstance(interval, list | tuple) or len(interval) != 2):
        raise DataError(f"The interval of {what!r} is {interval!r}; it must be [low, high] or None.")
    return {
        "nodes": list(row["nodes"]),
        "what": what,
        "predicted": _finite_number(row.get("predicted"), f"the predicted change of {what!r}"),
        "measured": _finite_number(row.get("measured"), f"the measured change of {what!r}"),
        "interval": interval and [_finite_number(end, f"the interval of {what!r}") for end in interval],
    }


def _heads(heads: Mapping[str, Any], n_tokens: int) -> dict[str, Any]:
    """The heads as the page takes them: places are whole numbers, and values finite."""

    def place(row: Mapping[str, Any], what: str) -> dict[str, int]:
        ends = {"block": 1 << 20, "head": 1 << 20, "query": n_tokens, "key": n_tokens}
        for key, end in ends.items():
            if type(row.get(key)) is not int or not 0 <= row[key] < end:
                raise DataError(
                    f"The {key} of {what} is {str(row.get(key))[:40]}, which is not a whole number below {end}."
                )
        return {key: row[key] for key in ends}

    def sides(rows: Any, names: tuple[str, ...], value: str) -> list[dict[str, Any]]:
        return [
            {key: _checked_text(row.get(key), f"the {key} of a head") for key in names}
            | {value: _finite_number(row.get(value), f"the {value} of a head")}
            for row in rows
        ]

    numbers = ("score", "mean", "pattern", "bias")
    try:
        edges = [
            sides([edge], ("source", "target"), "weight")[0]
            | {"parts": [place(p, "a part") | sides([p], (), "weight")[0] for p in edge["parts"]]}
            for edge in heads["edges"]
        ]
        scores = [
            place(one, "a score")
            | {key: _finite_number(one.get(key), f"the {key} of a head") for key in numbers}
            | {key: sides(one[key], ("node",), "value") for key in ("queries", "keys")}
            | {"pairs": sides(one["pairs"], ("query", "key"), "value")}
            for one in heads["scores"]
        ]
    except (KeyError, TypeError, AttributeError):
        raise DataError("The heads are not those of saejax graph --heads: give its file <name>.heads.json.") from None
    return {"edges": edges, "scores": scores}


def _faithful(found: Mapping[str, Any]) -> dict[str, Any]:
    """The measures as the page takes them: a row for each set of dictionaries, with a number for each layer."""
    numbers, by_layer = ("replacement", "completeness", "path", "skipped", "error"), ("skipped_by_layer", "errors")
    try:
        layers = [_checked_text(name, "a layer of the measures") for name in found["layers"]]
        rows = [
            {"name": _checked_text(row["name"], "the name of a measure")}
            | {key: _finite_number(row[key], f"the measure {key}") for key in numbers}
            | {key: [_finite_number(v, f"the measure {key}") for v in row[key]] for key in by_layer}
            for row in found["rows"]
        ]
    except (KeyError, TypeError):
        raise DataError("The measures are not those of saejax graph --faithful: give <name>.faithful.json.") from None
    if any(len(row[key]) != len(layers) for row in rows for key in by_layer):
        raise DataError("The measures have not one number for each layer.")
    return {"layers": layers, "rows": rows}


def spearman(some: Iterable[float], others: Iterable[float]) -> float:
    """Pearson's correlation of ranks, equal values at their mean rank; NaN where either side is constant."""
    ranks = []
    for side in (some, others):
        _, place, count = np.unique(list(side), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - (count - 1) / 2)[place])
    constant = min(len(rank) and np.ptp(rank) for rank in ranks) == 0
    return math.nan if constant else float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _picked(shown: Iterable[FeatureKey], tables: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """{"vocab", "features": {"<layer>_<latent>": row}} of those features, their tokens as numbers of one vocabulary."""
    place: dict[str, int] = {}
    rows = {layer: {row["id"]: row for row in table["features"]} for layer, table in tables.items()}
    features = {}
    for layer, latent in sorted(shown):
        if row := rows.get(layer, {}).get(latent):
            vocab = tables[layer]["vocab"]
            features[f"{layer}_{latent}"] = _renumbered(row, vocab, place)
    return {"vocab": list(place), "features": features}


def _renumbered(row: Mapping[str, Any], vocab: Sequence[str], place: dict[str, int]) -> dict[str, Any]:
    def passages(examples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{**one, "tokens": [place.setdefault(vocab[t], len(place)) for t in one["tokens"]]} for one in examples]

    def promoted(pairs: Iterable[Sequence[Any]]) -> list[list[Any]]:
        return [[token if isinstance(token, str) else vocab[token], value] for token, value in pairs]

    changed: dict[str, Any] = {key: promoted(row[key]) for key in ("top_logits", "bottom_logits") if row.get(key)}
    if row.get("examples"):
        changed["examples"] = passages(row["examples"])
    if row.get("quantiles"):
        changed["quantiles"] = [{**part, "examples": passages(part["examples"])} for part in row["quantiles"]]
    return {**row, **changed}


def _words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{name[0].upper()}{name[1:]} is {str(value)[:40]!r}, which is not text.")
    return value


def _finite_number(value: Any, name: str, optional: bool = False) -> Any:
    if optional and value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise DataError(f"{name[0].upper()}{name[1:]} is {str(value)[:40]!r}, which is not a finite number.")
    return value
