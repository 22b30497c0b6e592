"""Trainings of 30 steps on planted activations, and comparisons of what they saved."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.checkpoints import Checkpoints
from saejax.coders import CoderConfig, Sites, build
from saejax.core.metrics import JsonlWriter
from saejax.parallel import ParallelConfig, make_mesh
from saejax.store import Batches, StoreReader
from saejax.training import Outcome, TrainConfig
from saejax.training.watch import Watch
from tiny import D_IN, train_alone

Validate = Callable[[Any, Any], dict[str, float]]
CODERS = {
    "topk": CoderConfig(preset="topk", d_sae=64, k=4, dead_after_tokens=500, matmul_dtype="float32"),
    "standard": CoderConfig(preset="standard", d_sae=64, l1_coefficient=0.3, matmul_dtype="float32"),
}
CONFIG = TrainConfig(
    tokens=30 * 128, batch_size=128, lr=3e-3, checkpoint_every=7, validate_every=10, log_every=1, block_chunks=4
)


def run(
    store: Path,
    folder: Path,
    preset: str = "topk",
    config: TrainConfig = CONFIG,
    mesh: tuple[int, int] = (1, 1),
    stop_at: int | None = None,
    stop_by: signal.Signals = signal.SIGTERM,
    poison: int | None = None,
    validate: Validate = lambda params, stats: {"norm": float(np.linalg.norm(params["W_enc"]))},
    watches: Sequence[Watch] = (),
    mode: str = "jit",
) -> Outcome:
    """A session of training in `folder`; a signal arrives while batch `stop_at` is read; batch `poison` is NaN."""
    reader = StoreReader.open(store)
    batches = Batches(reader, config.batch_size, seed=1, block_chunks=config.block_chunks)

    def stream(start: int) -> Any:
        for i, batch in enumerate(batches.iterate(start), start):
            if i == stop_at:
                os.kill(os.getpid(), stop_by)
            yield {"h": np.full_like(batch["h"], np.nan)} if i == poison else batch

    folder.mkdir(parents=True, exist_ok=True)
    writer = JsonlWriter(folder / "metrics.jsonl")
    try:
        with Checkpoints(folder / "checkpoints", keep_last=50) as checkpoints:
            return train_alone(
                config,
                coder=build(CODERS[preset], D_IN, config.steps),
                mesh=make_mesh(ParallelConfig(mesh)),
                batches=stream,
                sites=Sites(("h",), ("h",), (0.7,), (0.7,)),
                prepare=lambda params: params | {"b_dec": jnp.asarray(reader.statistics["h"].mean * 0.7, jnp.float32)},
                epoch_rows=reader.n_tokens,
                seed=3,
                validate=validate,
                writers=[writer],
                checkpoints=checkpoints,
                meta={"scale": 0.7},
                watches=watches,
                mode=mode,
            )
    finally:
        writer.close()


def final(folder: Path, step: int = CONFIG.steps) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by name."""
    with Checkpoints(folder / "checkpoints") as checkpoints:
        items, _ = checkpoints.restore_numpy(step, names=("params", "averaged", "opt_state", "stats", "step"))
    leaves = jax.tree_util.tree_flatten_with_path(items)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            scale = max(np.abs(a[name]).max(), 1e-6)
            assert np.abs(a[name] - b[name]).max() <= tolerance * scale, name
        else:
            assert a[name].tobytes() == b[name].tobytes(), name
