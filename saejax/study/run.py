"""`saejax study`: from behaviours to the features that cause them. Every phase goes on where it was.

0  pairs of prompts                 pairs/<behaviour>.<split>.jsonl
1  does the model do it             baseline.csv
2  capture, 3  dictionaries         the experiment's own pipeline or sweep, where none are given
4  graphs, merged                   graphs/<behaviour>/, features.csv
5  interventions                    effects.csv, singles.csv
6  the page                         study.html
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from saejax.app import console
from saejax.app.dictionaries import dictionaries
from saejax.app.graph import tables_of
from saejax.app.loading import load
from saejax.app.stages import run_pipeline
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.attribution import Graph
from saejax.attribution.influence import influence
from saejax.attribution.layers import at_model, layers_of
from saejax.attribution.prediction import predicted
from saejax.core.config import differences, to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import finite, read_json, write_json, writing
from saejax.core.progress import Progress
from saejax.interventions import Interventions, zero
from saejax.lm import LanguageModel
from saejax.report.study_page import render_study
from saejax.study import baseline, effects, graphs, summary
from saejax.study.baseline import Prompts, as_prompts
from saejax.study.behaviours import BEHAVIOURS, as_jsonl, drawn
from saejax.study.config import Study
from saejax.study.effects import Group
from saejax.study.graphs import Feature
from saejax.study.pages import fires_on, graph_pages
from saejax.study.table import Table
from saejax.trained import TrainedCoder

# Features of a behaviour that the page shows.
_FEATURES = 15

SINGLES = ("behaviour", "pair", "layer", "latent", "position", "activation", "predicted", "measured")


@dataclasses.dataclass(frozen=True)
class Opened:
    """What the phases after the training share.

    Attributes:
        inside: the model with the dictionaries.
        saes: the same, in the order of their layers.
        of_layer: layer of the graphs -> (name of its dictionary, number of its latent 0).
    """

    s: Study
    lm: LanguageModel
    inside: Interventions
    saes: list[TrainedCoder]
    of_layer: dict[int, tuple[str, int]]
    prompts: dict[str, dict[str, Prompts]]


def run_study(s: Study) -> int:
    """All phases. Returns the exit code: 1 where a gate of the training failed, else 0.

    Raises:
        ConfigError, DataError: settings, prompts, dictionaries or a model that cannot be used; a behaviour that the
            model does not have.
    """
    work = Workspace(s.experiment)
    if not isinstance(lm := work.lm, LanguageModel):
        raise ConfigError("A study needs one model that JAX runs: lm.backend=jax, and no lm.second.")
    prompts = _prompts(s, lm)
    _baseline(s, lm, prompts)
    code, named = _dictionaries(s, work)
    _same_study(s, lm, named)
    inside = Interventions(lm, named)
    saes = at_model(lm, list(named.values()))
    opened = Opened(s, lm, inside, saes, _layers(lm, inside, saes), prompts)
    made = {name: _graphs(opened, name) for name in prompts}
    features = {name: graphs.merged(made[name]) for name in prompts}
    groups = {name: _groups(opened, name, features[name]) for name in prompts}
    for name in prompts:
        _effects(opened, name, groups[name])
        _singles(opened, name, made[name])
    page = _page(opened, made, features, groups)
    console.say(f"study: {page}")
    return code


def _prompts(s: Study, lm: LanguageModel) -> dict[str, dict[str, Prompts]]:
    """{behaviour: {split: prompts}}, written as JSONL."""
    found = {}
    for name, file in s.behaviours().items():
        splits = drawn(name, lm.tokenizer, s.study.train_pairs, s.study.test_pairs, s.experiment.seed, file)
        for split, pairs in splits.items():
            path = s.folder / "pairs" / f"{name}.{split}.jsonl"
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(as_jsonl(pairs), encoding="utf-8")
        found[name] = {split: as_prompts(pairs, lm) for split, pairs in splits.items()}
        console.say(f"study: {name}: {s.study.train_pairs} + {s.study.test_pairs} pairs")
    return found


def _baseline(s: Study, lm: LanguageModel, prompts: dict[str, dict[str, Prompts]]) -> None:
    table = Table(s.folder / "baseline.csv", baseline.COLUMNS)
    n_pairs = s.study.train_pairs + s.study.test_pairs
    done = table.begin() // n_pairs
    table.cut(done * n_pairs)
    for name, splits in list(prompts.items())[done:]:
        baseline.write(table, name, {split: (p, baseline.measure(lm, p)) for split, p in splits.items()})
    for name in prompts:
        rows = [row for row in table.read() if row["behaviour"] == name and row["split"] == "train"]
        accuracy = float(np.mean([row["correct"] == "1" for row in rows]))
        difference = np.mean([float(row["clean_difference"]) for row in rows])
        console.say(f"study: {name}: right in {accuracy:.0%} of {len(rows)} pairs, logit difference {difference:.2f}")
        baseline.refuse(name, accuracy, s.study.least_accuracy)


def _dictionaries(s: Study, work: Workspace) -> tuple[int, dict[str, TrainedCoder]]:
    """(exit code of their training, dictionaries by name)."""
    code, words = 0, list(s.study.dictionaries)
    if not words:
        swept = any(to_json(s.experiment.sweep).values())
        code = (run_sweep if swept else run_pipeline)(work)
        if code > 1:
            return code, {}
        words = [str(s.experiment.run_dir)]
    return code, {name: load(source) for name, source in dictionaries(words).items()}


def _same_study(s: Study, lm: LanguageModel, named: dict[str, TrainedCoder]) -> None:
    """Raises DataError where the folder holds results of another study."""
    path = s.folder / "study.json"
    now = {
        "study": to_json(s.study) | {"dictionaries": {name: sae.fingerprint() for name, sae in named.items()}},
        "attribution": to_json(s.attribution),
        "lm": lm.identity,
        "seed": s.experiment.seed,
    }
    now = json.loads(json.dumps(now))
    if path.is_file() and (changed := differences(read_json(path), now)):
        raise DataError(
            f"{s.folder} holds another study:\n  " + "\n  ".join(changed) + "\nChoose another --config.name, restore "
            "these settings, or delete the folder."
        )
    write_json(path, now)


def _layers(lm: LanguageModel, inside: Interventions, saes: list[TrainedCoder]) -> dict[int, tuple[str, int]]:
    by_place = {sae.sites.writes: name for name, sae in inside.dictionaries.items()}
    names = [by_place[sae.sites.writes] for sae in saes]
    return {
        number: (names[layer.dictionary], layer.group * saes[layer.dictionary].coder.topology.d_sae)
        for number, layer in enumerate(layers_of(lm, saes))
    }


def _graphs(o: Opened, behaviour: str) -> list[Graph]:
    count = min(o.s.study.graphs, o.s.study.train_pairs)
    with Progress(f"graphs of {behaviour}", count, unit="graphs") as progress:
        return graphs.make(
            o.lm,
            o.saes,
            o.prompts[behaviour]["train"],
            count,
            o.s.attribution,
            o.s.folder / "graphs" / behaviour,
            lambda done, total: progress.advance(1),
        )


def _groups(o: Opened, behaviour: str, features: list[Feature]) -> list[Group]:
    path = o.s.folder / f"features.{behaviour}.csv"
    path.unlink(missing_ok=True)
    table = Table(path, graphs.COLUMNS)
    table.begin()
    table.extend((behaviour, f.layer, f.latent, f.share, f.prompts, f.activation) for f in features)
    found = graphs.groups(features, o.s.study, o.of_layer)
    if not found:
        raise DataError(
            f"{behaviour}: no layer has {o.s.study.group_size} features that two graphs share; lower "
            "study.group_size or raise study.graphs."
        )
    return found


def _effects(o: Opened, behaviour: str, groups: list[Group]) -> None:
    prompts, c, seed = o.prompts[behaviour]["test"], o.s.study, o.s.experiment.seed
    clean = o.inside.run(prompts.clean)
    inner_RS = (np.arange(prompts.clean.shape[1])[None] >= 1) & (
        np.arange(prompts.clean.shape[1])[None] <= prompts.last[:, None]
    )

    grouped = {(group.dictionary, latent) for group in groups for latent in group.latents}

    def mean_of(group: Group) -> np.ndarray:
        """Of latents that no other group holds: a control is no group in disguise."""
        latents = np.asarray(clean.latents[group.dictionary])
        mean_F = latents.reshape(*latents.shape[:2], -1)[inner_RS].mean(0)
        d_sae = o.inside.dictionaries[group.dictionary].coder.topology.d_sae
        mean_F = np.where(np.arange(len(mean_F)) // d_sae == group.latents[0] // d_sae, mean_F, 0)
        others = [f for name, f in grouped if name == group.dictionary and f not in group.latents]
        mean_F[others] = 0
        return mean_F

    jobs = effects.jobs(groups, mean_of, c, seed)
    table = Table(o.s.folder / f"effects.{behaviour}.csv", effects.COLUMNS)
    with Progress(f"interventions of {behaviour}", len(jobs), unit="interventions") as progress:
        before = [0]

        def tell(done: int, total: int) -> None:
            progress.advance(done - before[0])
            before[0] = done

        effects.measure(o.inside, behaviour, prompts, jobs, table, c, seed, tell)


def _singles(o: Opened, behaviour: str, made: list[Graph]) -> None:
    """Single features taken away where they stand: what the graph says, and what the model does."""
    prompts, table = o.prompts[behaviour]["train"], Table(o.s.folder / f"singles.{behaviour}.csv", SINGLES)
    if table.begin() == sum(min(o.s.study.singles, graph.n_features) for graph in made):
        return
    table.cut(0)
    n = len(made)
    some = dataclasses.replace(
        prompts,
        pairs=prompts.pairs[:n],
        clean=prompts.clean[:n],
        corrupt=prompts.corrupt[:n],
        **{name: getattr(prompts, name)[:n] for name in ("last", "right", "wrong")},
    )
    chosen = []
    for i, graph in enumerate(made):
        order = np.argsort(-influence(graph)[graph.parts["features"]], kind="stable")[: o.s.study.singles]
        right, wrong = (graph.logits.tolist().index(int(token[i])) for token in (some.right, some.wrong))
        change = predicted(graph, [[int(place)] for place in order])
        chosen += [(i, graph, int(p), float(z[right] - z[wrong])) for p, z in zip(order, change, strict=True)]
    by_dictionary: dict[str, list[int]] = {}
    for number, (_, graph, place, _) in enumerate(chosen):
        by_dictionary.setdefault(o.of_layer[int(graph.features[place, 0])][0], []).append(number)
    clean = np.asarray(some.difference(o.inside.run(some.clean).logits))
    measured = np.zeros(len(chosen))
    for name, numbers in by_dictionary.items():
        changes = []
        for number in numbers:
            i, graph, place, _ = chosen[number]
            layer, position, latent = graph.features[place].tolist()
            at = np.zeros(some.clean.shape, bool)
            at[i, position] = True
            changes.append({name: zero(o.of_layer[layer][1] + latent, at)})
        values = o.inside.many(some.clean, changes, some.difference)
        for number, value in zip(numbers, values, strict=True):
            measured[number] = value[chosen[number][0]] - clean[chosen[number][0]]
    rows = []
    for (i, graph, place, said), value in zip(chosen, measured, strict=True):
        layer, position, latent = graph.features[place].tolist()
        rows.append((behaviour, i, layer, latent, position, graph.activations[place], said, value))
    table.extend(rows)


def _page(
    o: Opened, made: dict[str, list[Graph]], features: dict[str, list[Feature]], groups: dict[str, list[Group]]
) -> Path:
    """study.html, and the graphs' pages."""
    folder, c = o.s.folder, o.s.study
    tables = tables_of(o.lm, o.saes)
    measured = Table(folder / "baseline.csv", baseline.COLUMNS).read()
    behaviours = []
    for name in o.prompts:
        singles = Table(folder / f"singles.{name}.csv", SINGLES).read()
        rows = Table(folder / f"effects.{name}.csv", effects.COLUMNS).read()
        pages = graph_pages(o.lm, made[name], name, folder / "graphs", c, singles, tables)
        of_graphs = [summary.graph_of(graph, f"graphs/{page}") for graph, page in zip(made[name], pages, strict=True)]
        said = summary.baseline_of(measured, name)
        errors = float(np.mean([graph["errors_share"] for graph in of_graphs]))
        behaviours.append(
            {
                "name": name,
                "about": BEHAVIOURS[name].about if name in BEHAVIOURS else o.s.behaviours()[name],
                "example": dataclasses.asdict(o.prompts[name]["train"].pairs[0]),
                "baseline": said,
                "graphs": of_graphs,
                "features": [
                    summary.feature_of(f, fires_on(tables, f.layer, f.latent)) for f in features[name][:_FEATURES]
                ],
                "groups": [
                    summary.group_of(group, o.of_layer[group.layer][1], rows, said["test"]["corrupt"])
                    for group in groups[name]
                ],
                "prediction": summary.prediction_of(singles),
                "unexplained": (
                    f"Errors of the dictionaries have {errors:.0%} of the influence that features and errors have "
                    "together. Attention patterns are not explained: graphs take them as they are."
                ),
            }
        )
    content = {
        "name": o.s.experiment.name,
        "model": str(o.lm.identity["model"]),
        "dictionaries": [_named(sae) for sae in o.saes],
        "figures": {"graphs": f"{c.graphs} a behaviour", "groups": f"{c.groups} of {c.group_size} features"},
        "behaviours": behaviours,
    }
    write_json(folder / "summary.json", finite(content))
    return render_study(folder / "study.html", content)


def _named(sae: TrainedCoder) -> str:
    topology, sites = sae.coder.topology, sae.sites
    kind, source = type(topology).__name__, sae.origin.source or "a dictionary"
    return f"{source}: {kind}, {len(sites.reads)} x {topology.d_sae} latents"
