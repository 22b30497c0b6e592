"""What the page of an attribution graph is made of, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from saejax.attribution.export import feature_number
from saejax.core.errors import DataError
from saejax.reports.graph_page import layer_tables, render_graph
from tests.tiny.graphs import VOCAB, made_up_feature, made_up_json

GRAPH = made_up_json()
TABLES = {3: {"vocab": VOCAB, "features": [made_up_feature(3, latent) for latent in (55, 300)]}}
EFFECTS = [{"nodes": ["2_8_9"], "what": "set to zero", "predicted": -1.0, "measured": -0.8, "interval": [-1.0, -0.5]}]

FAITHFUL: dict[str, Any] = {
    "layers": ["blocks.0.mlp_out"],
    "rows": [
        {"name": "mine", "skipped_by_layer": [0.25], "errors": [0.5]}
        | dict.fromkeys(("replacement", "completeness", "path", "skipped", "error"), 0.5)
    ],
}


def test_the_page_is_a_function_of_its_arguments(tmp_path: Path) -> None:
    # A feature without a node is not embedded.
    more = TABLES | {2: {"vocab": VOCAB, "features": [made_up_feature(2, 500)]}}
    one, two = (render_graph(tmp_path / f"{len(t)}.html", GRAPH, tables=t, effects=EFFECTS) for t in (TABLES, more))
    assert one != two and one.read_bytes() == two.read_bytes()


def test_a_table_of_several_layers_is_split() -> None:
    table = {"vocab": VOCAB, "features": [{"id": i, "density": 0.1, "max": i} for i in (3, 512, 1030)]}
    split = layer_tables(table, 512)
    found = {layer: [(row["id"], row["max"]) for row in one["features"]] for layer, one in split.items()}
    assert found == {0: [(3, 3)], 1: [(0, 512)], 2: [(6, 1030)]}


def node(graph: dict[str, Any], **change: Any) -> None:
    graph["nodes"][0].update(change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda graph: graph.pop("metadata"), "prompt_tokens"),
        (lambda graph: graph["metadata"].update(prompt_tokens=[1]), "prompt_tokens"),
        (lambda graph: graph.pop("links"), "no list of links"),
        (lambda graph: graph.update(nodes={}), "no list of at most"),
        (lambda graph: graph["nodes"].append(graph["nodes"][0]), "Two nodes of the graph have the id"),
        (lambda graph: node(graph, ctx_idx=99), "at token 99 of 11"),
        (lambda graph: node(graph, layer="x"), "layer 'x'"),
        (lambda graph: node(graph, layer="9" * 5000), "which is not a whole number"),
        (lambda graph: node(graph, feature=1 << 90), "feature 1237"),
        (lambda graph: node(graph, influence=float("nan")), "not a finite number"),
        (lambda graph: node(graph, clerp=7), "which is not text"),
        (lambda graph: graph["links"][0].update(source="gone"), "'gone', which is no node"),
        (lambda graph: graph["links"][0].update(weight="1"), "not a finite number"),
        (lambda graph: graph["qParams"].update(supernodes=[[]]), r"lists \[name, id"),
    ],
)
def test_a_graph_that_is_none_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    graph = copy.deepcopy(GRAPH)
    change(graph)
    with pytest.raises(DataError, match=words):
        render_graph(tmp_path / "graph.html", graph)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"supernodes": {}}, "no qParams"),
        ({"supernodes": {"qParams": {"pinnedIds": ["7_7_7"], "supernodes": []}}}, "'7_7_7' for one"),
        ({"figures": {"replacement score": float("nan")}}, "figure 'replacement score' is 'nan'"),
        ({"effects": [{"what": "x"}]}, "no list of node ids"),
        ({"faithful": {"layers": []}}, "saejax graph --faithful"),
        ({"faithful": FAITHFUL | {"layers": []}}, "one number for each layer"),
        ({"faithful": FAITHFUL | {"rows": [FAITHFUL["rows"][0] | {"path": None}]}}, "measure path"),
        ({"heads": {"edges": []}}, "saejax graph --heads"),
        ({"heads": {"edges": [{"source": "a", "target": 1}], "scores": []}}, "target of a head is"),
        ({"heads": {"edges": [], "scores": [{"block": 0, "head": 0, "query": 11, "key": 0}]}}, "query of a score"),
        ({"effects": [EFFECTS[0] | {"measured": None}]}, "measured change of 'set to zero'"),
        ({"effects": [EFFECTS[0] | {"interval": [1]}]}, "interval of 'set to zero'"),
    ],
)
def test_what_is_not_of_its_form_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        render_graph(tmp_path / "graph.html", GRAPH, **given)


def test_a_latent_is_read_out_of_cantors_number(tmp_path: Path) -> None:
    graph = copy.deepcopy(GRAPH)
    graph["nodes"] = [{**graph["nodes"][0], "layer": "3", "feature": feature_number(3, 16383)}]
    graph["links"] = []
    assert '"latent":16383' in render_graph(tmp_path / "graph.html", graph).read_text()
