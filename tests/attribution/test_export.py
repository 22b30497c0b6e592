"""A graph as circuit-tracer's JSON: its fields by hand, ids that no hash decides, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pytest

from saejax.attribution.export import INDEX, feature_number, graph_json, node_ids, scan_of, write_features, write_graph
from saejax.attribution.influence import pruned
from saejax.core.errors import ConfigError, DataError
from saejax.interop.circuit_tracer_features import feature_file
from tests.tiny.graphs import LOGITS, NAMES, VOCAB, made_up_feature, made_up_graph

# circuit-tracer 0.5: frontend/graph_models.py and frontend/feature_models.py.
OPTIONAL_NUMBER = (float, NoneType)
METADATA = {
    "slug": str,
    "scan": str,
    "transcoder_list": list,
    "prompt_tokens": list,
    "prompt": str,
    "node_threshold": OPTIONAL_NUMBER,
    "schema_version": int,
}
Q_PARAMS = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE = {
    "node_id": str,
    "feature": int,
    "layer": str,
    "ctx_idx": int,
    "feature_type": str,
    "token_prob": float,
    "is_target_logit": bool,
    "run_idx": int,
    "reverse_ctx_idx": int,
    "jsNodeId": str,
    "clerp": str,
    "influence": OPTIONAL_NUMBER,
    "activation": OPTIONAL_NUMBER,
}
LINK = {"source": str, "target": str, "weight": float}
EXAMPLE = {"tokens_acts_list": list, "train_token_ind": int, "is_repeated_datapoint": bool, "tokens": list}
FEATURE = {
    "transcoder_id": str,
    "index": int,
    "examples_quantiles": list,
    "top_logits": list,
    "bottom_logits": list,
    "act_min": float,
    "act_max": float,
    "quantile_values": list,
    "histogram": list,
    "activation_frequency": float,
}


def assert_fields(value: dict[str, Any], fields: dict[str, Any]) -> None:
    assert set(value) == set(fields)
    for name, kind in fields.items():
        assert isinstance(value[name], kind), name


def exported(**changes: Any) -> dict[str, Any]:
    graph = made_up_graph()
    given = {"slug": "dallas", "logit_strings": LOGITS, "node_threshold": 0.8, "labels": {(2, 8): "Texas"}}
    return graph_json(graph, pruned(graph, 0.8, 0.98), **given | changes)


def test_the_graph_has_circuit_tracers_fields(tmp_path: Path) -> None:
    content = json.loads(write_graph(tmp_path, exported()).read_text())
    assert set(content) == {"metadata", "qParams", "nodes", "links"}
    assert_fields(content["metadata"], METADATA)
    assert_fields(content["qParams"], Q_PARAMS)
    for node in content["nodes"]:
        assert_fields(node, NODE)
    for link in content["links"]:
        assert_fields(link, LINK)
    assert json.loads((tmp_path / INDEX).read_text()) == {"graphs": [content["metadata"]]}


def test_nodes_and_links_are_the_kept_ones() -> None:
    graph = made_up_graph()
    kept = pruned(graph, 0.8, 0.98)
    content = exported()
    ids = node_ids(graph)
    assert 0 < kept.nodes.sum() < graph.n_nodes
    assert [node["node_id"] for node in content["nodes"]] == [ids[i] for i in np.flatnonzero(kept.nodes)]
    weight = {(link["source"], link["target"]): link["weight"] for link in content["links"]}
    assert weight == {
        (ids[s], ids[graph.targets[r]]): pytest.approx(float(graph.weights[r, s]), rel=1e-6)
        for r, s in np.argwhere(kept.edges)
    }
    shares = {node["node_id"]: node["influence"] for node in content["nodes"]}
    for i in np.flatnonzero(kept.nodes):
        at_least = kept.influence[kept.influence >= kept.influence[i]].sum() / kept.influence.sum()
        assert shares[ids[i]] == (None if i >= graph.parts["logits"].start else pytest.approx(at_least))
    named = {node["clerp"] for node in content["nodes"] if node["feature_type"] == "cross layer transcoder"}
    assert named == {"", "Texas"}


def test_a_node_of_each_kind_in_full() -> None:
    content = exported()
    by_id = {node["node_id"]: node for node in content["nodes"]}
    common = {"token_prob": 0.0, "is_target_logit": False, "run_idx": 0, "reverse_ctx_idx": 0, "clerp": ""}
    texas = by_id["2_8_10"]
    assert texas | {"influence": 0, "activation": 0} == common | {
        "node_id": "2_8_10",
        "feature": 63,  # (2 + 8)(2 + 8 + 1) / 2 + 8
        "layer": "2",
        "ctx_idx": 10,
        "feature_type": "cross layer transcoder",
        "jsNodeId": "2_8-0",
        "clerp": "Texas",
        "influence": 0,
        "activation": 0,
    }
    assert by_id["5_310_10"] == common | {
        "node_id": "5_310_10",
        "feature": 310,
        "layer": "5",
        "ctx_idx": 10,
        "feature_type": "logit",
        "token_prob": 0.41,
        "is_target_logit": True,
        "jsNodeId": "L_310-10",
        "clerp": 'Output " Austin" (p=0.410)',
        "influence": None,
        "activation": None,
    }
    token = {"node_id": "E_109_9", "layer": "E", "feature": 9, "jsNodeId": "E_109-9", "feature_type": "embedding"}
    assert {name: by_id["E_109_9"][name] for name in token} == token
    error = next(node for node in content["nodes"] if node["feature_type"] == "mlp reconstruction error")
    layer, position = error["layer"], error["ctx_idx"]
    assert (error["node_id"], error["feature"]) == (f"0_{layer}_{position}", -1)
    assert error["jsNodeId"] == f"{layer}_{position}-0"


def test_no_two_nodes_share_an_id() -> None:
    """Feature 1 of layer 0 at token 9 has the id that circuit-tracer gives the error of layer 1 at token 9."""
    graph = made_up_graph()
    features = graph.features.copy()
    features[0] = (0, 9, 1)
    ids = node_ids(dataclasses.replace(graph, features=features))
    assert len(set(ids)) == graph.n_nodes
    assert ids[0] == "0_1_9" and ids[graph.n_features + len(graph.tokens) + 9] == "0_1_9_error"


def test_the_scan_is_a_digest_of_what_the_graph_is_of() -> None:
    # Written down, so that a name which differs between processes fails.
    assert scan_of(NAMES) == "./data/features/843528bb6fc6"
    assert scan_of(NAMES | {"prompt": "another"}) == scan_of(NAMES)
    assert scan_of(NAMES | {"dictionaries": "others"}) != scan_of(NAMES)


def test_a_slug_replaces_its_graph_in_the_index(tmp_path: Path) -> None:
    for slug in ("one", "two", "one"):
        write_graph(tmp_path, exported(slug=slug))
    assert [entry["slug"] for entry in json.loads((tmp_path / INDEX).read_text())["graphs"]] == ["two", "one"]


def test_feature_files_have_circuit_tracers_fields(tmp_path: Path) -> None:
    row = made_up_feature(2, 8)
    content = feature_file(row, 2, 8, VOCAB)
    folder = write_features(tmp_path, NAMES, {(2, 8): content})
    assert folder == tmp_path / "features" / "843528bb6fc6"
    read = json.loads((folder / f"{feature_number(2, 8)}.json").read_text())
    assert_fields(read, FEATURE)
    assert [len(part["examples"]) for part in read["examples_quantiles"]] == [5, 1]
    for part in read["examples_quantiles"]:
        assert set(part) == {"quantile_name", "examples"}
        for example in part["examples"]:
            assert_fields(example, EXAMPLE)
            peak = example["tokens_acts_list"][example["train_token_ind"]]
            assert peak == max(example["tokens_acts_list"]) and len(example["tokens"]) == 18
    assert read["top_logits"] == [token for token, _ in row["top_logits"]]
    assert (read["act_min"], read["act_max"], read["activation_frequency"]) == (0, row["max"], row["density"])
    assert read["histogram"] == row["histogram"]["counts"]


@pytest.mark.parametrize("slug", ["", "a/b", "..", ".hidden", "a b", "graph-metadata", "x" * 101])
def test_a_slug_that_cannot_name_a_file_is_refused(slug: str) -> None:
    with pytest.raises(ConfigError, match="slug"):
        exported(slug=slug)


def test_what_is_not_of_the_graph_is_refused(tmp_path: Path) -> None:
    graph = made_up_graph()
    with pytest.raises(DataError, match=f"the graph has {graph.n_nodes}"):
        graph_json(graph, pruned(made_up_graph(features=30), 0.8, 0.98), slug="a", logit_strings=LOGITS)
    with pytest.raises(DataError, match="logit_strings"):
        graph_json(graph, pruned(graph, 0.8, 0.98), slug="a", logit_strings=LOGITS[1:])
    (tmp_path / INDEX).write_text('{"graphs": [7]}')
    with pytest.raises(DataError, match="no list of graphs"):
        write_graph(tmp_path, exported())
