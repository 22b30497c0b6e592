"""The files of `saejax graph`: features that lead to the next token of a prompt, as JSON and as a page."""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from saejax.app.graph_faithful import faithfulness
from saejax.app.graph_heads import heads_json
from saejax.app.study_config import StudyConfig
from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.attribution.build import decided_by
from saejax.attribution.export import checked_slug, graph_json, node_ids, write_features, write_graph
from saejax.attribution.influence import Pruned, influence, pruned, scores
from saejax.attribution.layers import at_model, layers_of
from saejax.attribution.prediction import predicted
from saejax.core.errors import ConfigError
from saejax.core.files import write_json
from saejax.core.notebook import html_frame
from saejax.core.places import type_in_words
from saejax.core.progress import Progress
from saejax.interop.circuit_tracer_features import feature_file
from saejax.interop.passages import token_strings
from saejax.interventions import Interventions, scaled, zero
from saejax.interventions.metrics import at_tokens
from saejax.lm import LanguageModel
from saejax.reports.feature_table import read_features
from saejax.reports.graph_page import layer_tables, render_graph
from saejax.runs import Run
from saejax.trained import TrainedCoder

# Activations of a passage that count as firing, as a share of its largest.
_FIRES = 0.5

Tables = dict[int, Mapping[str, Any]]  # layer of a graph -> {"vocab", "features"}, a row's id its latent


def slug_of(prompt: str, decided: Mapping[str, Any]) -> str:
    """A graph's name: what of the prompt a file can be called, and a digest of all that decides the graph.

    Prompts that differ in punctuation alone, other settings and other dictionaries have graphs of their own.
    """
    readable = re.sub(r"\W+", "-", prompt, flags=re.ASCII).strip("-").lower()[:60]
    content = hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:8]
    return f"{readable}-{content}".lstrip("-")


class RowsDone(contextlib.ExitStack):
    """A bar for rows whose number is known when the first are done."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Progress | None = None

    def done(self, rows: int, total: int) -> None:
        if self._bar is None:
            self._bar = self.enter_context(Progress("graph", total, unit="rows"))
        self._bar.advance(rows - self._bar.tokens)


@dataclasses.dataclass(frozen=True, repr=False)
class PromptGraph:
    """The attribution graph of a prompt and its page.

    Attributes:
        graph: nodes, activations and direct effects.
        page: the file <slug>.html; beside it lie <slug>.json, circuit-tracer's format, and <slug>.npz.
        replacement, completeness: the two scores of Ameisen et al. 2025, between 0 and 1.
        effects: of the features that were set to zero, {"nodes", "what", "predicted", "measured"}.
        mlps: (MLPs that dictionaries stand for, MLPs of the model).
        heads, faithful: of `heads_json` and `faithfulness`, where they were asked for.
    """

    graph: Graph
    page: Path
    replacement: float
    completeness: float
    effects: Sequence[Mapping[str, Any]]
    mlps: tuple[int, int]
    heads: Mapping[str, Any]
    faithful: Mapping[str, Any]

    def __repr__(self) -> str:
        return (
            f"{self.graph.n_features} features, {len(self.graph.logits)} next tokens; replacement score "
            f"{self.replacement:.2f}, completeness score {self.completeness:.2f}"
        )

    def _repr_html_(self) -> str:
        return html_frame(self.page)


def graph(
    saes: TrainedCoder | Sequence[TrainedCoder],
    lm: LanguageModel,
    prompt: str,
    *,
    out: str | Path = "graphs",
    name: str = "",
    max_features: int = AttributionConfig.max_features,
    logits: int = AttributionConfig.logits,
    silent: int = AttributionConfig.silent,
    node_share: float = StudyConfig.node_share,
    edge_share: float = StudyConfig.edge_share,
    effects: int = 10,
    heads: bool = False,
    faithful: bool = False,
    beside: Sequence[TrainedCoder] = (),
    supernodes: Mapping[str, Any] | None = None,
) -> PromptGraph:
    """The features that lead to the next token of a prompt: graph(sae, lm, "x = data[i")

    It is what `saejax graph` writes: <out>/<slug>.html, .json and .npz. A graph that was stopped goes on where it was.

    Args:
        saes: a cross-layer transcoder, transcoders of single layers, or autoencoders.
        lm: a model of `saejax.load_lm` that JAX runs.
        prompt: the text whose next token the graph is about; the model's bos is put in front of it.
        out: the folder.
        name: the slug; empty: prompt and a digest of all that decides the graph.
        max_features: features at most; 0 for all.
        logits: next tokens at most.
        silent: first tokens without features and errors: where a model has its sink.
        node_share, edge_share: shares of the influence that the page's nodes and edges keep.
        effects: features to set to zero, one at a time.
        heads: the attention heads that edges between tokens pass, and why these attend; also in <slug>.heads.json.
        faithful: which steps of the model the dictionaries skip (`faithfulness`); also in <slug>.faithful.json.
        beside: transcoders of the same MLPs, to compare with; `faithful` is then done too.
        supernodes: pins and groups that the page has saved, read from its JSON.

    Raises:
        ConfigError: an empty prompt, a model that JAX does not run, dictionaries that do not go together.
        DataError: a prompt or a dictionary that is not this model's, or no active feature.
    """
    if not prompt:
        raise ConfigError("The prompt is empty: give the text whose next token the graph is about.")
    dictionaries = [saes] if isinstance(saes, TrainedCoder | str) else list(saes)
    for sae in dictionaries:
        if not isinstance(sae, TrainedCoder):
            raise ConfigError(f"graph takes dictionaries and then their model; one is {type_in_words(sae)}.")
    if name:
        checked_slug(name)
    layers = at_model(lm, dictionaries)
    tokens = lm.tokenizer.bos + lm.tokenizer.encode_behind_bos([prompt])[0]
    config = AttributionConfig(max_features=max_features, logits=logits, silent=silent)
    folder = Path(out)
    slug = name or slug_of(prompt, decided_by(lm, layers, tokens, config))
    with RowsDone() as rows:
        made = attribute(lm, layers, tokens, config, folder=folder / f"{slug}.rows", progress=rows.done)
    made.save(folder / f"{slug}.npz")
    shown = {"supernodes": supernodes} | ablations(lm, layers, made, effects)
    shares = node_share, edge_share
    if heads:
        shown["heads"] = heads_json(lm, layers, made, pruned_for_page(lm, made, shares), config)
        write_json(folder / f"{slug}.heads.json", {"slug": slug} | shown["heads"])
    if faithful or beside:
        others = folder / f"{slug}.beside.rows"
        shown["faithful"] = faithfulness(lm, layers, made, config, beside, others)
        write_json(folder / f"{slug}.faithful.json", {"slug": slug} | shown["faithful"])
    page = write_pages(lm, made, folder, slug, shares, tables_of(lm, layers), **shown)
    return PromptGraph(
        made,
        page,
        *scores(made),
        effects=shown.get("effects", []),
        mlps=mlps_of(lm, made),
        heads=shown.get("heads", {}),
        faithful=shown.get("faithful", {}),
    )


def ablations(lm: LanguageModel, saes: Sequence[TrainedCoder], graph: Graph, count: int) -> dict[str, Any]:
    """Effects of setting single features to 0 where they stand, beside what the graph says: for `render_graph`.

    The `count` features of most influence, one at a time. The effect is the change of the likeliest next token's logit
    less the mean of all logits; where a model caps its logits, predicted before the cap and measured after it.

    Args:
        saes: in the order of their layers, with the model's names of hook points.
    """
    order = np.argsort(-influence(graph)[graph.parts["features"]], kind="stable")[:count]
    if not len(order):
        return {}
    likeliest, ids, layers = int(graph.logits[0]), node_ids(graph), layers_of(lm, saes)
    nodes = graph.features[order].tolist()
    used = {str(layers[layer].dictionary) for layer, _, _ in nodes}
    inside = Interventions(lm, {name: saes[int(name)] for name in sorted(used, key=int)})

    def measure(logits_RSV: jax.Array) -> jax.Array:
        z_RV = at_tokens(logits_RSV, -1)
        return z_RV[:, likeliest] - z_RV.mean(1)

    changes = []
    for layer, position, latent in nodes:
        place, at = layers[layer], np.arange(len(graph.tokens))[None] == position
        change = zero(place.group * saes[place.dictionary].coder.topology.d_sae + latent, at)
        # All dictionaries change in every intervention, most of them by nothing: one program.
        changes.append({other: scaled(0, 1.0, at) for other in used} | {str(place.dictionary): change})
    before = float(measure(inside.run([graph.tokens]).logits)[0])
    measured = inside.many([graph.tokens], changes, measure)[:, 0] - before
    effects = predicted(graph, [[int(place)] for place in order])[:, 0]
    rows = [
        effect_of(graph, ids, *row) for row in zip(order.tolist(), effects.tolist(), measured.tolist(), strict=True)
    ]
    token = lm.tokenizer.token_strings([likeliest])[0]
    return {"effects": rows, "effects_of": f"Change of the logit of {token!r} less the mean of all logits"}


def effect_of(graph: Graph, ids: Sequence[str], place: int, predicted: float, measured: float) -> dict[str, Any]:
    """The row of `render_graph` for the feature at `place` set to 0 where it stands; `ids` are those of the nodes."""
    position = int(graph.features[place, 1])
    what = f"set to zero at {graph.strings[position]!r}, token {position}"
    return {"nodes": [ids[place]], "what": what, "predicted": predicted, "measured": measured, "interval": None}


def write_pages(
    lm: LanguageModel, graph: Graph, folder: Path, slug: str, shares: tuple[float, float], tables: Tables, **shown: Any
) -> Path:
    """Write <slug>.json, the folder's index, what the kept features fire on, and <slug>.html; returns its path.

    Args:
        shares: of the influence that nodes and edges keep.
        tables: what features fire on.
        shown: effects, effects_of, heads, faithful and supernodes of `render_graph`.
    """
    covered, mlps = mlps_of(lm, graph)
    shown_graph = pruned_for_page(lm, graph, shares)
    strings = lm.tokenizer.token_strings(graph.logits.tolist())
    features = graph.features[shown_graph.nodes[graph.parts["features"]]].tolist()
    kept = {(layer, latent) for layer, _, latent in features}
    rows = {
        (layer, row["id"]): row
        for layer, table in tables.items()
        for row in table["features"]
        if (layer, row["id"]) in kept
    }
    content = graph_json(
        graph,
        shown_graph,
        slug=slug,
        logit_strings=strings,
        node_threshold=shares[0],
        labels={key: label_of(row, tables[key[0]]["vocab"]) for key, row in rows.items()},
    )
    vocabs = {layer: token_strings(table["vocab"]) for layer, table in tables.items()}
    files = {key: feature_file(row, *key, vocabs[key[0]]) for key, row in rows.items()}
    write_graph(folder, content)
    write_features(folder, graph.names, files)
    replacement, completeness = scores(graph)
    figures: dict[str, float | str] = {"replacement score": replacement, "completeness score": completeness}
    if 0 < covered < mlps:  # then a layer's number is not its block's
        figures["layers"] = ", ".join(f"L{layer} {name}" for layer, name in enumerate(graph.hook_points))
    return render_graph(folder / f"{slug}.html", content, tables=tables, figures=figures, **shown)


def pruned_for_page(lm: LanguageModel, graph: Graph, shares: tuple[float, float]) -> Pruned:
    """The nodes and edges that a page shows."""
    covered, mlps = mlps_of(lm, graph)
    return pruned(graph, *shares, count_tokens=not 0 < covered < mlps)


def mlps_of(lm: LanguageModel, graph: Graph) -> tuple[int, int]:
    """(MLPs that the graph's dictionaries stand for, MLPs of the model)."""
    return sum(name.endswith(".mlp_out") for name in graph.hook_points), lm.config.n_layer


def label_of(row: Mapping[str, Any], vocab: Sequence[str]) -> str:
    """The first explanation of a feature; of one without, the tokens that it fires on."""
    if row.get("explanations"):
        return str(row["explanations"][0]["text"])
    return " · ".join(repr(token)[1:-1] for token in fires_on(row, vocab))


def fires_on(row: Mapping[str, Any], vocab: Sequence[str]) -> list[str]:
    """The tokens that a feature fires on most often in its strongest passages, four at most."""
    counts = Counter[str]()
    for example in row.get("examples") or ():
        values = np.asarray(example["activations"], float)
        if values.size and values.max() > 0:
            counts.update(vocab[example["tokens"][i]] for i in np.flatnonzero(values >= _FIRES * values.max()))
    return [token for token, _ in counts.most_common(4)]


def tables_of(lm: LanguageModel, saes: Sequence[TrainedCoder]) -> Tables:
    """Tables of what features fire on, from the reports of the dictionaries' runs; of one without a report, nothing.

    Args:
        saes: in the order of their layers, with the model's names of hook points.
    """
    tables: Tables = {}
    layers = layers_of(lm, saes)
    for number, sae in enumerate(saes):
        run = Path(sae.origin.source)
        if not sae.origin.source or not Run(run).features.is_file():
            continue
        by_group = layer_tables(read_features(run), sae.coder.topology.d_sae)
        for place, layer in enumerate(layers):
            if layer.dictionary == number and layer.group in by_group:
                tables[place] = by_group[layer.group]
    return tables
