"""`saejax study`: from behaviours to the features that cause them. Every phase goes on where it was.

0  pairs of prompts                 study.json, pairs/<behaviour>.<split>.jsonl
1  does the model do it             baseline.csv
2  capture, 3  dictionaries         the experiment's own pipeline or sweep, where none are given
4  graphs, merged                   graphs/<behaviour>/, features.<behaviour>.csv
5  interventions                    effects.<behaviour>.csv, singles.<behaviour>.csv
6  the page                         study.html, summary.json
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections.config_dict import ConfigDict

from saejax.app import console
from saejax.app.dictionaries import dictionaries
from saejax.app.experiment import Experiment, experiment
from saejax.app.load import load
from saejax.app.stages import run_pipeline
from saejax.app.sweep.members import groups as programs
from saejax.app.sweep.members import members
from saejax.app.sweep.run import run_sweep
from saejax.app.workspace import Workspace
from saejax.attribution.layers import at_model, layers_of
from saejax.coders import Sites
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError
from saejax.core.files import read_object, write_bytes
from saejax.core.notebook import html_frame
from saejax.interventions import Interventions
from saejax.lm import LanguageModel
from saejax.studies import baseline, effects, graphs, singles
from saejax.studies.baseline import Prompts, as_prompts
from saejax.studies.behaviours import Pair, as_jsonl, drawn, pair_files
from saejax.studies.pages import Examined, LoadedStudy, headlines, write_page
from saejax.studies.record import begin_record, folder_of, record_dictionaries
from saejax.studies.table import Table
from saejax.trained import TrainedCoder


@dataclasses.dataclass(frozen=True, repr=False)
class Studied:
    """A study that was made; a notebook shows its page.

    Attributes:
        page: study.html; beside it lie the tables as CSV files, and graphs/.
        summary: the figures on the page: "behaviours", each with baseline, graphs, features and groups, and "refused".
    """

    page: Path
    summary: Mapping[str, Any]

    def __repr__(self) -> str:
        return "\n".join(headlines(self.summary))

    def _repr_html_(self) -> str:
        return html_frame(self.page)


def study(config: ConfigDict | str | Experiment) -> Studied:
    """From behaviours of a language model to the features that cause them: study("study_quickstart")

    It is what `saejax study` does, in the folder of the experiment's run; the same call continues where it was.

    Args:
        config: settings with a section `study`, or what --config takes.

    Raises:
        ConfigError: a model that JAX does not run, or dictionaries that do not go together.
        DataError: the folder holds another study, or no dictionary could be trained.
        KeyboardInterrupt: a signal stopped the training; the same call continues.
    """
    e = experiment(config)
    code = run_study(e)
    if code == EXIT_PREEMPTED:
        raise KeyboardInterrupt("stopped; the same call continues where it was")
    if _without_dictionaries(e, code):
        raise DataError(f"{e.run_dir}: dictionaries of the study could not be trained; what is above says why.")
    folder = folder_of(e)
    return Studied(folder / "study.html", read_object(folder / "summary.json"))


Measured = dict[str, dict[str, Prompts]]  # behaviour -> split


def run_study(e: Experiment) -> int:
    """All phases, into the folder of the experiment's run. Returns the exit code: of a training that a signal stopped
    or that trained nothing; 1 where a gate failed, else 0.
    """
    c, folder = e.study, folder_of(e)
    files, work = pair_files(c.behaviours), Workspace(e)
    if not isinstance(lm := work.lm, LanguageModel):
        raise ConfigError("A study needs one model that JAX runs: lm.backend=jax, and no lm.second.")
    how = lm.tokenizer, c.train_pairs, c.test_pairs, e.seed
    pairs = {name: drawn(name, *how, file, lm.config.context_length) for name, file in files.items()}
    sources = dictionaries(list(c.dictionaries)) if c.dictionaries else {}
    named = {name: load(source) for name, source in sources.items()}
    layers_of(lm, at_model(lm, list(named.values()) or _to_be_trained(work)))
    prompts = _prompts(e, lm, pairs)
    refused = _baseline(e, lm, prompts)
    code = 0
    if not named:
        console.say("study: phases 2 and 3, capture and dictionaries")
        code = (run_sweep if e.swept else run_pipeline)(work)
        if _without_dictionaries(e, code):
            return code
        named = {name: load(source) for name, source in dictionaries([str(e.run_dir)]).items()}
    record_dictionaries(e, named)
    loaded = _insert(e, lm, named)
    for name in refused:
        del prompts[name]
    console.say(f"study: phase 4, graphs of {', '.join(prompts)}")
    examined = {name: _graphs(loaded, name, splits) for name, splits in prompts.items()}
    console.say("study: phase 5, interventions")
    for name, one in examined.items():
        table = Table(folder / f"effects.{name}.csv", effects.EFFECT_COLUMNS)
        new = effects.measure_groups(loaded.inside, name, one.test, one.groups, table, c, e.seed)
        examined[name] = dataclasses.replace(one, new_controls=new)
        table = Table(folder / f"singles.{name}.csv", singles.SINGLE_COLUMNS)
        singles.measure_singles(loaded.inside, name, one.train, one.graphs, table, c.singles, loaded.of_layer)
    console.say("study: phase 6, the page")
    for line in headlines(write_page(loaded, examined, refused)):
        console.say(f"study: {line}")
    console.say(f"study: {folder / 'study.html'}")
    return code


def _without_dictionaries(e: Experiment, code: int) -> bool:
    """A signal came, or no member trained; failed gates of a run stop nothing."""
    return code > 1 or (bool(code) and e.swept)


def _to_be_trained(work: Workspace) -> list[TrainedCoder]:
    """The dictionaries that the training will give, without parameters: graphs are refused before it, not after."""
    works = [work]
    if work.experiment.swept:
        plan = programs(members(work.experiment))
        works = [work.of(one.experiment) for group in plan for one in group.members]
    saes = []
    for member in works:
        coder, (reads, writes) = member.build(), member.sites
        params = jax.eval_shape(coder.init, jax.random.key(0))
        ones = (1.0,) * len(reads), (1.0,) * len(writes)
        saes.append(TrainedCoder(coder, params, Sites(reads, writes, *ones, coder.topology.stacked)))
    return saes


def _prompts(e: Experiment, lm: LanguageModel, pairs: Mapping[str, Mapping[str, list[Pair]]]) -> Measured:
    """{behaviour: {split: prompts}}, written as JSONL."""
    begin_record(e, lm, pairs)
    for name, splits in pairs.items():
        for split, split_pairs in splits.items():
            write_bytes(folder_of(e) / "pairs" / f"{name}.{split}.jsonl", as_jsonl(split_pairs).encode())
    console.say(f"study: phase 0, {e.study.train_pairs} + {e.study.test_pairs} pairs of {', '.join(pairs)}")
    return {
        name: {split: as_prompts(split_pairs, lm) for split, split_pairs in splits.items()}
        for name, splits in pairs.items()
    }


def _baseline(e: Experiment, lm: LanguageModel, prompts: Measured) -> list[str]:
    """The behaviours that the model does not have."""
    console.say("study: phase 1, baseline")
    table = Table(folder_of(e) / "baseline.csv", baseline.PAIR_COLUMNS)
    whole = table.keep([e.study.train_pairs + e.study.test_pairs] * len(prompts))
    for name, splits in list(prompts.items())[whole:]:
        baseline.write_pairs(table, name, {split: (p, baseline.measure_pairs(lm, p)) for split, p in splits.items()})
    return list(baseline.refused(table, list(prompts), e.study.least_accuracy))


def _insert(e: Experiment, lm: LanguageModel, named: Mapping[str, TrainedCoder]) -> LoadedStudy:
    inside = Interventions(lm, named)
    saes = at_model(lm, list(named.values()))
    by_place = {sae.sites.writes: name for name, sae in inside.dictionaries.items()}
    of_layer = {}
    for number, layer in enumerate(layers_of(lm, saes)):
        sae = saes[layer.dictionary]
        of_layer[number] = by_place[sae.sites.writes], layer.group * sae.coder.topology.d_sae
    return LoadedStudy(e, lm, inside, saes, of_layer)


def _graphs(loaded: LoadedStudy, behaviour: str, splits: Mapping[str, Prompts]) -> Examined:
    """Graphs of the behaviour, what they share (features.<behaviour>.csv), and the groups of it."""
    e, c, folder = loaded.e, loaded.e.study, folder_of(loaded.e)
    how = splits["train"], c.graphs, e.attribution, folder / "graphs" / behaviour
    made = graphs.make_graphs(loaded.lm, loaded.saes, behaviour, *how)
    features = graphs.merged(made)
    rows = [(behaviour, *dataclasses.astuple(feature)) for feature in features]
    Table(folder / f"features.{behaviour}.csv", graphs.FEATURE_COLUMNS).replace(rows)
    chosen = graphs.groups(features, c, loaded.of_layer)
    if not chosen:
        raise DataError(
            f"{behaviour}: no layer has {c.group_size} features that two graphs share; lower study.group_size or raise "
            "study.graphs."
        )
    return Examined(splits["train"], splits["test"], made, features, chosen)
