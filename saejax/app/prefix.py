"""`saejax prefix`: a latent prefix is trained for frozen models, compared with other ways, and shown."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from saejax.app.console import say
from saejax.app.experiment import Experiment, read_experiment
from saejax.app.load import restored
from saejax.app.training_folders import RunFolder
from saejax.checkpoints import Checkpoints
from saejax.core.errors import EXIT_PREEMPTED, ConfigError, DataError
from saejax.core.files import write_bytes
from saejax.core.settings import settings_of
from saejax.evals.intervals import resample_interval, weights
from saejax.fit.devices import training_mesh, watches_of
from saejax.fit.learner import Ready, Tell
from saejax.fit.train import train
from saejax.lm import LanguageModel, load_tokenizer
from saejax.lm.pair import load_models
from saejax.parallel import joined, own_rows
from saejax.prefix.encoder import Encoder
from saejax.prefix.evaluation import METRICS, Answered, evaluate_prefix
from saejax.prefix.recall import recall_records
from saejax.prefix.records import Record, fingerprint, read_records
from saejax.prefix.samples import SampleBatches, encoder_vocab, training_arrays
from saejax.prefix.trained import TrainedPrefix
from saejax.prefix.training import PrefixLearner, embedding_rms, prefix_program
from saejax.reports.prefix_page import prefix_tables, render_prefix
from saejax.runs import Run, made
from saejax.runs.provenance import Provenance, verify_provenance
from saejax.training import Setup, TrainConfig, TrainState, put_on

# What of section train is about coders or stored activations alone.
_STORED = {"order", "rows", "epoch", "heldout", "text"}
_OF_CODERS = (
    *("init_from", "accumulate", "resample_every"),
    *(key for key, known in settings_of(TrainConfig).items() if not _STORED.isdisjoint(known.needs)),
)
# Held-out records whose loss is followed during the training.
_FOLLOWED = 256
_EXAMPLES = 20
_SLOW = "Samples come more slowly than a step takes them."


def run_prefix(e: Experiment, redo: bool = False) -> int:
    """Train the prefix of an experiment, or continue it; evaluate it; write prefix.json, prefix.md and report.html.

    Returns:
        0, or EXIT_PREEMPTED where a signal stopped the training (all is saved).

    Raises:
        ConfigError: settings that cannot train a prefix.
        DataError: models or records that cannot be read, a folder that holds another run, or a prefix.json of other
            settings.
    """
    check(e)
    training = PrefixTraining(e)
    with joined(e.parallel) as process:
        outcome = train(training, RunFolder(e, training.made_from), process, say)
    if outcome is not None and outcome.stopped:
        return EXIT_PREEMPTED
    trained, heldout = dataclasses.replace(load_prefix(e.run_dir), config=e.prefix), training.records[1]
    of = {"step": trained.step, "sha256": trained.fingerprint(), "records": len(heldout)}
    of |= {"heldout": fingerprint(heldout), "answer_tokens": e.prefix.answer_tokens}

    def evaluate() -> dict[str, Any]:
        return _content(evaluate_prefix(trained, training.models, heldout, e.seed), heldout)

    content = made(e.run.prefix, of, evaluate, redo, "evaluate", say)
    text = "\n\n".join(table.text for table in prefix_tables(content["models"]))
    write_bytes(e.run.prefix.with_suffix(".md"), (text + "\n").encode())
    write_bytes(e.run.page, _page(e, content).encode())
    say(text)
    say(f"prefix: {e.run.page}")
    return 0


def load_prefix(run: str | Path, step: int | None = None) -> TrainedPrefix:
    """The prefix of a run's checkpoint, by default the newest; no language model is loaded.

    Raises:
        DataError: no such checkpoint, or a run that trained something else.
    """
    e = read_experiment(Run(Path(run)).config)
    at, items, meta = restored(Run(Path(run)), step, ("params", "averaged"))
    if meta.get("kind") != "prefix":
        raise DataError(f"{run} holds a coder and no prefix; saejax.load reads it.")
    tokenizer = load_tokenizer(e.lm.model, e.lm.revision) if e.prefix.encoder == "tokens" else None
    return TrainedPrefix(
        Encoder.from_meta(e.prefix, meta), items["averaged"] or items["params"], e.prefix, tokenizer, at
    )


def check(e: Experiment) -> None:
    """Raise ConfigError for settings with which no prefix can be trained."""
    if not e.prefix.source:
        raise ConfigError(
            "prefix.source is empty, so that the experiment has no prefix: set recall or text, or begin with "
            "--config=latentwire_quickstart."
        )
    if not e.lm.model or e.lm.second:
        raise ConfigError("A prefix is for lm.model and prefix.second; set lm.model, and leave lm.second empty.")
    defaults = TrainConfig()
    for key in _OF_CODERS:
        if getattr(e.train, key) != getattr(defaults, key):
            raise ConfigError(
                f"train.{key} is about coders, and a prefix is none: leave it {getattr(defaults, key)!r}."
            )
    for key in ("lr", "batch_size"):
        if not getattr(e.train, key):
            raise ConfigError(
                f"train.{key} is 0, and nothing finds it for a prefix: set it, as lr=1e-3, batch_size=32."
            )
    if e.train.optimizer == "muon":
        raise ConfigError("train.optimizer=muon knows the matrices of coders alone: set adam, adamw or lion.")
    if e.parallel.mode != "jit" or e.parallel.processes or e.capture.mesh:
        raise ConfigError(
            "A prefix is trained by one process over parallel.mesh: leave parallel.mode jit, and parallel.processes "
            "and capture.mesh empty."
        )


@dataclasses.dataclass(frozen=True)
class PrefixTraining:
    """Models and records of an experiment, loaded when first asked for: a `fit.Learner`."""

    e: Experiment

    @functools.cached_property
    def mesh(self) -> Mesh:
        return training_mesh(self.e)

    @functools.cached_property
    def models(self) -> dict[str, LanguageModel]:
        """{what it is called: the model}, spread over the mesh's axis "latent"."""
        e, models = self.e, {}
        for model, revision in ((e.lm.model, e.lm.revision), (e.prefix.second, e.prefix.second_revision)):
            if not model:
                continue
            lm = load_models(dataclasses.replace(e.lm, model=model, revision=revision, second=""), self.mesh)
            if not isinstance(lm, LanguageModel):
                raise ConfigError(f"{model} runs in PyTorch, and a prefix is trained through models in JAX alone.")
            name = Path(model).name
            models[name if name not in models else f"{name}-2"] = lm
        return models

    @functools.cached_property
    def records(self) -> tuple[list[Record], list[Record]]:
        """(to train on, held out)"""
        e, p = self.e, self.e.prefix
        if p.source == "recall":
            return recall_records("train", p.samples, e.seed), recall_records("heldout", p.heldout, e.seed)
        return read_records(e.text, p, e.seed)

    def made_from(self) -> Provenance:
        lm, *second = (dict(model.identity) for model in self.models.values())
        records, store = self.records[0], f"records of {self.e.prefix.source}"
        nothing: Provenance = {"train": {}, "heldout": {}, "lm": {}, "text": {}}
        # Not the held-out records: more of them may be evaluated later.
        origins = {"train": {"store": store, "rows": len(records), "fingerprint": fingerprint(records)}, "lm": lm}
        return verify_provenance(self.e.run, nothing | origins | {"second": second[0] if second else {}})

    def ready(self, numbers: Mapping[str, Any], checkpoints: Sequence[Checkpoints], tell: Tell) -> Ready:
        e = self.e
        own_rows(self.mesh, e.train.batch_size)  # refuses what the mesh cannot split
        learner, arrays = self.learner(), training_arrays(self.records[0], e.prefix, self.models)
        shapes = {name: ((e.train.batch_size, *a.shape[1:]), a.dtype) for name, a in arrays.items()}
        params = {name: lm.params for name, lm in self.models.items()}
        batches = SampleBatches(arrays, e.train.batch_size, e.seed)
        program = prefix_program(
            learner,
            e.train,
            params,
            self.mesh,
            seed=e.start_seed,
            shapes=shapes,
            checkpoints=checkpoints[0],
            meta=learner.encoder.to_meta(),
            fsdp=e.parallel.fsdp,
        )
        setup = Setup(
            programs=[program],
            batches=batches,
            put=put_on(self.mesh, e.train.batch_size, list(shapes)),
            validate=self._validation(learner, params),
            mesh=self.mesh,
            tell=tell,
            unit="samples",
            rows="numbers in the records",
            figures={f"nll_{name}": ".3f" for name in self.models},
            watches=watches_of(e, list(self.mesh.devices.flat), _SLOW, tell, "train"),
        )
        p, count = e.prefix, sum(x.size for x in jax.tree.leaves(program.abstract.params))
        line = (
            f"train: prefix of {p.latents} x {p.d_latent} latents for {' and '.join(self.models)}, {count:,} "
            f"parameters, {len(self.records[0]):,} records, {e.train.steps:,} steps"
        )
        return Ready(e.train, setup, [line])

    def learner(self) -> PrefixLearner:
        """Encoder and adapters for the models."""
        p, models = self.e.prefix, self.models
        sizes = tuple((name, lm.config.d_model, embedding_rms(lm)) for name, lm in models.items())
        encoder = Encoder(p, encoder_vocab(p, next(iter(models.values())).tokenizer), sizes)
        frozen = {name: (lm.config, lm.tokenizer.bos) for name, lm in models.items()}
        return PrefixLearner(encoder, frozen, p.distill)

    def _validation(self, learner: PrefixLearner, models: Any) -> Any:
        """states -> {the only member: its metrics on held-out records}; None where they fill no batch."""
        size = self.e.train.batch_size
        count = min(len(self.records[1]), _FOLLOWED) // size * size
        if not count:
            return None
        arrays = training_arrays(self.records[1][:count], self.e.prefix, self.models)
        put = put_on(self.mesh, size, list(arrays))
        metrics_of = jax.jit(lambda params, models, batch: learner.loss(params, models, batch)[1])

        def validate(states: Sequence[TrainState]) -> dict[str, dict[str, float]]:
            metrics = []
            for start in range(0, count, size):
                batch = put({name: values[start : start + size] for name, values in arrays.items()})[0]
                metrics.append(jax.device_get(metrics_of(states[0].evaluated(), models, batch)))
            return {"": {key: float(np.mean([one[key] for one in metrics])) for key in metrics[0]}}

        return validate


def _content(answered: dict[str, dict[str, Answered]], records: Sequence[Record]) -> dict[str, Any]:
    """The part of prefix.json about answers."""
    examples = [
        {
            "context": record.context,
            "question": record.question,
            "answers": list(record.answers),
            "said": {name: {way: one.said[i] for way, one in ways.items()} for name, ways in answered.items()},
        }
        for i, record in enumerate(records[:_EXAMPLES])
    ]
    contexts = [record.context for record in records]
    models = {name: prefix_scores(ways, contexts) for name, ways in answered.items()}
    return {"models": models, "examples": examples}


def _page(e: Experiment, content: dict[str, Any]) -> str:
    p, names = e.prefix, list(content["models"])
    lead = (
        f"{content['records']:,} held-out records; {' and '.join(names)} are frozen, and read {p.latents} latents of "
        f"width {p.d_latent} in place of the context, after {content['step']:,} steps of {e.train.batch_size}. Ways: "
        "text (the whole context), truncated (as many tokens of it as the prefix has), none, replay (the context as "
        "embeddings), random (a random prefix), prefix. Brackets hold 95 % intervals over "
        f"{content['models'][names[0]]['contexts']:,} contexts with all their questions."
    )
    examples = [["context", "question", "right", *(f"{name}: {way}" for name in names for way in ("text", "prefix"))]]
    for example in content["examples"]:
        texts = [example["said"][name][way] for name in names for way in ("text", "prefix")]
        context = example["context"].strip()
        context = context if len(context) <= 100 else f"{context[:97].strip()}..."
        examples.append([context, example["question"], example["answers"][0], *texts])
    curves, rows = {}, e.run.rows()
    for name in names:
        if points := [(row["step"], row[key]) for row in rows if row.get(key := f"val/nll_{name}") is not None]:
            curves[f"{name}, held out"] = points
    return render_prefix(f"{e.name}: a latent prefix", lead, content["models"], curves, examples)


def prefix_scores(answered: Mapping[str, Answered], contexts: Sequence[str]) -> dict[str, Any]:
    """{"ways": {way: {metric: value, "intervals": {metric: [low, high]}, "tokens_saved", "ms"}},
    "differences": {way: {metric: {"value": prefix - way, "interval": [low, high]}}},
    "between": {metric: (prefix - truncated) / (text - truncated), or None where the text is no better}}, of one model.

    An interval is the middle 95 % of 1,000 resamples of the contexts (`evals.intervals`), each with all its questions:
    they share one prefix. None of fewer than ten contexts.

    Args:
        contexts: of each record.
    """
    numbers = {context: number for number, context in enumerate(dict.fromkeys(contexts))}
    n, of_N = len(numbers), [numbers[context] for context in contexts]
    drawn_WN = weights(np.arange(n)).astype(np.float64)[:, of_N]
    total_W = np.maximum(drawn_WN.sum(1), 1e-12)

    def resampled(values_N: np.ndarray) -> np.ndarray:
        return drawn_WN @ values_N / total_W

    ways = {}
    for way, answers in answered.items():
        values: dict[str, Any] = {metric: float(answers.columns[metric].mean()) for metric in METRICS}
        values["intervals"] = {metric: resample_interval(resampled(answers.columns[metric]), n) for metric in METRICS}
        ways[way] = values | {"tokens_saved": answers.saved, "ms": answers.ms}
    differences: dict[str, Any] = {}
    for way, answers in answered.items():
        if way != "prefix":
            apart = {metric: answered["prefix"].columns[metric] - answers.columns[metric] for metric in METRICS}
            differences[way] = {
                metric: {"value": float(a.mean()), "interval": resample_interval(resampled(a), n)}
                for metric, a in apart.items()
            }
    between = {}
    for metric in METRICS:
        low, high, of_prefix = (ways[way][metric] for way in ("truncated", "text", "prefix"))
        better = high < low if metric == "nll" else high > low
        between[metric] = (of_prefix - low) / (high - low) if better else None
    return {"records": len(of_N), "contexts": n, "ways": ways, "differences": differences, "between": between}
