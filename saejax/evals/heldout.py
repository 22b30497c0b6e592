"""Validation during training: reconstruction on stored held-out activations, of the coder for after training."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from saejax.coders import Coder, Sites
from saejax.evals.reconstruction import Reconstruction, batch_sums
from saejax.parallel import DATA, batch_sharding, on_mesh, replicated
from saejax.store import RowSource
from saejax.trained import folded, unscaled
from saejax.training.config import TrainConfig

# Metrics of a validation.
VALIDATED = ("fve", "r2", "l0", "relative_error")


def heldout_rows(coder: Coder, train: TrainConfig, devices: int = 1, members: int = 1) -> int:
    """Activations of the held-out store in one batch: a multiple of the devices along "data".

    As many as training takes at once, so that they fit into memory; more, up to 4,096, where their dense latents (of
    all members of a program) take no more than 64 MB.
    """
    rows = min(4096, max(train.batch_size // train.accumulate, coder.few_tokens // members))
    return max(1, rows // devices) * devices


def make_validation(
    coder: Coder, reader: RowSource, sites: Sites, mesh: Mesh, train: TrainConfig
) -> Callable[[Any, Any], dict[str, float]]:
    """(params, stats of the running training) -> metrics on the held-out store, for raw activations."""
    of_all, n_rows = make_sums(coder, sites), heldout_rows(coder, train, mesh.shape[DATA])

    def sums(params: Any, stats: Any, arrays: Any, keep_B: jax.Array) -> Any:
        return of_all(params, stats, *jax.lax.with_sharding_constraint((arrays, keep_B), batch_sharding(mesh)))

    run = jax.jit(on_mesh(sums, mesh), out_shardings=replicated(mesh))

    def validate(params: Any, stats: Any) -> dict[str, float]:
        total = Reconstruction()
        for arrays, keep_B in in_order(reader, sites.hook_points, n_rows):
            total.add(run(params, stats, arrays, keep_B))
        return {name: v for name, v in total.metrics().items() if name in VALIDATED}

    return validate


def make_sums(coder: Coder, sites: Sites) -> Callable[..., Any]:
    """(params, stats, {hook point: [B, D] as stored}, keep [B]) -> sums for `Reconstruction` of the coder for after
    training, on raw activations. Pure.
    """
    raw = unscaled(sites)

    def sums(params: Any, stats: Any, arrays: Any, keep_B: jax.Array) -> Any:
        inference, params = folded(coder, params, stats, sites)
        batch = raw.batch(arrays)
        latents = inference.encode(params, batch["x"])
        y_hat = inference.decode(params, latents, batch["x"])
        y_BR, y_hat_BR = (a.reshape(len(keep_B), -1) for a in (batch["y"], y_hat))
        return batch_sums(y_BR, y_hat_BR, latents.flat(), keep_B)

    return sums


def in_order(
    reader: RowSource, hook_points: Sequence[str], batch_size: int
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """All rows of a store as ({hook point: [batch_size, D]}, keep [batch_size]), the last ones padded with zeros."""
    for start in range(0, reader.n_tokens, batch_size):
        rows = reader.rows(start, min(start + batch_size, reader.n_tokens))
        count = min(batch_size, reader.n_tokens - start)
        padded = {name: np.pad(rows[name], ((0, batch_size - count), (0, 0))) for name in hook_points}
        yield padded, np.arange(batch_size) < count
