"""Phase 6: what the tables say, as plain data for the page.

effect of a group = mean over pairs of (value - clean), with a bootstrap interval over pairs
controls          = the same of each random group: their mean, and how many are as large as the group's
share             = effect of patching / (corrupt - clean): 1 turns the whole behaviour over
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saejax.attribution import Graph
from saejax.attribution.influence import influence, scores
from saejax.interventions import interval
from saejax.study.effects import Group
from saejax.study.graphs import Feature

Rows = Sequence[Mapping[str, str]]


def baseline_of(rows: Rows, behaviour: str) -> dict[str, Any]:
    """{split: {pairs, accuracy, clean, corrupt, p_right, lines}}."""
    found = {}
    for split in ("train", "test"):
        own = [(i, row) for i, row in enumerate(rows) if (row["behaviour"], row["split"]) == (behaviour, split)]
        columns = {
            name: float(np.mean([float(row[key]) for _, row in own]))
            for name, key in (
                ("accuracy", "correct"),
                ("clean", "clean_difference"),
                ("corrupt", "corrupt_difference"),
                ("p_right", "p_right_clean"),
            )
        }
        found[split] = columns | {"pairs": len(own), "lines": _lines([i for i, _ in own])}
    return found


def group_of(group: Group, first: int, rows: Rows, corrupt: float) -> dict[str, Any]:
    """A group's effects.

    Args:
        first: the number of its layer's latent 0.
        corrupt: the mean difference after the corrupt prompts of the same pairs.
    """
    values: dict[tuple[str, int], list[float]] = {}
    places: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row["group"] == group.name:
            key = row["kind"], int(row["number"])
            values.setdefault(key, []).append(float(row["value"]) - float(row["clean"]))
            places.setdefault(row["kind"], []).append(i)
    clean = float(np.mean([float(row["clean"]) for row in rows]))
    effect = interval(values["ablate", 0])
    controls = [float(np.mean(v)) for (kind, _), v in values.items() if kind == "control"]
    patches = [interval(values["patch", n]) for n in sorted(n for kind, n in values if kind == "patch")]
    resampled = [x for (kind, _), v in values.items() if kind == "resample" for x in v]
    as_large = float(np.mean(np.abs(controls) >= abs(effect[0])))
    return {
        "name": group.name,
        "layer": group.layer,
        "latents": [latent - first for latent in group.latents],
        "ablate": _said(effect),
        "control": {
            "mean": float(np.mean(controls)),
            "least": min(controls),
            "most": max(controls),
            "as_large": as_large,
            "draws": len(controls),
        },
        "patch": [_said(one) | {"share": one[0] / (corrupt - clean)} for one in patches],
        "resample": _said(interval(resampled)),
        "stands": bool(effect[1] * effect[2] > 0 and as_large <= 0.1),
        "lines": {kind: _lines(at) for kind, at in places.items()},
    }


def graph_of(graph: Graph, href: str) -> dict[str, Any]:
    """What the page says of a graph."""
    replacement, completeness = scores(graph)
    score = influence(graph)
    errors, features = (float(score[graph.parts[kind]].sum()) for kind in ("errors", "features"))
    return {
        "href": href,
        "prompt": graph.names.get("prompt", ""),
        "features": graph.n_features,
        "replacement": replacement,
        "completeness": completeness,
        "errors_share": errors / max(errors + features, 1e-30),
    }


def prediction_of(rows: Rows) -> dict[str, Any]:
    """Spearman's rank correlation of what graphs predict of single features, and what was measured."""
    said, was = (np.asarray([float(row[name]) for row in rows]) for name in ("predicted", "measured"))
    return {
        "n": len(rows),
        "spearman": _correlation(_ranks(said), _ranks(was)),
        "points": [
            [float(p), float(m), f"L{row['layer']} feature {row['latent']}, pair {row['pair']}"]
            for p, m, row in zip(said, was, rows, strict=True)
        ],
        "lines": _lines(range(len(rows))),
    }


def feature_of(feature: Feature, fires_on: str) -> dict[str, Any]:
    return {
        "layer": feature.layer,
        "latent": feature.latent,
        "share": feature.share,
        "prompts": feature.prompts,
        "activation": feature.activation,
        "fires_on": fires_on,
    }


def _said(of: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), of, strict=True))


def _lines(places: Sequence[int]) -> list[int]:
    """First and last line of the file, whose first is the heading."""
    return [min(places) + 2, max(places) + 2]


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks, equal for equal values."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 2 or not a.std() or not b.std():
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
