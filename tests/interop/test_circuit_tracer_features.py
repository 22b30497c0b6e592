"""Feature files read as circuit-tracer's page reads them. benchmarks/peers/check_features.py asks its own models."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.exports import WIDTH, reported

from saejax.interop.circuit_tracer_features import write_circuit_tracer_features

# frontend/feature_models.py of circuit-tracer 0.5.0 and of 4bb8c0e.
MODEL = {
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
EXAMPLE = {"tokens_acts_list": list, "train_token_ind": int, "is_repeated_datapoint": bool, "tokens": list}


def read(folder: Path, layer: int, latent: int) -> Any:
    """What the page gets: a range whose last byte is included, a length, so many bytes of gzip."""
    index = json.loads(gzip.decompress((folder / "index.json.gz").read_bytes()))[str(layer)]
    start, end = index["offsets"][latent : latent + 2]
    sent = (folder / index["filename"]).read_bytes()[start : end + 1]
    return json.loads(gzip.decompress(sent[4 : 4 + int.from_bytes(sent[:4], "little")]))


@pytest.mark.parametrize("topology", ["transcoder", "clt"])
def test_each_latent_is_found_with_its_passages(topology: str, tmp_path: Path) -> None:
    r = reported(topology)
    groups = 2 if topology == "clt" else 1
    layers = {layer: (r.content, group, groups) for group, layer in enumerate((3, 5)[:groups])}
    assert write_circuit_tracer_features(tmp_path, layers) == groups * WIDTH
    for layer, (_, group, _) in layers.items():
        for latent in range(WIDTH):
            check(read(tmp_path, layer, latent), r, layer, latent, group * WIDTH + latent)
    index = json.loads(gzip.decompress((tmp_path / "index.json.gz").read_bytes()))
    assert list(index) == [str(layer) for layer in layers]
    assert all(len(entry["offsets"]) == WIDTH + 1 for entry in index.values())


def check(found: dict[str, Any], r: Any, layer: int, latent: int, number: int) -> None:
    assert found.keys() == MODEL.keys()
    assert all(isinstance(found[key], (int, float) if kind is float else kind) for key, kind in MODEL.items())
    assert (found["index"], found["transcoder_id"]) == (latent, f"layer_{layer}")
    v = r.f[:, :, number]
    active = v[v != 0]
    assert found["activation_frequency"] == pytest.approx(len(active) / r.n_tokens)
    assert sum(found["histogram"]) == len(active)
    names = [part["quantile_name"] for part in found["examples_quantiles"]]
    assert names[0] == "Top activations" and len(set(names)) == len(names)
    assert (len(names) > 1) == (len(active) > 3)
    for part in found["examples_quantiles"]:
        for example in part["examples"]:
            assert example.keys() == EXAMPLE.keys()
            assert all(isinstance(example[key], kind) for key, kind in EXAMPLE.items())
            assert r.holds(number, example["tokens"], example["tokens_acts_list"])
            assert example["tokens_acts_list"][example["train_token_ind"]] != 0
    assert all(isinstance(token, str) for token in found["top_logits"] + found["bottom_logits"])
    if not len(active):
        assert found["quantile_values"] == []
        return
    width = (found["act_max"] - found["act_min"]) / len(found["histogram"])
    assert found["act_max"] == pytest.approx(max(active.max(), 0), abs=1e-3)
    exact = np.quantile(active, np.arange(1, 101) / 100, method="inverted_cdf")
    np.testing.assert_allclose(found["quantile_values"], exact, atol=width + 2e-3)  # read off a histogram


def test_latents_that_the_report_left_out_have_no_bytes(tmp_path: Path) -> None:
    content = reported("transcoder").content
    content["features"] = content["features"][:7]
    assert write_circuit_tracer_features(tmp_path, {0: (content, 0, 1)}) == 7
    offsets = json.loads(gzip.decompress((tmp_path / "index.json.gz").read_bytes()))["0"]["offsets"]
    assert len(offsets) == WIDTH + 1 and set(offsets[7:]) == {(tmp_path / "layer_0.bin").stat().st_size}
    assert read(tmp_path, 0, 6)["index"] == 6
