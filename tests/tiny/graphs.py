"""A made-up attribution graph of one prompt, as large as asked, with what its features fire on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from saejax.attribution.export import graph_json
from saejax.attribution.graph import Graph
from saejax.attribution.influence import pruned

PROMPT = ("<bos>", "Fact", ":", " the", " capital", " of", " the", " state", " containing", " Dallas", " is")
LOGITS = (" Austin", " Texas", " the", " Houston", " a")
NAMES = {"model": "tiny-llama", "dictionaries": "tiny-clt 4x512", "prompt": "".join(PROMPT)}
# Layer, latent: what it stands for, and the tokens that it fires on.
KNOWN = {
    (0, 17): ("“capital” as a word", (4,)),
    (0, 101): ("Dallas", (9,)),
    (1, 33): ("places in Texas", (9,)),
    (1, 260): ("capital cities", (4, 5)),
    (2, 8): ("Texas", (9, 10)),
    (2, 404): ("say a capital", (5, 10)),
    (3, 55): ("say Austin", (10,)),
    (3, 300): ("say a place name", (10,)),
}


def made_up_graph(features: int = 60, layers: int = 4, strings: tuple[str, ...] = PROMPT, seed: int = 0) -> Graph:
    """Weights that fall off with distance; the known features act most. No node acts on its own layer or an earlier
    token's."""
    rng = np.random.default_rng(seed)
    length = len(strings)
    rows = [(layer, at, latent) for (layer, latent), (_, places) in KNOWN.items() for at in places if at < length]
    seen = set(rows)
    while len(rows) < features:
        at = int(length - 1 - rng.exponential(length / 4) % (length - 1)) if length > 1 else 0
        row = (int(rng.integers(layers)), at, int(rng.integers(512)))
        if row not in seen:
            seen.add(row)
            rows.append(row)
    table = np.array(sorted(rows[:features]), np.int32)
    n_logits = len(LOGITS)
    grid = np.mgrid[:layers, :length].reshape(2, -1)
    layer = np.concatenate([table[:, 0], grid[0], np.full(length, -1), np.full(n_logits, layers)])
    place = np.concatenate([table[:, 1], grid[1], np.arange(length), np.full(n_logits, length - 1)])
    # A feature reads before its layer's dictionary writes, so an error acts on later layers only, as a feature does.
    acts = (layer[:, None] > layer[None, :]) & (place[:, None] >= place[None, :])
    sources = np.ones(len(layer))
    sources[features : features + layers * length] = 0.35
    for i, (one, _, latent) in enumerate(table.tolist()):
        sources[i] = 4.0 if (one, latent) in KNOWN else rng.lognormal(-0.5, 0.7)
    near = np.exp(-0.25 * (place[:, None] - place[None, :]))
    sparse = rng.random(acts.shape) < 0.5
    weights = np.where(acts & sparse, rng.normal(0.15, 0.3, acts.shape) * near * sources[None, :], 0.0)
    weights = weights[np.r_[:features, len(layer) - n_logits : len(layer)]]
    probabilities = np.array([0.41, 0.12, 0.07, 0.05, 0.03], np.float32)
    return Graph(
        tokens=np.arange(100, 100 + length, dtype=np.int32),
        strings=strings,
        hook_points=tuple(f"blocks.{i}.mlp_out" for i in range(layers)),
        features=table,
        activations=rng.lognormal(0.5, 0.6, features).astype(np.float32),
        logits=np.array([310, 311, 312, 313, 314], np.int32),
        probabilities=probabilities,
        weights=weights.astype(np.float32),
        names=NAMES,
    )


def made_up_json(
    strings: tuple[str, ...] = PROMPT, labels: Mapping[tuple[int, int], str] | None = None
) -> dict[str, Any]:
    """circuit-tracer's JSON of a made-up graph, with all nodes that have an edge."""
    graph = made_up_graph(strings=strings)
    return graph_json(graph, pruned(graph, 1.0, 1.0), slug="dallas", logit_strings=LOGITS, labels=labels)


VOCAB = [*PROMPT, " Texas", " Austin", " city", ",", " in", " near", " river", "\n"]


def made_up_feature(layer: int, latent: int) -> dict[str, Any]:
    """A row of a feature table whose strings are `VOCAB`."""
    rng = random.Random(f"{layer} {latent}")
    most = round(2 + 6 * rng.random(), 2)

    def example(size: float) -> dict[str, Any]:
        tokens = [rng.randrange(1, len(VOCAB)) for _ in range(18)]
        peak = rng.randrange(6, 12)
        values = [round(size * rng.random() * 0.4, 2) if rng.random() < 0.15 else 0.0 for _ in tokens]
        values[peak] = round(size, 2)
        where = {"document": "made-up.txt", "position": rng.randrange(200)}
        return where | {"tokens": tokens, "activations": values, "peak": peak}

    counts = [int(900 * 0.75**i) for i in range(16)]
    said = KNOWN.get((layer, latent))
    by = {"text": said[0], "by": "a reader", "scores": {"detection": 0.91}} if said else None
    return {
        "id": latent,
        "density": round(0.002 + 0.02 * rng.random(), 5),
        "max": most,
        "mean": most / 3,
        "histogram": {"edges": [most * i / 16 for i in range(17)], "counts": counts},
        "top_logits": [[VOCAB[rng.randrange(11, 18)], round(1.5 - 0.2 * i, 2)] for i in range(5)],
        "bottom_logits": [[VOCAB[rng.randrange(1, 11)], round(-1.1 + 0.15 * i, 2)] for i in range(5)],
        "examples": [example(most * (1 - 0.05 * i)) for i in range(5)],
        "quantiles": [{"low": 0.1, "high": most / 2, "fraction": 0.01, "examples": [example(most / 3)]}],
        **({"explanations": [by]} if by else {}),
    }
