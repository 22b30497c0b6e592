"""The stage before training: text -> stores/<store>/{train, heldout}."""

from collections.abc import Mapping

from saejax.app import console
from saejax.app.extras import refuse_missing
from saejax.app.workspace import Workspace
from saejax.capture import capture
from saejax.core.errors import DataError
from saejax.lm import EMBEDDED
from saejax.parallel import local_mesh, this_process
from saejax.store.files import StoreFiles
from saejax.store.manifest import Manifest, read_manifest
from saejax.store.norms import sink_lines
from saejax.text import SPLITS
from saejax.text.agreement import disagreement


def run_capture(work: Workspace) -> None:
    """Capture the training and the held-out activations; of several processes, this one's share of them."""
    e = work.experiment
    refuse_missing(e, "text", "lm")
    process = this_process(e.parallel)
    mesh = local_mesh(e.parallel, process)
    made = {split: read_manifest(StoreFiles(e.store_dir(split))) for split in SPLITS}
    _refuse_text(work, made)
    complete = all(there and there.complete for there in made.values())
    named = e.lm.model not in ("", *EMBEDDED)
    # transformers may read the text as other tokens.
    if process.rank == 0 and not complete and named and (note := disagreement(work.lm.tokenizer)):
        console.say(f"capture: warning: {note}.")
    for split, n_tokens in (("train", e.capture.tokens), ("heldout", e.capture.heldout_tokens)):
        path = e.store_dir(split)
        if reason := _not_captured(work, split):
            console.say(f"capture {split}: {reason}")
            continue
        done = capture(
            path,
            work.lm,
            work.source,
            e.text,
            e.capture,
            mesh,
            split=split,
            n_tokens=n_tokens,
            seed=e.seed,
            process=process,
        )
        if process.rank == 0 and not done.already_complete:
            pace: dict[str, float] = {}
            if done.forward_rate is not None and done.overhead is not None:  # of a session that was long enough
                pace = {
                    "read_tokens_per_second": done.read / done.seconds,
                    "forward_tokens_per_second": done.forward_rate,
                    "overhead": done.overhead,
                }
            e.run.record_stage(f"capture {split}", done.tokens, done.seconds, **pace)
        console.captured(split, path, done, n_tokens, e.capture.parts)
        if not done.already_complete and not done.missing:
            for line in sink_lines(path):
                console.say(line)


def _refuse_text(work: Workspace, made: Mapping[str, Manifest | None]) -> None:
    """Raise DataError if a split of the text has no token to store: before hours go into the other one."""
    e = work.experiment
    for split, way in (("train", "Lower"), ("heldout", "Raise")):
        there = made[split]
        if not e.lm.model or work.origin(split):
            continue
        if (there and there.complete) or any(packed.keep.any() for packed in work.packer.batches(split, 1)):
            continue
        again = [f"the {other} store then has to be captured again" for other in SPLITS if made[other]]
        raise DataError(
            f"At text.heldout_fraction={e.text.heldout_fraction} the {split} split of the text has not one token to "
            f"store. {way} it" + "".join(f" ({note})" for note in again) + ", or give more documents."
        )


def _not_captured(work: Workspace, split: str) -> str:
    """Why there is nothing to capture for a split; empty where there is."""
    e = work.experiment
    if split == "train" and e.capture.into == "training":
        return "the activations go straight into training"
    if origin := work.origin(split):
        made = "imported" if "imported" in origin.identity else "merged"
        return f"{e.store_dir(split)} is {made} and taken as it is"
    if not e.lm.model:
        return "lm.model is empty; there is nothing to capture from"
    return ""
