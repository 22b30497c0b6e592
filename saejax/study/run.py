"""`saejax study`: from behaviours to the features that cause them. Every phase goes on where it was.

0  pairs of prompts                 study.json, pairs/<behaviour>.<split>.jsonl
1  does the model do it             baseline.csv
2  capture, 3  dictionaries         the experiment's own pipeline or sweep, where none are given
4  graphs, merged                   graphs/<behaviour>/, features.<behaviour>.csv
5  interventions                    effects.<behaviour>.csv, singles.<behaviour>.csv
6  the page                         study.html, summary.json
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from saejax.app import console
from saejax.app.dictionaries import dictionaries
from saejax.app.load import load
from saejax.app.stages import run_pipeline
from saejax.app.sweep.members import groups as programs
from saejax.app.sweep.members import members
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.attribution.layers import at_model, layers_of
from saejax.coders import Sites
from saejax.core.config import to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import write_bytes
from saejax.interventions import Interventions
from saejax.lm import LanguageModel
from saejax.study import baseline, effects, graphs, singles
from saejax.study.baseline import Prompts, Refused, as_prompts
from saejax.study.behaviours import Pair, as_jsonl, drawn
from saejax.study.config import Study
from saejax.study.pages import Examined, headlines, write_page
from saejax.study.record import begin_record, record_dictionaries
from saejax.study.table import Table
from saejax.trained import TrainedCoder

Measured = dict[str, dict[str, Prompts]]  # behaviour -> split


@dataclasses.dataclass(frozen=True)
class LoadedStudy:
    """The objects that the phases after the training share.

    Attributes:
        saes: in the order of their layers.
        of_layer: layer of the graphs -> (name of its dictionary, number of its latent 0).
    """

    s: Study
    lm: LanguageModel
    inside: Interventions
    saes: Sequence[TrainedCoder]
    of_layer: dict[int, tuple[str, int]]


def run_study(s: Study) -> int:
    """All phases. Returns the exit code: of a training that a signal stopped or that trained nothing; 1 where a gate
    failed, else 0.
    """
    work = Workspace(s.experiment)
    if not isinstance(lm := work.lm, LanguageModel):
        raise ConfigError("A study needs one model that JAX runs: lm.backend=jax, and no lm.second.")
    pairs = _pairs(s, lm)
    sources = dictionaries(list(s.study.dictionaries)) if s.study.dictionaries else {}
    given = {name: load(source) for name, source in sources.items()}
    layers_of(lm, at_model(lm, list(given.values()) or _to_be_trained(s, work)))
    prompts = _prompts(s, lm, pairs)
    refused = _baseline(s, lm, prompts)
    code = 0
    if not given:
        console.say("study: phases 2 and 3, capture and dictionaries")
        code = (run_sweep if _swept(s) else run_pipeline)(work)
        if code > 1 or (code and _swept(s)):  # a signal, or no member trained; failed gates of a run stop nothing
            return code
        given = {name: load(source) for name, source in dictionaries([str(s.experiment.run_dir)]).items()}
    record_dictionaries(s, given)
    opened = _insert(s, lm, given)
    kept = {name: splits for name, splits in prompts.items() if name not in {one.name for one in refused}}
    console.say(f"study: phase 4, graphs of {', '.join(kept)}")
    examined = {name: _graphs(opened, name, splits) for name, splits in kept.items()}
    console.say("study: phase 5, interventions")
    for name, one in examined.items():
        table = Table(s.folder / f"effects.{name}.csv", effects.EFFECT_COLUMNS)
        new = effects.measure_groups(opened.inside, name, one.test, one.groups, table, s.study, s.experiment.seed)
        examined[name] = dataclasses.replace(one, new_controls=new)
        table = Table(s.folder / f"singles.{name}.csv", singles.SINGLE_COLUMNS)
        singles.measure_singles(opened.inside, name, one.train, one.graphs, table, s.study.singles, opened.of_layer)
    console.say("study: phase 6, the page")
    content = write_page(s, lm, opened.saes, opened.of_layer, examined, refused)
    for line in headlines(content):
        console.say(f"study: {line}")
    console.say(f"study: {s.folder / 'study.html'}")
    return code


def _swept(s: Study) -> bool:
    return any(to_json(s.experiment.sweep).values())


def _to_be_trained(s: Study, work: Workspace) -> list[TrainedCoder]:
    """The dictionaries that the training will give, without parameters: graphs are refused before it, not after."""
    works = [work]
    if _swept(s):
        plan = programs(members(s.experiment))
        works = [dataclasses.replace(work, experiment=one.experiment) for group in plan for one in group.members]
    saes = []
    for member in works:
        coder, (reads, writes) = member.build(), member.sites
        params = jax.eval_shape(coder.init, jax.random.key(0))
        ones = (1.0,) * len(reads), (1.0,) * len(writes)
        saes.append(TrainedCoder(coder, params, Sites(reads, writes, *ones, coder.topology.stacked)))
    return saes


def _pairs(s: Study, lm: LanguageModel) -> dict[str, dict[str, list[Pair]]]:
    c, longest = s.study, lm.config.context_length
    return {
        name: drawn(name, lm.tokenizer, c.train_pairs, c.test_pairs, s.experiment.seed, file, longest)
        for name, file in s.behaviours().items()
    }


def _prompts(s: Study, lm: LanguageModel, pairs: Mapping[str, Mapping[str, list[Pair]]]) -> Measured:
    """{behaviour: {split: prompts}}, written as JSONL."""
    begin_record(s, lm, pairs)
    for name, splits in pairs.items():
        for split, split_pairs in splits.items():
            write_bytes(s.folder / "pairs" / f"{name}.{split}.jsonl", as_jsonl(split_pairs).encode())
    console.say(f"study: phase 0, {s.study.train_pairs} + {s.study.test_pairs} pairs of {', '.join(pairs)}")
    return {
        name: {split: as_prompts(split_pairs, lm) for split, split_pairs in splits.items()}
        for name, splits in pairs.items()
    }


def _baseline(s: Study, lm: LanguageModel, prompts: Measured) -> list[Refused]:
    """The behaviours that the model does not have."""
    console.say("study: phase 1, baseline")
    table = Table(s.folder / "baseline.csv", baseline.PAIR_COLUMNS)
    whole = table.keep([s.study.train_pairs + s.study.test_pairs] * len(prompts))
    for name, splits in list(prompts.items())[whole:]:
        baseline.write_pairs(table, name, {split: (p, baseline.measure_pairs(lm, p)) for split, p in splits.items()})
    return baseline.refused(table, list(prompts), s.study.least_accuracy)


def _insert(s: Study, lm: LanguageModel, named: Mapping[str, TrainedCoder]) -> LoadedStudy:
    inside = Interventions(lm, named)
    saes = at_model(lm, list(named.values()))
    by_place = {sae.sites.writes: name for name, sae in inside.dictionaries.items()}
    names = [by_place[sae.sites.writes] for sae in saes]
    of_layer = {
        number: (names[layer.dictionary], layer.group * saes[layer.dictionary].coder.topology.d_sae)
        for number, layer in enumerate(layers_of(lm, saes))
    }
    return LoadedStudy(s, lm, inside, saes, of_layer)


def _graphs(o: LoadedStudy, behaviour: str, splits: Mapping[str, Prompts]) -> Examined:
    """Graphs of the behaviour, what they share (features.<behaviour>.csv), and the groups of it."""
    c, folder = o.s.study, o.s.folder
    made = graphs.make_graphs(
        o.lm, o.saes, behaviour, splits["train"], c.graphs, o.s.attribution, folder / "graphs" / behaviour
    )
    features = graphs.merged(made)
    rows = [(behaviour, f.layer, f.latent, f.share, f.prompts, f.activation) for f in features]
    Table(folder / f"features.{behaviour}.csv", graphs.FEATURE_COLUMNS).replace(rows)
    chosen = graphs.groups(features, c, o.of_layer)
    if not chosen:
        raise DataError(
            f"{behaviour}: no layer has {c.group_size} features that two graphs share; lower study.group_size or raise "
            "study.graphs."
        )
    return Examined(splits["train"], splits["test"], made, features, chosen)
