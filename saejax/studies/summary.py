"""Phase 6: the results in the tables, as plain data for the page.

effect of a group = mean over pairs of (value - clean), with a bootstrap interval over pairs
resampled         = the same over all of a pair's other prompts; pairs are drawn, each with all of them
controls          = the effect of each random group: their mean, and how many are as large as the group's. A random
                    group that is drawn again counts once, and of fewer than 9 there is no verdict
share             = effect of patching / (corrupt - clean), both over the pairs that have the token: 1 turns the whole
                    behaviour over
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saejax.attribution import Graph
from saejax.attribution.influence import influence, scores
from saejax.interventions import interval
from saejax.reports.graph_page import spearman
from saejax.studies.table import Table

TableRows = Sequence[Mapping[str, str]]


def baseline_of(table: Table, rows: TableRows, behaviour: str) -> dict[str, Any]:
    """{split: {pairs, accuracy, clean, corrupt, p_right}}."""
    keys = {
        "accuracy": "correct",
        "clean": "clean_difference",
        "corrupt": "corrupt_difference",
        "p_right": "p_right_clean",
    }
    columns = {name: table.numbers(key, rows) for name, key in keys.items()}
    splits = {}
    for split in ("train", "test"):
        places = [i for i, row in enumerate(rows) if (row["behaviour"], row["split"]) == (behaviour, split)]
        splits[split] = {name: float(values[places].mean()) for name, values in columns.items()} | {
            "pairs": len(places)
        }
    return splits


# At most this share of the random groups may do as much as a group that stands. Of fewer than 9 different ones no
# number says so: where none of n does as much, the chance for one more is 1 / (n + 1).
AS_LARGE, FEWEST_CONTROLS = 0.1, 9

Effects = dict[tuple[str, str, int], tuple[np.ndarray, np.ndarray]]  # group, kind, number -> pairs, value - clean


def effects_of(table: Table, rows: TableRows) -> Effects:
    """The rows of effects.<behaviour>.csv, by change."""
    change = table.numbers("value", rows) - table.numbers("clean", rows)
    pair, number = (table.numbers(name, rows).astype(int) for name in ("pair", "number"))
    places: dict[tuple[str, str, int], list[int]] = {}
    for i, row in enumerate(rows):
        places.setdefault((row["group"], row["kind"], int(number[i])), []).append(i)
    return {key: (pair[at], change[at]) for key, at in places.items()}


def turns_of(table: Table, rows: TableRows, behaviour: str) -> np.ndarray:
    """float64 [R]: of each test pair the difference after the corrupt prompt less that after the clean one."""
    test_rows = [row for row in rows if (row["behaviour"], row["split"]) == (behaviour, "test")]
    corrupt, clean, pair = (
        table.numbers(name, test_rows) for name in ("corrupt_difference", "clean_difference", "pair")
    )
    turn_R = np.empty(len(test_rows))
    turn_R[pair.astype(int)] = corrupt - clean
    return turn_R


def group_of(
    name: str, layer: int, effects: Effects, turn_R: np.ndarray, last: np.ndarray, new: np.ndarray
) -> dict[str, Any]:
    """A group's effects.

    Args:
        turn_R: of `turns_of`.
        last: int [R], the place of each pair's last token; the first token of a prompt is never patched.
        new: bool [draws], of its controls that are no repetition (`interventions.first_draws`).
    """
    by_kind: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for (group, kind, _), measured in sorted(effects.items(), key=lambda item: item[0]):
        if group == name:
            by_kind.setdefault(kind, []).append(measured)
    effect = interval(by_kind["ablate"][0][1])
    drawn = [float(np.mean(values)) for _, values in by_kind["control"]]
    controls = [value for value, is_new in zip(drawn, new, strict=True) if is_new]
    as_large = float(np.mean(np.abs(controls) >= abs(effect[0])))
    enough = len(controls) >= FEWEST_CONTROLS
    patches = []
    for back, (pair, values) in enumerate(by_kind["patch"]):
        there = last[pair] - back >= 1
        figures = _mean_low_high(interval(values[there])) if there.any() else None
        turn = float(turn_R[pair[there]].mean()) if there.any() else 0.0
        patches.append(
            figures and figures | {"share": figures["mean"] / turn if turn else None, "pairs": int(there.sum())}
        )
    pairs, values = (np.concatenate(column) for column in zip(*by_kind["resample"], strict=True))
    return {
        "name": name,
        "layer": layer,
        "ablate": _mean_low_high(effect),
        "control": {
            "mean": float(np.mean(controls)),
            "least": min(controls),
            "most": max(controls),
            "as_large": as_large,
            "draws": len(drawn),
            "distinct": len(controls),
        },
        "patch": patches,
        "resample": _mean_low_high(interval(values, clusters=pairs)),
        "stands": bool(effect[1] * effect[2] > 0 and as_large <= AS_LARGE) if enough else None,
    }


def graph_of(graph: Graph, href: str) -> dict[str, Any]:
    """The figures of a graph."""
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


def prediction_of(table: Table, rows: TableRows) -> dict[str, Any]:
    """Spearman's rank correlation of what graphs predict of single features, and what was measured."""
    predicted, measured = (table.numbers(name, rows) for name in ("predicted", "measured"))
    return {
        "n": len(rows),
        "spearman": spearman(predicted, measured),
        "points": [
            [float(p), float(m), f"L{row['layer']} feature {row['latent']}, pair {row['pair']}"]
            for p, m, row in zip(predicted, measured, rows, strict=True)
        ],
    }


def _mean_low_high(of: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("mean", "low", "high"), of, strict=True))
