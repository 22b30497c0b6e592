"""saejax around the step, as a worker (see protocol.py): its capture, its store, its checkpoints, its door."""

import itertools
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.bench.ours import Training
from benchmarks.bench.protocol import serve, timed_steps
from saejax import train
from saejax.capture import CaptureConfig, capture
from saejax.capture.ahead import tokens_read
from saejax.checkpoints import Checkpoints
from saejax.coders import CoderConfig, build
from saejax.core.host import keep_memory
from saejax.lm import load_lm
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import ArrayRows
from saejax.text import Packer, TextConfig, open_source
from saejax.trained import make_sites
from saejax.training import TrainConfig
from saejax.training.program import program_of_one


class Capturing:
    """The forward pass to a hook point, and the capture of it."""

    def __init__(self, model: str, hook: str, rows: int, context: int, batches: int, given: str):
        """Writes what others need to the file `given`: the batches' tokens [batches, rows, context], and of the first
        the activations [rows context, d], with a mask of each row's first document, where they must agree.
        """
        self.text = TextConfig(context_length=context)
        self.config = CaptureConfig((hook,), batch_rows=rows)
        self.lm, self.source, self.mesh = load_lm(model), open_source(self.text), make_mesh(ParallelConfig((1, 1)))
        packer = Packer.of(self.source, self.lm.tokenizer, self.text)
        self.batches = list(itertools.islice(packer.batches("train", rows), batches))
        self.read = sum(map(tokens_read, self.batches))
        point = self.lm.hook_point(hook)
        self.forward = self.lm.make_forward([point], (rows, context), self.mesh)
        tokens = np.stack([np.asarray(batch.tokens, np.int64) for batch in self.batches])
        expected = np.asarray(self.forward(self.batches[0])[0][point], np.float32)
        segments = np.asarray(self.batches[0].segments)
        np.savez(given, tokens=tokens, expected=expected, first=(segments == segments[:, :1]).ravel())

    def alone(self) -> dict[str, float]:
        started = time.perf_counter()
        for batch in self.batches:
            jax.block_until_ready(self.forward(batch))
        return {"tokens_per_second": self.read / (time.perf_counter() - started)}

    def capture(self, folder: str) -> dict[str, Any]:
        """As many tokens again, into a store, by its own clock, without compiling and the pass that it times first."""
        path = Path(folder)
        done = capture(
            path, self.lm, self.source, self.text, self.config, self.mesh, split="train", n_tokens=self.read, seed=0
        )
        shutil.rmtree(path)
        return {"tokens_per_second": done.read / done.seconds}


class Checkpointing:
    """The state of a training, and its checkpoints."""

    def __init__(self, d_in: int, d_sae: int, k: int, folder: str):
        config = CoderConfig(preset="topk", d_sae=d_sae, k=k)
        train = TrainConfig(tokens=2048 * 100, batch_size=2048, lr=3e-4)
        coder = build(config, d_in, train.steps)
        rows = ArrayRows({"x": np.random.default_rng(0).standard_normal((64, d_in), np.float32)})
        sites = make_sites(config, coder.topology, ("x",), ("x",), rows.statistics)
        mesh = make_mesh(ParallelConfig((1, 1)))
        program = program_of_one(coder, train, sites, lambda params: params, mesh, seed=0)
        self.abstract = program.abstract.to_items()
        # Moments begin as zeros, which compress to nothing.
        self.items = jax.tree.map(_noise, program.start().to_items())
        self.folder, self.step = Path(folder), 0
        self.checkpoints = Checkpoints(self.folder, keep_last=1)

    def save(self) -> dict[str, float]:
        self.step += 1
        started = time.perf_counter()
        self.checkpoints.save(self.step, self.items, {})
        held = time.perf_counter() - started
        self.checkpoints.wait()
        return {"held": held, "seconds": time.perf_counter() - started}

    def restore(self) -> dict[str, float]:
        started = time.perf_counter()
        jax.block_until_ready(self.checkpoints.restore(self.step, self.abstract)[0])
        return {"seconds": time.perf_counter() - started}


def _noise(leaf: jax.Array) -> jax.Array:
    if leaf.dtype != np.float32 or not leaf.ndim:
        return leaf
    return jax.device_put(np.random.default_rng(1).standard_normal(leaf.shape, np.float32), leaf.sharding)


class Door:
    """The step alone, and `saejax.train`, on the same activations with the same settings."""

    def __init__(self, row: dict[str, Any], data: str, lr: float, steps: int):
        self.row, self.lr = row, lr
        self.alone = Training(row, data, lr, steps)
        self.x = np.ascontiguousarray(self.alone.source.rows[:, 0])
        self.step_alone(1)
        self.train(1)

    def step_alone(self, steps: int) -> float:
        """Median seconds of a step."""
        t = self.alone
        return statistics.median(timed_steps(steps, t.before, t.step, t.wait, each=jax.default_backend() == "cpu"))

    def train(self, steps: int) -> float:
        """Seconds of a whole training."""
        row, started = self.row, time.perf_counter()
        train(
            self.x,
            row["preset"],
            d_sae=row["d_sae"],
            k=row["k"],
            lr=self.lr,
            schedule="constant",
            batch_size=row["batch"],
            tokens=steps * row["batch"],
            progress=False,
        )
        return time.perf_counter() - started


_there: dict[str, Any] = {}


def prepare_capture(**told: Any) -> dict[str, Any]:
    _there["capture"] = Capturing(**told)
    return {"read": _there["capture"].read}


def forward() -> dict[str, Any]:
    return _there["capture"].alone()


def take_capture(folder: str) -> dict[str, Any]:
    return _there["capture"].capture(folder)


def prepare_checkpoint(**told: Any) -> dict[str, Any]:
    there = _there["checkpoint"] = Checkpointing(**told)
    shapes = [leaf.shape for leaf in jax.tree.leaves(there.items) if leaf.dtype == np.float32]
    return {"shapes": shapes, "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(there.items))}


def save() -> dict[str, Any]:
    return _there["checkpoint"].save()


def restore() -> dict[str, Any]:
    return _there["checkpoint"].restore()


def prepare_door(**told: Any) -> dict[str, Any]:
    _there["door"] = Door(**told)
    return {}


def step_alone(steps: int) -> dict[str, Any]:
    return {"seconds": _there["door"].step_alone(steps)}


def train_at_door(steps: int) -> dict[str, Any]:
    return {"seconds": _there["door"].train(steps)}


def store(**told: Any) -> dict[str, Any]:
    from benchmarks.store import rates  # here: both define flags of absl, of which each process has one set

    return {"rates": rates(**told)}


def waits(**told: Any) -> dict[str, Any]:
    from benchmarks.waits import waits as found

    return found(**told)


if __name__ == "__main__":
    keep_memory()  # as every command does, before JAX starts its threads
    serve(
        {
            "prepare_capture": prepare_capture,
            "forward": forward,
            "capture": take_capture,
            "prepare_checkpoint": prepare_checkpoint,
            "save": save,
            "restore": restore,
            "prepare_door": prepare_door,
            "step_alone": step_alone,
            "train": train_at_door,
            "store": store,
            "waits": waits,
        }
    )
