"""Progress of a job's work, as its files say: steps of metrics.jsonl, shards that a store has committed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from saejax.app.experiment import Experiment
from saejax.app.sweep.members import groups, members
from saejax.app.training_folders import as_begun
from saejax.core.errors import SaejaxError
from saejax.jobs.job import Job, Words
from saejax.runs import Run
from saejax.store.files import StoreFiles
from saejax.store.manifest import read_manifest

_NAME_FLAG = "--config.name="


class Progress(NamedTuple):
    """A share from 0 to 1, and seconds left at the last pace; None where no file says."""

    share: float | None = None
    seconds_left: float | None = None


def run_of(e: Experiment, words: Words) -> Path:
    """The folder of the run that a task with these words works on."""
    named = [word.removeprefix(_NAME_FLAG) for word in words if word.startswith(_NAME_FLAG)]
    return e.run_dir.with_name([e.name, *named][-1])


def progress(job: Job, stage: str, task: int, words: Words) -> Progress:
    """Progress of one task of a stage."""
    e = job.experiment
    if stage == "capture":
        return Progress(_captured(e))
    if stage in ("train", "prefix"):
        return _trained(e, run_of(e, words))
    if stage == "sweep":
        programs = groups(members(e))
        first = programs[min(task, len(programs) - 1)].members[0].experiment
        return _trained(first, first.run_dir)
    return Progress()


def _captured(e: Experiment) -> float | None:
    """Of both splits together, by rows; None where the stores' files cannot be read."""
    done, wanted = 0, e.capture.tokens + e.capture.heldout_tokens
    try:
        for split, n in (("train", e.capture.tokens), ("heldout", e.capture.heldout_tokens)):
            files = StoreFiles(e.store_dir(split))
            manifest = read_manifest(files)
            if manifest is None:
                continue
            shards = sum(key.endswith(".json") for key in files.list("commits"))
            done += n if manifest.complete else min(n, shards * manifest.header.layout.shard_rows)
    except SaejaxError:
        return None
    return done / wanted


def _trained(e: Experiment, run: Path) -> Progress:
    try:
        t = as_begun(e).train
        row = Run(run).last_row()
    except (SaejaxError, OSError):
        return Progress()
    done, wanted = row.get("tokens"), t.steps * t.batch_size
    if not isinstance(done, int) or not wanted:
        return Progress(0.0)
    return Progress(min(1.0, done / wanted), seconds_left(wanted, row))


def seconds_left(wanted: int | None, row: Mapping[str, Any]) -> float | None:
    """Seconds for what is left of `wanted` activations at the pace of a row of metrics; None where it is not known."""
    done, rate = row.get("tokens"), row.get("train/tokens_per_second")
    if not (wanted and isinstance(done, int) and isinstance(rate, int | float) and rate > 0):
        return None
    return max(0, wanted - done) / rate
