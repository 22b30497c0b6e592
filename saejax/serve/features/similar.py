"""Features that write alike: the largest cosines of decoder rows, within a dictionary or across two.

    cos(i, j) = d_i . d_j / (|d_i| |d_j|),   d: all that a latent writes, site after site

Where layers write to different sites (cross-layer transcoders), a latent writes nothing to the sites before its own.
"""

import dataclasses
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError
from saejax.serve.caches import Cache
from saejax.serve.problems import Problem
from saejax.trained import TrainedCoder


@dataclasses.dataclass(frozen=True)
class Rows:
    """Decoder rows of a dictionary: for each group of latents the place of its first site, and [F, sites D]."""

    width: int
    groups: tuple[tuple[int, np.ndarray], ...]
    norms: np.ndarray

    @classmethod
    def of(cls, sae: TrainedCoder, cache: Cache, key: tuple[Any, ...]) -> "Rows":
        """Those of a dictionary; their lengths are kept in the cache under its key."""
        decoders = [np.asarray(rows) for rows in sae.coder.topology.decoder_rows(dict(sae.params))]
        width = max(rows.shape[1] for rows in decoders)
        norms = cache.get(
            ("norms", *key),
            lambda: np.concatenate([np.sqrt(np.einsum("fd,fd->f", rows, rows)) for rows in decoders]),
            lambda lengths: lengths.nbytes,
        )
        return cls(width, tuple((width - rows.shape[1], rows) for rows in decoders), norms)

    def row(self, latent: int) -> np.ndarray:
        """[width] of a latent, with zeros at the sites that it does not write."""
        first, rows = self.groups[latent // len(self.groups[0][1])]
        return np.pad(rows[latent % len(rows)], (first, 0))

    def cosines(self, row: np.ndarray) -> np.ndarray:
        """With each of these rows, float32 [G F]; 0 for rows of length 0."""
        products = np.concatenate([rows @ row[first:] for first, rows in self.groups])
        scale = self.norms * float(np.linalg.norm(row))
        return np.divide(products, scale, out=np.zeros_like(products), where=scale > 0)


def nearest_rows(row: np.ndarray, others: Rows, count: int, without: int = -1) -> list[tuple[int, float]]:
    """(latent, cosine) of the `count` rows nearest to one, falling; `without` is left out.

    Raises:
        ConfigError: the two are not of one width.
    """
    if len(row) != others.width:
        raise ConfigError(
            f"The rows of one dictionary have {len(row)} numbers, those of the other {others.width}: they write "
            "different things and cannot be compared."
        )
    cosines = others.cosines(row)
    if without >= 0:
        cosines[without] = -np.inf
    count = min(count, len(cosines) - (without >= 0))
    if count < 1:
        return []
    order = np.argpartition(-cosines, count - 1)[:count]
    order = order[np.lexsort((order, -cosines[order]))]
    return [(int(latent), float(cosines[latent])) for latent in order]


def checked_latent(sae: TrainedCoder, name: str, latent: int) -> int:
    """The number, if it is one of the dictionary's latents.

    Raises:
        Problem: 404: it is not.
    """
    if not 0 <= latent < sae.n_latents:
        raise Problem(404, f"{name} has no feature {latent}; it has 0 to {sae.n_latents - 1}.")
    return latent
