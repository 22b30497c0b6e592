"""Neuronpedia's files against the rules of its upload route, the columns of its tables and latents by hand."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.exports import DEAD, REPORT, WIDTH, Reported, reported

from saejax.core.errors import ConfigError
from saejax.interop.neuronpedia import Names, write_neuronpedia

NAMES = Names("tiny", "res-mine", (0,), ("blocks.0.hook_resid_post",), dataset="words", context=24)
CLT = Names("tiny", "clt-mine", (0, 1), ("blocks.0.mlp.hook_in", "blocks.1.mlp.hook_in"))


# What app/api/feature/upload-batch/route.tsx asks of a body (hijohnnylin/neuronpedia ebb8426f).


def check_upload(body: Any) -> None:
    assert body.keys() == {"modelId", "source", "features"}
    for name in ("modelId", "source"):
        assert isinstance(body[name], str) and body[name] == body[name].lower() != ""
    assert 1 <= len(body["features"]) <= 128
    assert len({feature["index"] for feature in body["features"]}) == len(body["features"])
    for feature in body["features"]:
        check_feature(feature)


def check_feature(feature: Any) -> None:
    known = {"index", "density", "topLogits", "bottomLogits", "explanations", "activations"}
    assert feature.keys() <= known
    assert type(feature["index"]) is int and 0 <= feature["index"] <= 10_000_000
    assert 0 <= feature["density"] <= 1
    for key in ("topLogits", "bottomLogits"):
        assert len(feature[key]) <= 20
        assert all(pair.keys() == {"token", "value"} and pair["token"] for pair in feature[key])
        assert all(is_number(pair["value"]) for pair in feature[key])
    for explanation in feature["explanations"]:
        assert explanation.keys() <= {"text", "methodName", "modelName"} and 1 <= len(explanation["text"]) <= 512
    assert len(feature["activations"]) >= 1
    for activation in feature["activations"]:
        tokens, values = activation["tokens"], activation["values"]
        assert 1 <= len(tokens) == len(values) <= 1024
        # yup's required() refuses an empty string; PostgreSQL refuses NUL and half a surrogate pair.
        assert all(isinstance(t, str) and t and "\0" not in t and t.encode() for t in tokens)
        assert all(map(is_number, values))
        for key in ("quantileMin", "quantileMax"):
            assert is_number(activation.get(key, 0)) and activation.get(key, 0) <= 99_999_999
        assert 0 <= activation.get("quantileFraction", 0) <= 1


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and bool(np.isfinite(value))


# Columns that SAEDashboard's exporter writes (neuronpedia_export.py, db4839a), and of them those that may not be null.
_NEURON = (
    "modelId layer index creatorId createdAt maxActApprox hasVector vector vectorLabel "
    "vectorDefaultSteerStrength hookName topkCosSimIndices topkCosSimValues neuron_alignment_indices "
    "neuron_alignment_values neuron_alignment_l1 correlated_neurons_indices correlated_neurons_pearson "
    "correlated_neurons_l1 correlated_features_indices correlated_features_pearson correlated_features_l1 "
    "neg_str neg_values pos_str pos_values frac_nonzero freq_hist_data_bar_heights "
    "freq_hist_data_bar_values logits_hist_data_bar_heights logits_hist_data_bar_values "
    "decoder_weights_dist sourceSetName "
)
NEURON = frozenset(_NEURON.split())
_ACTIVATION = (
    "id tokens index layer modelId maxValue maxValueTokenIndex minValue values creatorId dataSource "
    "dataIndex dfaValues dfaTargetIndex dfaMaxValue createdAt lossValues logitContributions binMin binMax "
    "binContains qualifyingTokenIndex "
)
ACTIVATION = frozenset(_ACTIVATION.split())
METADATA = {
    "release": ("name", "description", "creatorName", "creatorId", "visibility", "urls"),
    "model": ("id", "instruct", "creatorId", "layers", "neuronsPerLayer", "owner", "visibility"),
    "sourceset": ("modelId", "name", "creatorId", "creatorName", "description", "releaseName", "visibility"),
    "source": ("id", "modelId", "setName", "creatorId", "visibility"),
}


def lines(path: Path) -> list[dict[str, Any]]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in raw.decode().splitlines()]


def rows(folder: Path, names: Names, group: int, table: str) -> list[dict[str, Any]]:
    place = folder / "bulk" / names.model / names.sources[group] / table
    return [row for path in sorted(place.glob("batch-*.jsonl.gz")) for row in lines(path)]


def uploads(folder: Path, names: Names, group: int = 0) -> list[dict[str, Any]]:
    paths = sorted((folder / "upload" / names.sources[group]).glob("batch-*.json"))
    bodies = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for body in bodies:
        check_upload(body)
        assert (body["modelId"], body["source"]) == (names.model, names.sources[group])
    return [feature for body in bodies for feature in body["features"]]


@pytest.mark.parametrize(("topology", "names"), [("autoencoder", NAMES), ("clt", CLT)], ids=["sae", "clt"])
def test_what_is_written_is_what_the_latents_do(topology: str, names: Names, tmp_path: Path) -> None:
    r = reported(topology)
    written = write_neuronpedia(tmp_path, r.content, names)
    assert list(written) == list(names.sources)
    for group in range(len(names.layers)):
        features, neurons = uploads(tmp_path, names, group), rows(tmp_path, names, group, "features")
        f = r.f[:, :, group * WIDTH : (group + 1) * WIDTH]
        alive = [i for i in range(WIDTH) if (f[:, :, i] != 0).any()]
        assert [feature["index"] for feature in features] == alive and len(alive) <= WIDTH - DEAD
        assert written[names.sources[group]] == len(alive)
        for feature, neuron in zip(features, neurons, strict=True):
            check_numbers(r, group, feature, neuron)
        check_bulk(tmp_path, names, group, features)


def check_numbers(r: Reported, group: int, feature: dict[str, Any], neuron: dict[str, Any]) -> None:
    latent = group * WIDTH + feature["index"]
    v = r.f[:, :, latent]
    assert feature["density"] == pytest.approx((v != 0).sum() / r.n_tokens) == neuron["frac_nonzero"]
    assert neuron["maxActApprox"] == pytest.approx(v.max(), abs=2e-3)
    assert sum(neuron["freq_hist_data_bar_heights"]) == (v != 0).sum()
    assert len(neuron["freq_hist_data_bar_values"]) == len(neuron["freq_hist_data_bar_heights"])
    for activation in feature["activations"]:
        assert r.holds(latent, activation["tokens"], activation["values"])
    strongest = [a for a in feature["activations"] if "quantileMin" not in a]
    sampled = [a for a in feature["activations"] if "quantileMin" in a]
    assert 1 <= len(strongest) <= REPORT.examples
    edges = np.linspace(0, v.max(), REPORT.quantiles + 1)
    for a in sampled:
        part = int(np.argmin(np.abs(edges[:-1] - a["quantileMin"])))
        low, high = edges[part : part + 2]
        assert (a["quantileMin"], a["quantileMax"]) == pytest.approx((low, high), abs=1e-3)
        near = [((v > low + e) & (v <= high - e)).sum() / r.n_tokens for e in (1e-3, -1e-3)]
        assert near[0] - 1e-9 <= a["quantileFraction"] <= near[1] + 1e-9
        assert low - 2e-3 <= max(a["values"])


def check_bulk(folder: Path, names: Names, group: int, features: list[dict[str, Any]]) -> None:
    """The bulk rows say what the upload says, in the tables' own columns."""
    place = folder / "bulk" / names.model / names.sources[group]
    for name, required in METADATA.items():
        (row,) = lines(place / f"{name}.jsonl")
        assert all(row[key] is not None for key in required) and row["visibility"] == "PUBLIC"
    (source,) = lines(place / "source.jsonl")
    assert (source["id"], source["modelId"], source["setName"]) == (names.sources[group], names.model, names.set)
    of = {"modelId": names.model, "layer": names.sources[group]}
    neurons, activations = (rows(folder, names, group, table) for table in ("features", "activations"))
    assert not (place / "explanations").exists()
    for neuron, feature in zip(neurons, features, strict=True):
        assert neuron.keys() == NEURON and neuron.items() >= of.items()
        assert neuron["index"] == str(feature["index"]) and neuron["hookName"] == names.hook_points[group]
        top = [{"token": t, "value": v} for t, v in zip(neuron["pos_str"], neuron["pos_values"], strict=True)]
        assert top == feature["topLogits"] and len(neuron["neg_str"]) == len(neuron["neg_values"])
    assert len({row["id"] for row in activations}) == len(activations) == sum(len(f["activations"]) for f in features)
    uploaded = [(str(f["index"]), a) for f in features for a in f["activations"]]
    for row, (index, a) in zip(activations, uploaded, strict=True):
        assert row.keys() == ACTIVATION and row.items() >= of.items() and len(row["id"]) == 25
        assert (row["index"], row["tokens"], row["values"]) == (index, a["tokens"], a["values"])
        assert row["maxValue"] == max(a["values"]) == row["values"][row["maxValueTokenIndex"]]
        assert row["minValue"] == min(a["values"])
        assert row["values"][row["qualifyingTokenIndex"]] != 0
        if "quantileMin" in a:
            bins = (a["quantileMin"], a["quantileMax"], a["quantileFraction"])
            assert (row["binMin"], row["binMax"], row["binContains"]) == bins
        else:
            assert (row["binMin"], row["binContains"]) == (-1, -1) and row["binMax"] >= row["maxValue"] - 1e-3


def hostile(passages: int, length: int) -> dict[str, Any]:
    """300 latents whose tokens, passages and lists are more than the tables take."""
    activations = [0.0] * length
    activations[-2] = 3.5
    example = {"document": "d", "position": 9, "tokens": [i % 4 for i in range(length)], "peak": length - 2}
    entry = {
        "density": 1.0,
        "max": 3.5,
        "mean": 1.0,
        "histogram": {"edges": [0.0, 3.5], "counts": [7]},
        "top_logits": [[1, 1.0], ["\0", 0.5]] * 15,
        "bottom_logits": [],
        "examples": [example | {"activations": activations}] * passages,
    }
    return {
        "d_sae": 300,
        "n_tokens": 100,
        "vocab": ["", "a\0b", "\ud800", "end"],
        "features": [{"id": i, **entry} for i in range(300)],
    }


def test_limits_are_kept_by_batches_and_by_cutting(tmp_path: Path) -> None:
    content = hostile(passages=1, length=1500)
    long = "x" * 600
    content["features"][7]["explanations"] = [
        {"text": long, "by": "gpt", "scores": {"detection": 0.75}},
        {"text": " \0 ", "by": "gpt", "scores": {}},
    ]
    write_neuronpedia(tmp_path, content, NAMES)
    features = uploads(tmp_path, NAMES)
    assert len(list((tmp_path / "upload" / "0-res-mine").iterdir())) == 3 and len(features) == 300
    (activation,) = features[0]["activations"]
    assert len(activation["tokens"]) == 1024 and activation["values"][-2] == 3.5
    assert set(activation["tokens"]) == {"\ufffd", "a b", "?", "end"} and len(features[0]["topLogits"]) == 20
    assert features[7]["explanations"] == [{"text": long[:512]}]
    (row,) = rows(tmp_path, NAMES, 0, "explanations")
    assert (row["index"], row["description"], row["layer"]) == ("7", long[:512], "0-res-mine")
    assert row["notes"] == "gpt; detection 0.750" and row["typeName"] is row["explanationModelName"] is None


def test_reports_without_quantiles_and_empty_ones(tmp_path: Path) -> None:
    content = hostile(passages=0, length=3)
    assert write_neuronpedia(tmp_path / "none", content, NAMES) == {"0-res-mine": 0}
    assert uploads(tmp_path / "none", NAMES) == [] and not rows(tmp_path / "none", NAMES, 0, "features")
    assert write_neuronpedia(tmp_path / "old", hostile(passages=2, length=3), NAMES) == {"0-res-mine": 300}
    assert all(
        len(f["activations"]) == 2 and "quantileMin" not in f["activations"][0]
        for f in uploads(tmp_path / "old", NAMES)
    )


def test_the_same_rows_have_the_same_ids(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_neuronpedia(tmp_path / name, reported().content, NAMES)
    a, b = ([row["id"] for row in rows(tmp_path / name, NAMES, 0, "activations")] for name in ("a", "b"))
    assert a == b


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"model": "Org/Model"}, "--model="),
        ({"set": "../x"}, "--set="),
        ({"release": "A release"}, "--release="),
        ({"layers": (2, 2), "hook_points": ("a", "b")}, "one a layer"),
    ],
)
def test_names_that_neuronpedia_does_not_take(what: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Names(**({"model": "m", "set": "s", "layers": (0,), "hook_points": ("a",)} | what))
