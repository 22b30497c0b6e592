"""Show which features lead to the next token of a prompt: an attribution graph, as JSON and as a page.

    saejax graph runs/coders-clt "x = data[i"
    saejax graph runs/mlps "x = data[i" --out=graphs --name=bracket       a sweep's transcoders, one a layer
    saejax graph runs/coders-clt "x = data[i" --supernodes=bracket.pins.json
    saejax graph runs/coders-clt "x = data[i" --heads                      which heads edges pass, and why they attend
    saejax graph runs/coders-clt "x = data[i" --beside=runs/mlps           what it skips, beside one transcoder a layer

Dictionaries are a cross-layer transcoder, transcoders of single layers, or autoencoders. Writes <out>/<name>.html,
which needs no other file, <name>.json in circuit-tracer's format, and <name>.npz. Continues where it was.
"""

import dataclasses

from saejax.app.command import Command, Line
from saejax.app.study_config import StudyConfig
from saejax.core.errors import ConfigError
from saejax.core.settings import setting


class Graph(Command, takes="words"):
    out: str = setting("graphs", "The folder.")
    name: str = setting("", "What the files are called; empty: prompt and a digest.")
    model: str = setting("", "The language model, where the dictionary does not say.")
    adapter: str = setting("", "Changes of the model: a LoRA adapter of `saejax adapt` or PEFT.")
    max_features: int = setting(7500, "Features at most; 0 for all.", low=0)
    logits: int = setting(10, "Next tokens at most.", low=1)
    node_share: float = setting(StudyConfig.node_share, "Share of the influence that shown nodes keep.", low=0, high=1)
    edge_share: float = setting(StudyConfig.edge_share, "Share of the influence that shown edges keep.", low=0, high=1)
    effects: int = setting(10, "Features to set to zero, one at a time.", low=0)
    silent: int = setting(1, "First tokens without features and errors: where a model has its sink.", low=0)
    heads: bool = setting(False, "The attention heads that edges pass, and why these attend; <name>.heads.json too.")
    faithful: bool = setting(False, "Which steps of the model the dictionaries skip; <name>.faithful.json too.")
    beside: str = setting("", "Transcoders of the same MLPs, with commas, to compare with: --faithful of both.")
    supernodes: str = setting("", "Pins and groups that the page has saved.")

    def run(self, line: Line) -> None:
        from saejax.app.console import say
        from saejax.app.dictionaries import dictionaries
        from saejax.app.graph import graph
        from saejax.app.run_coders import coder_at, with_model
        from saejax.attribution.export import checked_slug
        from saejax.core.files import read_json

        if len(line.words) < 2:
            raise ConfigError('Give one or more dictionaries and a prompt: saejax graph runs/clt "x = data[i"')
        *places, prompt = line.words
        if self.name:  # before a model is loaded
            checked_slug(self.name)
        how = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del how["model"], how["adapter"]
        others = dictionaries(self.beside.split(",")).values() if self.beside else ()
        how["beside"] = [coder_at(place) for place in others]
        how["supernodes"] = read_json(self.supernodes) if self.supernodes else None
        saes, lm = with_model(list(dictionaries(places).values()), self.model, self.adapter)
        made = graph(saes, lm, prompt, **how)
        say(repr(made))
        covered, mlps = made.mlps
        if 0 < covered < mlps:
            say(
                f"dictionaries stand for {covered} of {mlps} MLPs: the others are linear here, what passes through "
                "them is the tokens', and the scores are higher than a graph of all MLPs would have"
            )
        say(f"{made.page}")
        slug = made.page.with_suffix("")
        say(f"{slug}.json: circuit-tracer's format; {slug}.npz: saejax.attribution.Graph")
        if made.faithful:
            for row in made.faithful["rows"]:
                say(
                    f"{row['name']}: skips {row['skipped']:.0%} of the influence, response error {row['error']:.2f}, "
                    f"paths of {row['path']:.1f} edges, replacement {row['replacement']:.2f}"
                )
            say(f"{slug}.faithful.json: by layer")
        if self.heads:
            edges, attends = (len(made.heads[name]) for name in ("edges", "scores"))
            say(f"{slug}.heads.json: the heads of {edges} edges, and {attends} scores")
