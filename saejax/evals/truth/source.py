"""The world's samples as batches for a training: a `BatchSource` without a disk."""

from collections.abc import Generator

import jax
import numpy as np

from saejax.core.errors import ConfigError
from saejax.core.rng import stream
from saejax.evals.truth.planted import Planted
from saejax.store import ArrayRows
from saejax.store.statistics import moments, sums_of, zero_sums

# What the activations are called where a hook point's name is asked for.
NAME = "x"

# Rows that the statistics are taken from, and rows that are drawn together for them.
_FIRST, _PIECE = 16_384, 1_024


class PlantedBatches:
    """Batch i is a function of (world, seed, i), and no row comes twice. float32 [B, D].

    Args:
        rows: (first, stop) of each global batch that this process has; all without it. Each draws the whole batch.
        epoch_rows: what counts as an epoch, for settings that count in epochs.

    Attributes:
        statistics: of 16,384 rows that are in no batch.
    """

    def __init__(
        self,
        planted: Planted,
        batch_size: int,
        seed: int,
        rows: tuple[int, int] | None = None,
        epoch_rows: int = 1 << 20,
    ) -> None:
        self._first, self._stop = rows or (0, batch_size)
        if not 0 <= self._first < self._stop <= batch_size:
            raise ConfigError(f"batch_size={batch_size}, rows={rows}: rows must be a range within the batch.")
        self._planted, self._seed = planted, seed
        self.batch_size, self.epoch_rows = batch_size, epoch_rows
        self.hook_points, self.dtype = {NAME: planted.world.d_in}, np.dtype(np.float32)
        self.statistics = {
            NAME: moments(sum(map(sums_of, _pieces(planted, seed, "statistics")), zero_sums(planted.world.d_in)))
        }

    def iterate(self, start_step: int = 0) -> Generator[dict[str, np.ndarray]]:
        """The batches of start_step, start_step + 1, ...; the next one is drawn while one is trained on."""
        step, following = start_step, self._draw(start_step)
        while True:
            now, following = following, self._draw(step + 1)
            yield {NAME: np.asarray(now)[self._first : self._stop]}
            step += 1

    def whole_batch_at(self, step: int) -> dict[str, np.ndarray]:
        return {NAME: np.asarray(self._draw(step))}

    def places(self, step: int) -> dict[str, np.ndarray]:
        """Nothing: these activations lie in no store."""
        return {}

    def _draw(self, step: int) -> jax.Array:
        return self._planted.sample(stream(self._seed, "truth.batches", step), self.batch_size)[0]


def heldout(planted: Planted, seed: int) -> ArrayRows:
    """Rows to validate on, which are in no batch of the same seed."""
    return ArrayRows({NAME: np.concatenate(list(_pieces(planted, seed, "heldout")))})


def _pieces(planted: Planted, seed: int, what: str) -> Generator[np.ndarray]:
    for piece in range(_FIRST // _PIECE):
        yield np.asarray(planted.sample(stream(seed, f"truth.{what}", piece), _PIECE)[0])
