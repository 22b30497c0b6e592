"""How long a training's steps wait for data, metrics and checkpoints, on this machine.

    python -m benchmarks.waits [--d_in=384 --d_sae=3072 --k=32 --batch=2048 --steps=120 --checkpoint_every=40]

A real training on a store of random sparse features, written first. Shares of the time between the first step and the
last: `data` is waiting for a batch, `put` handing it to the device, `checkpoints` the time that saving holds the loop.
`main thread` is all that the loop does on the host, metrics with it, in seconds of its processor: while the device is
busy with the step before, none of that holds a step, so it is an upper bound.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from saejax.checkpoints import Checkpoints
from saejax.coders import CoderConfig, Sites, build
from saejax.core.host import keep_memory
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import Batches, StoreReader, StoreWriter
from saejax.training import Setup, program_of_one, put_on, run_loop
from saejax.training.config import TrainConfig

_D_IN = flags.DEFINE_integer("d_in", 384, "Width of the activations.")
_D_SAE = flags.DEFINE_integer("d_sae", 3072, "Latents.")
_K = flags.DEFINE_integer("k", 32, "Latents kept for a token.")
_BATCH = flags.DEFINE_integer("batch", 2048, "Tokens in a batch.")
_STEPS = flags.DEFINE_integer("steps", 120, "Steps.")
_EVERY = flags.DEFINE_integer("checkpoint_every", 40, "Steps from one checkpoint to the next.")

ROWS, _ACTIVE = 65_536, 24


class TimedCheckpoints(Checkpoints):
    """Checkpoints that know how long each save held its caller."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.held: list[float] = []

    def save(self, *arguments: Any, **more: Any) -> None:
        started = time.perf_counter()
        super().save(*arguments, **more)
        self.held.append(time.perf_counter() - started)


class TimedBatches(Batches):
    """Batches that know how long they were waited for, from the second on: the first is read before a step can run."""

    waited = 0.0

    def iterate(self, start_step: int = 0) -> Generator[dict[str, np.ndarray]]:
        batches, first = super().iterate(start_step), True
        while True:
            started = time.perf_counter()
            batch = next(batches)
            self.waited += 0.0 if first else time.perf_counter() - started
            first = False
            yield batch


def waits(d_in: int, d_sae: int, k: int, batch: int, steps: int, checkpoint_every: int) -> dict[str, float]:
    """{seconds: of the steps; data, put, checkpoints, main thread: share of them; save: seconds of one save}."""
    folder = Path(tempfile.mkdtemp())
    try:
        write_store(folder / "store", d_in)
        batches = TimedBatches(StoreReader.open(folder / "store"), batch, seed=0)
        checkpoints = TimedCheckpoints(folder / "checkpoints")
        return trained(batches, checkpoints, d_sae, k, steps, checkpoint_every)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def trained(
    batches: TimedBatches, checkpoints: TimedCheckpoints, d_sae: int, k: int, steps: int, every: int
) -> dict[str, float]:
    """A training of a TopK coder on these batches; what `waits` gives."""
    config = TrainConfig(
        batch_size=batches.batch_size, tokens=steps * batches.batch_size, lr=3e-4, checkpoint_every=every
    )
    sites, mesh = Sites(("h",), ("h",), (1.0,), (1.0,)), make_mesh(ParallelConfig((1, 1)))
    coder = build(CoderConfig("topk", d_sae=d_sae, k=k), batches.hook_points["h"], steps)
    program = program_of_one(coder, config, sites, lambda params: params, mesh, seed=0, checkpoints=checkpoints)
    putting, marks = 0.0, []
    put = put_on(mesh, config.batch_size, ("h",))

    def timed_put(rows: Mapping[str, np.ndarray]) -> Any:
        nonlocal putting
        started = time.perf_counter()
        marks.append((started, time.thread_time()))
        arrays = put(rows)
        putting += time.perf_counter() - started
        return arrays

    silent: Callable[[str], None] = lambda line: None  # noqa: E731
    run_loop(config, Setup([program], batches, timed_put, tell=silent, shown=False))
    seconds, thread = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    # The save behind the last step holds no step.
    return {
        "seconds": seconds,
        "data": batches.waited / seconds,
        "put": putting / seconds,
        "checkpoints": sum(checkpoints.held[:-1]) / seconds,
        "main thread": thread / seconds,
        "save": max(checkpoints.held),
    }


def write_store(path: Path, d_in: int) -> None:
    """Rows that are sums of a few of 4,096 random directions."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((4096, d_in)).astype(np.float32) / d_in**0.5
    with StoreWriter.open(path, identity={}, hook_points={"h": d_in}, n_tokens=ROWS) as writer:
        for start in range(0, ROWS, 8192):
            strength = rng.exponential(1.0, (8192, _ACTIVE, 1)).astype(np.float32)
            which = rng.integers(0, len(directions), (8192, _ACTIVE))
            x = sum(strength[:, i] * directions[which[:, i]] for i in range(_ACTIVE))
            ids = np.arange(start, start + 8192)
            writer.append(
                {"h": np.asarray(x)}, dict.fromkeys(("token_id", "document", "position"), ids), cursor={"row": start}
            )
        writer.finish()


def main(_: list[str]) -> None:
    keep_memory()
    found = waits(_D_IN.value, _D_SAE.value, _K.value, _BATCH.value, _STEPS.value, _EVERY.value)
    print(f"{_BATCH.value:,} x {_D_IN.value:,} -> {_D_SAE.value:,}, k {_K.value}, {_STEPS.value} steps")
    print(f"{1000 * found['seconds'] / (_STEPS.value - 1):.1f} ms a step; a save holds up to {found['save']:.3f} s")
    for name in ("data", "put", "checkpoints", "main thread"):
        print(f"{name:<14}{found[name]:7.2%}")


if __name__ == "__main__":
    app.run(main)
