"""Phase 6: what the tables say, as pages: study.html, its rows, and each graph."""

import dataclasses
import functools
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax.app.experiment import Experiment
from saejax.app.graph import Tables, effect_of, fires_on, tables_of, write_pages
from saejax.attribution import Graph
from saejax.attribution.export import node_ids
from saejax.attribution.layers import layers_of
from saejax.core.files import finite, write_json
from saejax.interventions import Interventions
from saejax.lm import LanguageModel
from saejax.reports.study_page import render_rows, render_study
from saejax.runs import Run
from saejax.studies import baseline, effects, graphs, singles, summary
from saejax.studies.baseline import Prompts
from saejax.studies.behaviours import BEHAVIOURS, pair_files
from saejax.studies.effects import Group
from saejax.studies.graphs import Feature
from saejax.studies.record import folder_of
from saejax.studies.summary import TableRows
from saejax.studies.table import Table
from saejax.trained import TrainedCoder

# Features of a behaviour that the page shows.
_FEATURES = 15


@dataclasses.dataclass(frozen=True)
class LoadedStudy:
    """The objects that the phases after the training share.

    Attributes:
        saes: in the order of their layers.
        of_layer: layer of the graphs -> (name of its dictionary, number of its latent 0).
    """

    e: Experiment
    lm: LanguageModel
    inside: Interventions
    saes: Sequence[TrainedCoder]
    of_layer: Mapping[int, tuple[str, int]]

    @functools.cached_property
    def tables(self) -> Tables:
        return tables_of(self.lm, self.saes)

    @functools.cached_property
    def reports(self) -> dict[int, str]:
        """{layer: address of its dictionary's report from the study's folder; empty where there is none}."""
        reports = {}
        for number, layer in enumerate(layers_of(self.lm, self.saes)):
            source = self.saes[layer.dictionary].origin.source
            page = Run(Path(source)).page
            there = source and page.is_file()
            address = Path(os.path.relpath(page, folder_of(self.e))).as_posix() if there else ""
            reports[number] = urllib.parse.quote(address)
        return reports


@dataclasses.dataclass(frozen=True)
class Examined:
    """A behaviour with what phase 4 found of it, and from phase 5 on which controls of each group are no repetition."""

    train: Prompts
    test: Prompts
    graphs: Sequence[Graph]
    features: Sequence[Feature]
    groups: Sequence[Group]
    new_controls: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def write_page(loaded: LoadedStudy, examined: Mapping[str, Examined], refused: Sequence[str]) -> dict[str, Any]:
    """Write study.html, summary.json, the pages of rows and of graphs; returns the content of summary.json."""
    e, c, folder = loaded.e, loaded.e.study, folder_of(loaded.e)
    table, measured = _read_table(folder, "baseline", baseline.PAIR_COLUMNS, ("behaviour", "split"))
    baselines = {name: summary.baseline_of(table, measured, name) for name in pair_files(c.behaviours)}
    content = {
        "name": e.name,
        "model": str(loaded.lm.identity["model"]),
        "dictionaries": [
            f"{sae.origin.source or 'a dictionary'}: {type(sae.coder.topology).__name__}, {len(sae.sites.reads)} x "
            f"{sae.coder.topology.d_sae} latents"
            for sae in loaded.saes
        ],
        "graphs": min(c.graphs, c.train_pairs),
        "group_size": c.group_size,
        "least_accuracy": c.least_accuracy,
        "behaviours": [
            _behaviour(loaded, name, one, baselines[name], summary.turns_of(table, measured, name))
            for name, one in examined.items()
        ],
        "refused": [{"name": name, "about": _about(e, name), "baseline": baselines[name]} for name in refused],
    }
    write_json(folder / "summary.json", finite(content))
    render_study(folder / "study.html", finite(content))
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


def _behaviour(
    loaded: LoadedStudy, name: str, one: Examined, splits: Mapping[str, Any], turn_R: np.ndarray
) -> dict[str, Any]:
    folder = folder_of(loaded.e)
    _read_table(folder, f"features.{name}", graphs.FEATURE_COLUMNS)
    changes, changed = _read_table(folder, f"effects.{name}", effects.EFFECT_COLUMNS, ("group", "kind"))
    single, measured = _read_table(folder, f"singles.{name}", singles.SINGLE_COLUMNS)
    pages = _graph_pages(loaded, one.graphs, name, measured)
    results = summary.effects_of(changes, changed)
    return {
        "name": name,
        "about": _about(loaded.e, name),
        "example": dataclasses.asdict(one.train.pairs[0]),
        "baseline": splits,
        "graphs": [summary.graph_of(graph, f"graphs/{page}") for graph, page in zip(one.graphs, pages, strict=True)],
        "features": [
            _titled(loaded, f.layer, f.latent) | {"share": f.share, "prompts": f.prompts, "activation": f.activation}
            for f in one.features[:_FEATURES]
        ],
        "n_features": len(one.features),
        "groups": [
            summary.group_of(group.name, group.layer, results, turn_R, one.test.last, one.new_controls[group.name])
            | {"features": [_titled(loaded, group.layer, latent - first) for latent in group.latents]}
            for group in one.groups
            for _, first in [loaded.of_layer[group.layer]]
        ],
        "prediction": summary.prediction_of(single, measured),
    }


def _titled(loaded: LoadedStudy, layer: int, latent: int) -> dict[str, Any]:
    """The title of a feature: tokens that it fires on, its explanation, and its address in the report."""
    features = loaded.tables.get(layer, {}).get("features", ())
    row: Mapping[str, Any] = next((row for row in features if row["id"] == latent), {})
    explanations = row.get("explanations") or [{"text": ""}]
    address = loaded.reports[layer] if row else ""
    return {
        "layer": layer,
        "latent": latent,
        "fires_on": fires_on(row, loaded.tables[layer]["vocab"]) if row else [],
        "explanation": explanations[0]["text"],
        "href": f"{address}#feature={loaded.of_layer[layer][1] + latent}" if address else "",
    }


def _graph_pages(loaded: LoadedStudy, graphs: Sequence[Graph], behaviour: str, rows: TableRows) -> list[str]:
    """Writes JSON and a page for each graph, with single features' effects; returns the pages' file names."""
    c, folder = loaded.e.study, folder_of(loaded.e) / "graphs"
    shares, of = (c.node_share, c.edge_share), "Change of the logit of the right answer less that of the wrong one"
    names = []
    for i, graph in enumerate(graphs):
        ids, place = node_ids(graph), {tuple(node): at for at, node in enumerate(graph.features.tolist())}
        measured = [
            effect_of(graph, ids, place[node], float(row["predicted"]), float(row["measured"]))
            for row in rows
            if int(row["pair"]) == i
            for node in [(int(row["layer"]), int(row["position"]), int(row["latent"]))]
        ]
        page = write_pages(
            loaded.lm, graph, folder, f"{behaviour}-{i}", shares, loaded.tables, effects=measured, effects_of=of
        )
        names.append(page.name)
    return names


def _read_table(folder: Path, name: str, columns: Sequence[str], by: Sequence[str] = ()) -> tuple[Table, TableRows]:
    """A table and its rows, which rows/<name>.html shows in parts with the same values of `by`, which links name."""
    table = Table(folder / f"{name}.csv", columns)
    rows = table.read()
    parts: dict[tuple[str, ...], list[tuple[int, list[str]]]] = {}
    for line, row in enumerate(rows, 2):
        parts.setdefault(tuple(row[key] for key in by), []).append((line, list(row.values())))
    path = folder / "rows" / f"{name}.html"
    render_rows(path, f"{name}.csv", f"../{name}.csv", "../study.html", columns, list(parts.items()))
    return table, rows


def _about(e: Experiment, name: str) -> str:
    file = pair_files(e.study.behaviours)[name]
    return BEHAVIOURS[name].about if name in BEHAVIOURS and not file else file
