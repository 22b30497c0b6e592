"""Feature files for circuit-tracer's page: examples, logits and histogram of every latent. Out only.

    index.json.gz       {layer: {"filename": "layer_0.bin", "offsets": [F + 1]}}
    layer_0.bin         for each latent: int32 length, then so many bytes of gzip of its JSON

`serve(data_dir, features_dir=FOLDER)` shows them for a graph whose scan is a local path. (decoderesearch/circuit-tracer
4bb8c0e: frontend/feature_models.py, local_server.py, assets/feature_examples/; 0.5.0 of the package index, of another
owner, has no features_dir: there the files belong into features/ of the transcoders' hub repository.)
"""

import gzip
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.core.progress import Progress
from saejax.interop.passages import centred_passage, group_of, lists_of, logits_of, token_strings

_MOST_TOKENS = 1024


def write_circuit_tracer_features(folder: Path, layers: Mapping[int, tuple[Mapping[str, Any], int, int]]) -> int:
    """Write the files of a set of transcoders, or of a cross-layer transcoder, into a new folder.

    Args:
        layers: {layer: (content of features.sqlite, group of its latents, number of groups)}.

    Returns:
        Latents written; those that the report left out have no entry, and the page says so.
    """
    index, written = {}, 0
    with Progress("circuit-tracer", sum(len(group_of(*of)) for of in layers.values()), unit="latents") as progress:
        for layer, (content, group, groups) in sorted(layers.items()):
            strings, entries = token_strings(content["vocab"]), group_of(content, group, groups)
            width = content["d_sae"] // groups
            offsets = [0]
            with (folder / f"layer_{layer}.bin").open("wb") as handle:
                for entry in entries:
                    described = feature_file(entry, layer, entry["id"] % width, strings)
                    raw = gzip.compress(json.dumps(described, ensure_ascii=False, allow_nan=False).encode(), 6, mtime=0)
                    handle.write(struct.pack("<i", len(raw)) + raw)
                    offsets.append(offsets[-1] + 4 + len(raw))
                    progress.advance(1)
            offsets += offsets[-1:] * (width - len(entries))
            index[str(layer)] = {"filename": f"layer_{layer}.bin", "offsets": offsets}
            written += len(entries)
    (folder / "index.json.gz").write_bytes(gzip.compress(json.dumps(index).encode(), mtime=0))
    return written


def feature_file(entry: Mapping[str, Any], layer: int, latent: int, strings: Sequence[str]) -> dict[str, Any]:
    """The page's file of one latent.

    quantile_values are the 1st to 100th percentile of its activations, as the report's histogram has them: straight
    within a bin.
    """
    lists = []
    for part, passages in lists_of(entry):
        name = "Top activations" if part["fraction"] < 0 else f"{part['low']:g} to {part['high']:g}"
        centred = (centred_passage(example, strings, _MOST_TOKENS) for example in passages)
        examples = [
            {"tokens_acts_list": values, "train_token_ind": peak, "is_repeated_datapoint": False, "tokens": tokens}
            for tokens, values, peak in centred
        ]
        if examples or part["fraction"] < 0:
            lists.append({"quantile_name": name, "examples": examples})
    histogram = entry.get("histogram") or {"edges": [0.0, 1.0], "counts": [0]}
    logits = {key: [token for token, _ in logits_of(entry, key, strings)] for key in ("top_logits", "bottom_logits")}
    return {
        "transcoder_id": f"layer_{layer}",
        "index": latent,
        "examples_quantiles": lists,
        **logits,
        "act_min": histogram["edges"][0],
        "act_max": histogram["edges"][-1],
        "quantile_values": _percentiles(histogram),
        "histogram": histogram["counts"],
        "activation_frequency": entry["density"],
    }


def _percentiles(histogram: Mapping[str, Any]) -> list[float]:
    counts, edges = np.asarray(histogram["counts"], float), np.asarray(histogram["edges"], float)
    above = np.cumsum(counts)
    if not above[-1]:
        return []
    wanted = np.arange(1, 101) / 100 * above[-1]
    b = np.minimum(np.searchsorted(above, wanted), len(counts) - 1)  # the bin in which so many are reached
    values = edges[b + 1] - (above[b] - wanted) / np.maximum(counts[b], 1) * (edges[b + 1] - edges[b])
    return [float(f"{value:.5g}") for value in values]
