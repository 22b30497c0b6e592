"""Show which features lead to the next token of a prompt: an attribution graph, as JSON and as a page.

    saejax graph runs/coders-clt "x = data[i"
    saejax graph runs/mlps "x = data[i" --out=graphs --name=bracket       a sweep's transcoders, one a layer
    saejax graph runs/coders-clt "x = data[i" --supernodes=bracket.pins.json

Dictionaries are a cross-layer transcoder, transcoders of single layers, or autoencoders. Writes <out>/<name>.html,
which needs no other file, <name>.json in circuit-tracer's format, and <name>.npz. Continues where it was.
"""

from pathlib import Path

from saejax.app.command import Command, Line
from saejax.app.study_config import StudyConfig
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


class Graph(Command, takes="words"):
    out: str = setting("graphs", "The folder.")
    name: str = setting("", "What the files are called; empty: prompt and a digest.")
    model: str = setting("", "The language model, where the dictionary does not say.")
    max_features: int = setting(7500, "Features at most; 0 for all.", low=0)
    logits: int = setting(10, "Next tokens at most.", low=1)
    node_share: float = setting(StudyConfig.node_share, "Share of the influence that shown nodes keep.", low=0, high=1)
    edge_share: float = setting(StudyConfig.edge_share, "Share of the influence that shown edges keep.", low=0, high=1)
    effects: int = setting(10, "Features to set to zero, one at a time.", low=0)
    silent: int = setting(1, "First tokens without features and errors: where a model has its sink.", low=0)
    supernodes: str = setting("", "Pins and groups that the page has saved.")

    def run(self, line: Line) -> None:
        from saejax.app.console import say
        from saejax.app.dictionaries import dictionaries
        from saejax.app.graph import RowsDone, ablations, mlps_of, slug_of, tables_of, write_pages
        from saejax.app.run_coders import with_model
        from saejax.attribution import AttributionConfig, attribute
        from saejax.attribution.build import decided_by
        from saejax.attribution.export import checked_slug
        from saejax.attribution.influence import scores
        from saejax.attribution.layers import at_model
        from saejax.core.files import read_json

        if len(line.words) < 2:
            raise ConfigError('Give one or more dictionaries and a prompt: saejax graph runs/clt "x = data[i"')
        *places, prompt = line.words
        if not prompt:
            raise ConfigError("The prompt is empty: give the text whose next token the graph is about.")
        if self.name:
            checked_slug(self.name)
        supernodes = read_json(self.supernodes) if self.supernodes else None
        loaded, lm = with_model(list(dictionaries(places).values()), self.model)
        saes = at_model(lm, loaded)
        bos = lm.tokenizer.bos
        config = AttributionConfig(max_features=self.max_features, logits=self.logits, silent=self.silent)
        folder, tokens = Path(self.out), bos + lm.tokenizer.encode_behind_bos([prompt])[0]
        slug = self.name or slug_of(prompt, decided_by(lm, saes, tokens, config))
        with RowsDone() as rows:
            graph = attribute(lm, saes, tokens, config, folder=folder / f"{slug}.rows", progress=rows.done)
        graph.save(folder / f"{slug}.npz")
        shown = {"supernodes": supernodes} | ablations(lm, saes, graph, self.effects)
        shares = self.node_share, self.edge_share
        page = write_pages(lm, graph, folder, slug, shares, tables_of(lm, saes), **shown)
        replacement, completeness = scores(graph)
        say(
            f"{graph.n_features} features, {len(graph.logits)} next tokens; replacement score {replacement:.2f}, "
            f"completeness score {completeness:.2f}"
        )
        covered, mlps = mlps_of(lm, graph)
        if 0 < covered < mlps:
            say(
                f"dictionaries stand for {covered} of {mlps} MLPs: the others are linear here, what passes through "
                "them is the tokens', and the scores are higher than a graph of all MLPs would have"
            )
        say(f"{page}")
        say(f"{folder / slug}.json: circuit-tracer's format; {folder / slug}.npz: saejax.attribution.Graph")
