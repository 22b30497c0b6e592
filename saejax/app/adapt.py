"""`saejax adapt`: the language model adapted to a finished dictionary by LoRA, in a folder that PEFT reads."""

import contextlib
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from saejax.app import console
from saejax.app.stages.evaluate import finished_run
from saejax.app.workspace import Workspace
from saejax.capture import Journal, store_identity
from saejax.core.errors import ConfigError
from saejax.core.files import read_json, write_json
from saejax.core.lease import lease
from saejax.core.progress import Progress
from saejax.evals.evaluate import evaluate
from saejax.lm import LanguageModel
from saejax.lm.adapter import Adapter
from saejax.parallel import refuse_many
from saejax.runs.made import digest
from saejax.runs.provenance import record_provenance
from saejax.through import TextBatches
from saejax.through.adapt import Adaptation, Trainer, restore, save

RECORD, STATE, BLOCKS = "adapter.json", "state.safetensors", "blocks.jsonl"
_SAVE_EVERY = 20


def run_adapt(work: Workspace, how: Adaptation, folder: Path | None = None) -> dict[str, Any]:
    """Train the changes, write them, and measure them on held-out text; what is done already is not done again.

    Args:
        folder: default adapter/ in the run.

    Returns:
        The content of adapter.json: "made_of", "tokens", and the figures "ce_clean", "ce_sae", "kl" of the model as it
        was, "ce_clean_adapted", "ce_sae_adapted", and "closed", the share of the excess of ce_sae that is gone.

    Raises:
        ConfigError: settings or a dictionary that no adapter can be trained for.
        DataError: a run that is not finished, or damaged files.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax adapt")
    if e.lm.adapter:
        raise ConfigError("lm.adapter is set: adapt the model as it was, and name the adapter that comes out later.")
    sae = finished_run(e)
    lm = work.lm
    if not isinstance(lm, LanguageModel):
        raise ConfigError("saejax adapt differentiates one model in JAX; set lm.backend=jax, and no lm.second.")
    trainer = Trainer(lm, sae.at(lm), how, e.capture.sinks)
    folder = folder or e.run.path / "adapter"
    made_of: dict[str, Any] = {"sae": sae.fingerprint(), "lm": lm.identity, "text": dataclasses.asdict(e.text)}
    made_of |= {"how": dataclasses.asdict(how), "eval_tokens": e.eval.tokens}
    made_of = json.loads(json.dumps(made_of))
    if (folder / RECORD).is_file() and (done := read_json(folder / RECORD)).get("made_of") == made_of:
        console.say(f"adapt: {folder} is done already")
        return dict(done)
    made_from = work.verify_text_and_model()
    folder.mkdir(parents=True, exist_ok=True)
    with lease(folder):
        tokens = _changes(work, trainer, folder, digest(json.dumps(made_of, sort_keys=True)))
        record = {"made_of": made_of, "tokens": tokens} | _before_and_after(work, trainer, folder)
        write_json(folder / RECORD, record)
        record_provenance(e.run, made_from, console.say)
        for name in (STATE, BLOCKS):
            (folder / name).unlink(missing_ok=True)
    return record


def _changes(work: Workspace, trainer: Trainer, folder: Path, of: str) -> int:
    """Train from where it was, and write the adapter; returns the tokens of text that were read."""
    how, e = trainer.how, work.experiment
    state = restore(trainer.start(), folder / STATE, of) or trainer.start()
    begun = int(state["step"])
    identity = json.loads(json.dumps(store_identity(trainer.lm, work.source, e.text, "train", e.capture)))
    identity |= {"rows": how.rows, "seed": how.seed}
    text = TextBatches(work.packer, how.rows, how.seed, Journal(folder / BLOCKS, identity))
    step, per_step = trainer.step(), how.rows * e.text.context_length
    if begun:
        console.say(f"adapt: goes on at step {begun:,} of {how.steps:,}")
    with Progress("adapt", how.steps * per_step) as progress, contextlib.closing(text.iterate(begun)) as batches:
        progress.advance(begun * per_step)
        for rows in itertools.islice(batches, how.steps - begun):
            state, value = step(state, {name: jnp.asarray(array) for name, array in rows.items()})
            number = int(state["step"])
            progress.advance(per_step, **{how.kind: f"{float(value):.4f}"})
            if number % _SAVE_EVERY == 0 or number == how.steps:
                save(state, folder / STATE, of)
    trainer.adapter(state).write(folder, str(trainer.lm.identity["model"]))
    return how.steps * per_step


def _before_and_after(work: Workspace, trainer: Trainer, folder: Path) -> dict[str, float]:
    """On held-out text, with and without the dictionary, before and after."""
    e = work.experiment
    models = trainer.lm, trainer.adapted(Adapter.read(folder))
    before, after = (evaluate(trainer.sae, model, work.packer, e.eval, e.capture.sinks).metrics for model in models)
    excess = before["ce_sae"] - before["ce_clean"]
    return {
        **{name: float(before[name]) for name in ("ce_clean", "ce_sae", "kl", "fve")},
        "ce_clean_adapted": float(after["ce_clean"]),
        "ce_sae_adapted": float(after["ce_sae"]),
        "closed": float((before["ce_sae"] - after["ce_sae"]) / excess) if excess else 0.0,
    }
