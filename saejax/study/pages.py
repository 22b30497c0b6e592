"""Phase 6: what the tables say, as pages: study.html, its rows, and each graph."""

import dataclasses
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.app.graph import Tables, effect_of, fires_on, tables_of, write_pages
from saejax.attribution import Graph
from saejax.attribution.export import node_ids
from saejax.attribution.layers import layers_of
from saejax.core.files import finite, write_json, writing
from saejax.lm import LanguageModel
from saejax.report.study_page import render_study
from saejax.report.study_rows import Part, render_rows
from saejax.runs import Run
from saejax.study import baseline, effects, graphs, singles, summary
from saejax.study.baseline import Prompts, Refused
from saejax.study.behaviours import BEHAVIOURS
from saejax.study.config import Study
from saejax.study.effects import Group
from saejax.study.graphs import Feature
from saejax.study.summary import TableRows
from saejax.study.table import Table
from saejax.trained import TrainedCoder

# Features of a behaviour that the page shows.
_FEATURES = 15


@dataclasses.dataclass(frozen=True)
class Examined:
    """A behaviour with what phase 4 found of it, and from phase 5 on which controls of each group are no repetition."""

    train: Prompts
    test: Prompts
    graphs: Sequence[Graph]
    features: Sequence[Feature]
    groups: Sequence[Group]
    new_controls: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Made:
    """The material of the pages of all behaviours.

    Attributes:
        firsts: layer of the graphs -> number of its latent 0 in its dictionary.
        reports: layer -> address of its dictionary's report from the study's folder; empty where there is none.
    """

    s: Study
    lm: LanguageModel
    tables: Tables
    firsts: Mapping[int, int]
    reports: Mapping[int, str]


def write_page(
    s: Study,
    lm: LanguageModel,
    saes: Sequence[TrainedCoder],
    of_layer: Mapping[int, tuple[str, int]],
    examined: Mapping[str, Examined],
    refused: Sequence[Refused],
) -> dict[str, Any]:
    """Write study.html, summary.json, the pages of rows and of graphs; returns the content of summary.json.

    `saes` are in the order of their layers; of_layer: layer -> (name of its dictionary, number of its latent 0).
    """
    reports = {i: _report(saes[layer.dictionary], s.folder) for i, layer in enumerate(layers_of(lm, saes))}
    tables, firsts = tables_of(lm, saes), {layer: first for layer, (_, first) in of_layer.items()}
    made, c = _Made(s, lm, tables, firsts, reports), s.study
    table = Table(s.folder / "baseline.csv", baseline.PAIR_COLUMNS)
    measured = table.read()
    baselines = {name: summary.baseline_of(table, measured, name) for name in s.behaviours()}
    _write_rows(s, "baseline", baseline.PAIR_COLUMNS, measured, ("behaviour", "split"))
    content = {
        "name": s.experiment.name,
        "model": str(lm.identity["model"]),
        "dictionaries": [_dictionary_title(sae) for sae in saes],
        "graphs": min(c.graphs, c.train_pairs),
        "group_size": c.group_size,
        "least_accuracy": c.least_accuracy,
        "behaviours": [
            _behaviour(made, name, one, baselines[name], summary.turns_of(table, measured, name))
            for name, one in examined.items()
        ],
        "refused": [
            {"name": one.name, "about": _about(s, one.name), "baseline": baselines[one.name]} for one in refused
        ],
    }
    write_json(s.folder / "summary.json", finite(content))
    render_study(s.folder / "study.html", finite(content))
    return content


def headlines(content: Mapping[str, Any]) -> list[str]:
    """The result of each behaviour, a line each."""
    lines = []
    for b in content["behaviours"]:
        stands = [group for group in b["groups"] if group["stands"]]
        judged = [group for group in b["groups"] if group["stands"] is not None]
        line = f"{b['name']}: {len(stands)} of {len(judged)} groups do more than their controls"
        if few := len(b["groups"]) - len(judged):
            line += f" ({few} more have fewer than {summary.FEWEST_CONTROLS} different controls: no verdict)"
        if stands:
            most = max(stands, key=lambda group: abs(group["ablate"]["mean"]))
            effect = most["ablate"]
            line += (
                f"; without {most['name']} the logit difference of {b['baseline']['test']['clean']:.2f} changes by "
                f"{effect['mean']:.2f} ({effect['low']:.2f} to {effect['high']:.2f}), without random features by "
                f"{most['control']['mean']:.2f}"
            )
        lines.append(f"{line}; graphs' predictions: Spearman {b['prediction']['spearman']:.2f}")
    return lines + [
        f"{b['name']}: refused, right in {b['baseline']['train']['accuracy']:.0%} of the training pairs"
        for b in content["refused"]
    ]


def _behaviour(made: _Made, name: str, one: Examined, splits: Mapping[str, Any], turn_R: np.ndarray) -> dict[str, Any]:
    folder = made.s.folder
    tables = {
        kind: Table(folder / f"{kind}.{name}.csv", columns)
        for kind, columns in (
            ("features", graphs.FEATURE_COLUMNS),
            ("effects", effects.EFFECT_COLUMNS),
            ("singles", singles.SINGLE_COLUMNS),
        )
    }
    rows = {kind: table.read() for kind, table in tables.items()}
    _write_rows(made.s, f"features.{name}", graphs.FEATURE_COLUMNS, rows["features"], ())
    _write_rows(made.s, f"effects.{name}", effects.EFFECT_COLUMNS, rows["effects"], ("group", "kind"))
    _write_rows(made.s, f"singles.{name}", singles.SINGLE_COLUMNS, rows["singles"], ())
    pages = _graph_pages(made, one.graphs, name, rows["singles"])
    results = summary.effects_of(tables["effects"], rows["effects"])
    return {
        "name": name,
        "about": _about(made.s, name),
        "example": dataclasses.asdict(one.train.pairs[0]),
        "baseline": splits,
        "graphs": [summary.graph_of(graph, f"graphs/{page}") for graph, page in zip(one.graphs, pages, strict=True)],
        "features": [
            _titled(made, f.layer, f.latent) | {"share": f.share, "prompts": f.prompts, "activation": f.activation}
            for f in one.features[:_FEATURES]
        ],
        "n_features": len(one.features),
        "groups": [
            summary.group_of(group.name, group.layer, results, turn_R, one.test.last, one.new_controls[group.name])
            | {"features": [_titled(made, group.layer, latent - made.firsts[group.layer]) for latent in group.latents]}
            for group in one.groups
        ],
        "prediction": summary.prediction_of(tables["singles"], rows["singles"]),
    }


def _titled(made: _Made, layer: int, latent: int) -> dict[str, Any]:
    """The title of a feature: tokens that it fires on, its explanation, and its address in the report."""
    row: Mapping[str, Any] = next(
        (row for row in made.tables.get(layer, {}).get("features", ()) if row["id"] == latent), {}
    )
    explanations = row.get("explanations") or [{"text": ""}]
    address = made.reports[layer] if row else ""
    return {
        "layer": layer,
        "latent": latent,
        "fires_on": fires_on(row, made.tables[layer]["vocab"]) if row else [],
        "explanation": explanations[0]["text"],
        "href": f"{address}#feature={made.firsts[layer] + latent}" if address else "",
    }


def _graph_pages(made: _Made, graphs: Sequence[Graph], behaviour: str, rows: TableRows) -> list[str]:
    """Writes JSON and a page for each graph, with single features' effects; returns the pages' file names."""
    c, folder = made.s.study, made.s.folder / "graphs"
    shares, of = (c.node_share, c.edge_share), "Change of the logit of the right answer less that of the wrong one"
    names = []
    for i, graph in enumerate(graphs):
        effects_of_one = _single_effects(graph, [row for row in rows if int(row["pair"]) == i])
        page = write_pages(
            made.lm, graph, folder, f"{behaviour}-{i}", shares, made.tables, effects=effects_of_one, effects_of=of
        )
        names.append(page.name)
    return names


def _single_effects(graph: Graph, rows: TableRows) -> list[dict[str, Any]]:
    ids, place = node_ids(graph), {tuple(node): i for i, node in enumerate(graph.features.tolist())}
    at = [place[int(row["layer"]), int(row["position"]), int(row["latent"])] for row in rows]
    return [
        effect_of(graph, ids, i, float(row["predicted"]), float(row["measured"]))
        for i, row in zip(at, rows, strict=True)
    ]


def _write_rows(s: Study, name: str, columns: Sequence[str], rows: TableRows, by: Sequence[str]) -> None:
    """rows/<name>.html: the table as a page, its rows in parts with the same values of `by`, which links name."""
    parts: dict[tuple[str, ...], list[tuple[int, list[str]]]] = {}
    for line, row in enumerate(rows, 2):
        parts.setdefault(tuple(row[key] for key in by), []).append((line, list(row.values())))
    made = [Part(".".join(key) or "all", lines) for key, lines in parts.items()]
    path = s.folder / "rows" / f"{name}.html"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    render_rows(path, f"{name}.csv", f"../{name}.csv", "../study.html", columns, made)


def _report(sae: TrainedCoder, folder: Path) -> str:
    """Address of the report of a dictionary's run, from the study's folder; empty where there is none."""
    page = Run(Path(sae.origin.source)).page
    if not sae.origin.source or not page.is_file():
        return ""
    return urllib.parse.quote(Path(os.path.relpath(page, folder)).as_posix())


def _about(s: Study, name: str) -> str:
    return BEHAVIOURS[name].about if name in BEHAVIOURS and not s.behaviours()[name] else s.behaviours()[name]


def _dictionary_title(sae: TrainedCoder) -> str:
    topology, sites = sae.coder.topology, sae.sites
    kind, source = type(topology).__name__, sae.origin.source or "a dictionary"
    return f"{source}: {kind}, {len(sites.reads)} x {topology.d_sae} latents"
