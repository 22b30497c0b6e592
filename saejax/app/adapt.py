"""`saejax adapt`: the language model adapted to a finished dictionary by LoRA, in a folder that PEFT reads."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from saejax.app import console
from saejax.app.stages.evaluate import finished_run
from saejax.app.workspace import Workspace
from saejax.capture import Journal, store_identity
from saejax.core.errors import ConfigError, DataError
from saejax.core.lease import lease
from saejax.core.progress import Progress
from saejax.evals.evaluate import evaluate
from saejax.lm import LanguageModel
from saejax.lm.adapter import Adapter
from saejax.parallel import refuse_many
from saejax.runs.made import digest, made
from saejax.runs.provenance import record_provenance
from saejax.through import TextBatches
from saejax.through.adapt import Adaptation, Trainer, restore, save
from saejax.trained import TrainedCoder

RECORD, STATE, BLOCKS, DICTIONARY = "adapter.json", "state.safetensors", "blocks.jsonl", "dictionary"
_SAVE_EVERY = 20


def run_adapt(work: Workspace, how: Adaptation, folder: Path | None = None, redo: bool = False) -> dict[str, Any]:
    """Train the changes, write them, and measure them on held-out text; what is done already is not done again.

    Args:
        folder: default adapter/ in the run.
        redo: make it anew, also where the folder has an adapter of other settings.

    Returns:
        The content of adapter.json: what it was made of, "tokens", "adapter_sha256", and the figures "ce_clean",
        "ce_sae", "kl" and "fve" of the model as it was, "ce_clean_adapted", "ce_sae_adapted", and "closed", the share
        of the excess of ce_sae that is gone. Of a dictionary that learned too also "fve_adapted", and its fingerprint,
        "dictionary_sha256": it lies in dictionary/.

    Raises:
        ConfigError: settings or a dictionary that no adapter can be trained for.
        DataError: a run that is not finished, an adapter of other settings or one that was changed, or damaged files.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax adapt")
    if e.lm.adapter:
        raise ConfigError("lm.adapter is set: adapt the model as it was, and name the adapter that comes out later.")
    sae, lm = finished_run(e), work.lm
    if not isinstance(lm, LanguageModel):
        raise ConfigError("saejax adapt differentiates one model in JAX; set lm.backend=jax, and no lm.second.")
    trainer = Trainer(lm, sae.at(lm), how, e.capture.sinks)
    folder = folder or e.run.path / "adapter"
    parts: dict[str, Any] = {"sae": sae.fingerprint(), "lm": lm.identity, "text": dataclasses.asdict(e.text)}
    parts |= {"settings": dataclasses.asdict(how), "eval": dataclasses.asdict(e.eval)}
    of = json.loads(json.dumps(parts))

    def make() -> dict[str, Any]:
        made_from = work.verify_text_and_model()
        folder.mkdir(parents=True, exist_ok=True)
        with lease(folder):
            found = _changes(work, trainer, folder, digest(json.dumps(of, sort_keys=True)))
            found |= _before_and_after(work, trainer, folder)
            record_provenance(e.run, made_from, console.say)
            for name in (STATE, BLOCKS):
                (folder / name).unlink(missing_ok=True)
        return found

    record = made(folder / RECORD, of, make, redo, "adapt", console.say)
    same = Adapter.read(folder).sha256 == record["adapter_sha256"]
    if how.dictionary_lr:
        same &= TrainedCoder.from_folder(folder / DICTIONARY).fingerprint() == record["dictionary_sha256"]
    if not same:
        raise DataError(f"What is in {folder} is not what {RECORD} is about. Make it anew with --redo.")
    return record


def _changes(work: Workspace, trainer: Trainer, folder: Path, of: str) -> dict[str, Any]:
    """Train from where it was, and write the adapter; returns the tokens of text that were read, and its hash."""
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
    adapter = trainer.adapter(state)
    adapter.write(folder, str(trainer.lm.identity["model"]))
    made = {"tokens": how.steps * per_step, "adapter_sha256": adapter.sha256}
    if not how.dictionary_lr:
        shutil.rmtree(folder / DICTIONARY, ignore_errors=True)  # of settings before --redo
        return made
    learned = trainer.dictionary(state)
    learned.save(folder / DICTIONARY)
    return made | {"dictionary_sha256": learned.fingerprint()}


def _before_and_after(work: Workspace, trainer: Trainer, folder: Path) -> dict[str, float]:
    """On held-out text, with and without the dictionary, before and after."""
    e = work.experiment
    learned = TrainedCoder.from_folder(folder / DICTIONARY) if trainer.how.dictionary_lr else trainer.sae
    pairs = (trainer.sae, trainer.lm), (learned, trainer.adapted(Adapter.read(folder)))
    before, after = (evaluate(sae, model, work.packer, e.eval, e.capture.sinks).metrics for sae, model in pairs)
    excess = before["ce_sae"] - before["ce_clean"]
    return {
        **{name: float(before[name]) for name in ("ce_clean", "ce_sae", "kl", "fve")},
        "ce_clean_adapted": float(after["ce_clean"]),
        "ce_sae_adapted": float(after["ce_sae"]),
        **({"fve_adapted": float(after["fve"])} if trainer.how.dictionary_lr else {}),
        "closed": float((before["ce_sae"] - after["ce_sae"]) / excess) if excess else 0.0,
    }
