"""Phase 6: each graph as JSON and page, and study.html."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.app.graph import Tables, write_pages
from saejax.attribution import Graph
from saejax.attribution.export import node_ids
from saejax.lm import LanguageModel
from saejax.study.config import StudyConfig

# Activations of a passage that count as firing, as a share of its largest.
_FIRES = 0.5


def graph_pages(
    lm: LanguageModel,
    graphs: Sequence[Graph],
    behaviour: str,
    folder: Path,
    c: StudyConfig,
    singles: Sequence[Mapping[str, str]],
    tables: Tables,
) -> list[str]:
    """Writes JSON and a page for each graph, with single features' effects; returns the pages' file names."""
    found = []
    for i, graph in enumerate(graphs):
        effects = _effects(graph, [row for row in singles if int(row["pair"]) == i])
        shares, of = (c.node_share, c.edge_share), "Change of the logit of the right answer less that of the wrong one"
        page = write_pages(lm, graph, folder, f"{behaviour}-{i}", shares, tables, effects=effects, effects_of=of)
        found.append(page.name)
    return found


def _effects(graph: Graph, rows: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    ids = node_ids(graph)
    place = {tuple(node): i for i, node in enumerate(graph.features.tolist())}
    return [
        {
            "nodes": [ids[place[int(row["layer"]), int(row["position"]), int(row["latent"])]]],
            "what": "set to zero",
            "predicted": float(row["predicted"]),
            "measured": float(row["measured"]),
            "interval": None,
        }
        for row in rows
    ]


def fires_on(tables: Tables, layer: int, latent: int) -> str:
    """The tokens that a feature fires on most often in its strongest passages; empty where no report says it."""
    if layer not in tables:
        return ""
    row = next((row for row in tables[layer]["features"] if row["id"] == latent), None)
    if row is None:
        return ""
    vocab, counts = tables[layer]["vocab"], Counter[str]()
    for example in row.get("examples") or ():
        values = np.asarray(example["activations"], float)
        if values.size and values.max() > 0:
            counts.update(vocab[example["tokens"][i]] for i in np.flatnonzero(values >= _FIRES * values.max()))
    return "  ".join(repr(token)[1:-1] for token, _ in counts.most_common(4))
