"""Random features to compare a chosen set with, and the whole set left out or alone.

A control is as large as the set, and its members fire as much: each is drawn from the latents that fire in the same
rows, the nearest in mean activation to the member that it stands for. (Marks et al. 2024 compare with random features.)
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from saejax.core.errors import DataError
from saejax.interventions.change import Change, change

# A control is drawn among so many latents of about the same mean activation.
_NEAREST = 16


def matched(latents: Sequence[int], mean_F: np.ndarray, draws: int, seed: int = 0) -> np.ndarray:
    """int [draws, K]: for each draw a set of K other latents, distinct, of about the activations of `latents`.

    Where few others fire, draws repeat sets: `first_draws` says which are new.

    Args:
        latents: the chosen ones, K of them.
        mean_F: mean activation of each latent over the same rows; what is 0 never stands in.

    Raises:
        DataError: too few other latents fire.
    """
    chosen = np.asarray(latents).reshape(-1)
    others = np.setdiff1d(np.flatnonzero(mean_F), chosen)
    if len(others) < len(chosen):
        raise DataError(
            f"Only {len(others)} other latents fire in these rows, too few for a control of {len(chosen)}; take more "
            "rows, or fewer latents."
        )
    rng = np.random.default_rng(seed)
    sets = np.empty((draws, len(chosen)), np.int64)
    for draw in range(draws):
        free = others
        for i in rng.permutation(len(chosen)):  # no member is always the last to choose
            near = free[np.argsort(np.abs(mean_F[free] - mean_F[chosen[i]]), kind="stable")[:_NEAREST]]
            sets[draw, i] = rng.choice(near)
            free = free[free != sets[draw, i]]
    return sets


def first_draws(sets: np.ndarray) -> np.ndarray:
    """True for each draw that no draw before it repeats, in whatever order of latents; `sets` is [draws, K]."""
    new = np.zeros(len(sets), bool)
    new[np.unique(np.sort(sets, axis=1), axis=0, return_index=True)[1]] = True
    return new


def without(latents: Sequence[int], n_latents: int, instead: float | np.ndarray = 0.0) -> Change:
    """f' = `instead` for the set, one number or [F] (means); all others stay: completeness asks what is left."""
    stays_F = np.ones(n_latents, bool)
    stays_F[np.asarray(latents, np.int64)] = False
    return only(np.flatnonzero(stays_F), n_latents, instead)


def only(latents: Sequence[int] | np.ndarray, n_latents: int, instead: float | np.ndarray = 0.0) -> Change:
    """f' = `instead` for all but the set: faithfulness asks what the set does alone.

    Every latent is changed, so that one program serves all sets.
    """
    stays_F = np.zeros(n_latents, bool)
    stays_F[np.asarray(latents, np.int64)] = True
    return change(jnp.arange(n_latents), scale=stays_F, shift=np.where(stays_F, 0.0, instead))
