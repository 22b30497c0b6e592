"""A small trial of an experiment: some activations into a temporary store, and some steps of training on them."""

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from saejax.app.console import keep_quiet
from saejax.app.workspace import Workspace
from saejax.capture import capture
from saejax.core.files import writing
from saejax.fit.coders import Coders
from saejax.fit.learner import Unsaved
from saejax.fit.train import train
from saejax.parallel import Process, local_mesh, this_process
from saejax.store import Batches, StoreLayout, StoreReader, StoreWriter

# A trial trains no longer than this, in seconds, and captures about as much text as takes so many.
_TRAINS, _CAPTURES = 120.0, 8.0
_STEPS, _LOOKS = 1000, 10
_HELDOUT = 4096
# Bytes that the disk is tried with, at most so many rows, in blocks of so many.
_TRIED, _ROWS, _BLOCK = 64_000_000, 131_072, 4096


@contextlib.contextmanager
def temporary(where: str) -> Iterator[str]:
    """A new folder on the disk of `where`, which need not exist yet, or below a URL; it is removed at the end.

    Raises:
        DataError: nothing can be written there.
    """
    if "://" in where:
        path = f"{where.rstrip('/')}/.preflight-{os.getpid()}-{time.time_ns():x}"
        try:
            yield path
        finally:
            ts.KvStore.open(f"{path}/").result().delete_range(ts.KvStore.KeyRange()).result()
        return
    there = existing(where)
    with writing(there):
        folder = tempfile.mkdtemp(prefix=".preflight-", dir=there)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def existing(where: str) -> Path:
    """The folder, or the nearest above it that exists: it is on the same disk."""
    path = Path(os.path.abspath(where))
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


# --- the disk --------------------------------------------------------------------------------------------------


def disk_speed(folder: str, hook_points: Mapping[str, int], layout: StoreLayout) -> tuple[float, float]:
    """(bytes written a second, bytes read a second) of activations, through the store's own writer and reader.

    What was written leaves the page cache before it is read, where the system can do that.

    Raises:
        DataError: the disk is full, or nothing can be written.
    """
    each = 2 * sum(hook_points.values())
    chunk = layout.chunk_rows
    n = max(1, min(_TRIED // each, _ROWS) // chunk) * chunk
    block = min(n, max(chunk, _BLOCK // chunk * chunk))
    layout = dataclasses.replace(layout, shard_rows=min(layout.shard_rows, n))
    rng, path = np.random.default_rng(0), f"{folder}/disk"
    values = {name: rng.standard_normal((block, width), np.float32) for name, width in hook_points.items()}
    tokens = {name: np.zeros(block, np.int32) for name in ("token_id", "document", "position")}
    started = time.perf_counter()
    how = {"identity": {"imported": "preflight"}, "hook_points": dict(hook_points), "n_tokens": n, "layout": layout}
    # `how` holds the writer's own arguments, of several types.
    with StoreWriter.open(path, **how) as writer:  # type: ignore[arg-type]
        for i in range(-(-n // block)):
            writer.append(values, tokens, cursor={"batch": i})
        writer.finish()
    wrote = time.perf_counter() - started
    if "://" not in path:
        forget(Path(path))
    started = time.perf_counter()
    batches, steps = Batches(StoreReader.open(path), block, seed=0), n // block
    with contextlib.closing(batches.iterate(0)) as rows:
        for _ in range(steps):
            next(rows)
    return n * each / wrote, steps * block * each / (time.perf_counter() - started)


def forget(folder: Path) -> None:
    """Let the system forget what it holds of the files in memory: they are read from the disk again."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# --- the training ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trained:
    """Outcome of a short training.

    Attributes:
        steps: done, of `planned`.
        r2: of its last validation; None where nothing was held out.
        rate: activations a second, without compilation.
        state_bytes: parameters and optimizer state.
    """

    steps: int
    planned: int
    r2: float | None
    rate: float
    state_bytes: int


class Interrupted(Exception):
    """A signal came while the trial trained."""


def sampled(work: Workspace, folder: str, rate: float) -> Workspace:
    """The workspace of a small copy of the experiment whose stores are filled, below `folder`.

    What is captured, imported or merged already is used as it is.

    Args:
        rate: tokens a second of the language model.
    """
    e, c = work.experiment, work.experiment.capture
    tokens = min(c.tokens, max(4 * e.train.batch_size, int(rate * _CAPTURES)))
    heldout = min(c.heldout_tokens, _HELDOUT)
    rows = min(c.shard_rows, max(c.chunk_rows, tokens // 2 // c.chunk_rows * c.chunk_rows))
    short = dataclasses.replace(
        c, tokens=tokens, heldout_tokens=heldout, parts=1, into="store", mesh=(), shard_rows=rows
    )
    small = dataclasses.replace(e, stores_dir=folder, store="sample", capture=short)
    process = this_process(e.parallel)
    made = (work.lm, work.source, e.text, short, local_mesh(e.parallel, process))
    for split, n in (("train", tokens), ("heldout", heldout)):
        capture(small.store_dir(split), *made, split=split, n_tokens=n, seed=e.seed, process=process)
    return work.of(small)


class _Enough(Exception):
    """Ends the short training, which has shown enough."""


class _Looks:
    """Takes rows of metrics; ends the training when R2 is above its bar or the time is over."""

    def __init__(self, bar: float) -> None:
        self.bar, self.r2, self.step, self.rate = bar, None, 0, 0.0  # type: float, float | None, int, float
        self.started = time.perf_counter()

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self.step = max(self.step, step)
        self.rate = row.get("train/tokens_per_second", self.rate)
        self.r2 = row.get("val/r2", self.r2)
        reached = step and "val/r2" in row and row["val/r2"] > self.bar
        if reached or time.perf_counter() - self.started > _TRAINS:
            raise _Enough

    def close(self) -> None:
        pass


def short_training(work: Workspace, folder: str) -> Trained:
    """Up to 1,000 steps of the experiment's training, until R2 is above gates.r2; nothing is saved.

    Raises:
        SaejaxError: what the training would refuse.
        Interrupted: a signal stopped it.
    """
    e, t = work.experiment, work.experiment.train
    steps = min(_STEPS, t.steps)
    every = max(1, steps // _LOOKS)
    changed: dict[str, Any] = {"tokens": steps * t.batch_size, "validate_every": every}
    changed |= {"log_every": max(1, every // 5)}  # a validation comes before the row of its own step
    changed |= {"validate_epochs": 0.0, "early_stop_patience": 0, "keep_best": "", "max_rows": 0}
    changed |= {"profile": False, "tensorboard": False, "wandb": False, "monitor": False}
    e = dataclasses.replace(e, runs_dir=folder, name="trial", train=dataclasses.replace(t, **changed))
    looks = _Looks(e.gates.r2)
    unsaved = Unsaved([looks])
    with contextlib.suppress(_Enough):
        outcome = train(Coders.alone(work.of(e)), unsaved, Process(), keep_quiet, shown=False)
        if outcome is not None and outcome.stopped:
            raise Interrupted
    assert unsaved.began is not None
    parameters = sum(leaf.size * 4 for leaf in jax.tree.leaves(unsaved.began.setup.programs[0].abstract.params))
    return Trained(looks.step, steps, looks.r2, looks.rate, 3 * parameters)
