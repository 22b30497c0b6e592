"""`saejax graph`: which features of dictionaries lead to the next token of a prompt, as JSON and as a page."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app import console
from saejax.app.dictionaries import dictionaries
from saejax.app.loaded import with_model
from saejax.attribution import AttributionConfig, Graph, attribute
from saejax.attribution.export import graph_json, write_graph
from saejax.attribution.influence import pruned, scores
from saejax.attribution.layers import at_model, layers_of
from saejax.core.errors import ConfigError
from saejax.core.files import read_json
from saejax.core.progress import Progress
from saejax.lm import LanguageModel
from saejax.report.graph_page import layer_tables, render_graph
from saejax.report.read import read_features
from saejax.trained import TrainedCoder

Tables = dict[int, Mapping[str, Any]]  # layer of a graph -> {"vocab", "features"}, a row's id its latent


def run_graph(words: Sequence[str], flags: Mapping[str, Any]) -> None:
    """`saejax graph DICTIONARY... PROMPT`: write the graph, its JSON and its page, and say where.

    Raises:
        ConfigError: too few words, or settings that do not go together.
        DataError: a dictionary, model or prompt that cannot be read.
    """
    if len(words) < 2:
        raise ConfigError('Give one or more dictionaries and a prompt: saejax graph runs/clt "x = data[i"')
    *places, prompt = words
    saes, lm = with_model(list(dictionaries(places).values()), flags["model"])
    saes = at_model(lm, saes)
    bos = [] if lm.tokenizer.bos_id is None else [lm.tokenizer.bos_id]
    config = AttributionConfig(max_features=flags["max_features"], logits=flags["logits"], silent=len(bos))
    slug = flags["name"] or re.sub(r"\W+", "-", prompt).strip("-").lower()[:60] or "graph"
    folder = Path(flags["out"])
    tokens = bos + lm.tokenizer.encode(prompt)
    with _Rows() as rows:
        graph = attribute(lm, saes, tokens, config, folder=folder / f"{slug}.rows", progress=rows.done)
    graph.save(folder / f"{slug}.npz")
    supernodes = read_json(flags["supernodes"]) if flags["supernodes"] else None
    shares = flags["node_share"], flags["edge_share"]
    page = write_pages(lm, graph, folder, slug, shares, tables_of(lm, saes), supernodes=supernodes)
    replacement, completeness = scores(graph)
    console.say(
        f"{graph.n_features} features, {len(graph.logits)} next tokens; replacement score {replacement:.2f}, "
        f"completeness score {completeness:.2f}"
    )
    console.say(f"{page}")
    console.say(f"{folder / slug}.json: circuit-tracer's format; {folder / slug}.npz: saejax.attribution.Graph")


class _Rows(contextlib.ExitStack):
    """A bar for rows whose number is known when the first are done."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: Progress | None = None

    def done(self, rows: int, total: int) -> None:
        if self._bar is None:
            self._bar = self.enter_context(Progress("graph", total, unit="rows"))
        self._bar.advance(rows - self._bar.tokens)


def write_pages(
    lm: LanguageModel,
    graph: Graph,
    folder: Path,
    slug: str,
    shares: tuple[float, float],
    tables: Tables,
    **shown: Any,
) -> Path:
    """Writes <slug>.json, the index of all graphs of the folder, and <slug>.html; returns the page's path.

    Args:
        shares: of the influence that nodes and edges keep.
        tables: what features fire on.
        shown: effects, effects_of and supernodes of `render_graph`.
    """
    kept = pruned(graph, *shares)
    strings = lm.tokenizer.token_strings(graph.logits.tolist())
    content = graph_json(graph, kept, slug=slug, logit_strings=strings, node_threshold=shares[0])
    write_graph(folder, content)
    replacement, completeness = scores(graph)
    figures = {"replacement score": replacement, "completeness score": completeness}
    return render_graph(folder / f"{slug}.html", content, tables=tables, figures=figures, **shown)


def tables_of(lm: LanguageModel, saes: Sequence[TrainedCoder]) -> Tables:
    """What features fire on, from the reports of the dictionaries' own runs; of one without a report, nothing.

    Args:
        saes: in the order of their layers, with the model's names of hook points.
    """
    found: Tables = {}
    layers = layers_of(lm, saes)
    for number, sae in enumerate(saes):
        run = Path(sae.origin.source)
        if not sae.origin.source or not (run / "features.json.gz").is_file():
            continue
        by_group = layer_tables(read_features(run), sae.coder.topology.d_sae)
        for place, layer in enumerate(layers):
            if layer.dictionary == number and layer.group in by_group:
                found[place] = by_group[layer.group]
    return found
