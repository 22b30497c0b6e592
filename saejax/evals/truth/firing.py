"""How often and how strongly each feature fires: probabilities, magnitudes, thresholds and common causes."""

import jax
import numpy as np

from saejax.core.rng import stream
from saejax.evals.truth.world import Magnitudes, World

# Of a feature's own part in what makes it fire.
_LEAST_OWN = 0.01


def probabilities(world: World) -> np.ndarray:
    """p of each feature, float64 [N], before a hierarchy is compensated for.

    zipfian: p_i = p_min + (p_max - p_min) (r_i - r_N) / (r_1 - r_N), r_i = 1 / i^exponent.
    """
    n, low, high = world.n_features, world.p_min, world.p_max
    if n == 1 or world.firing == "constant":
        return np.full(n, high)
    if world.firing == "random":
        drawn_N = jax.random.uniform(stream(world.seed, "truth.firing"), (n,))
        return low + (high - low) * np.asarray(drawn_N, np.float64)
    if world.firing == "linear":
        return np.linspace(high, low, n)
    rank_N = np.arange(1, n + 1) ** -world.exponent
    return low + (high - low) * (rank_N - rank_N[-1]) / (rank_N[0] - rank_N[-1])


def magnitudes(of: Magnitudes, n: int, key: jax.Array) -> np.ndarray:
    """One number for each feature, float64 [N], by its `kind`."""
    along_N = np.linspace(0, 1, n)
    if of.kind == "linear":
        return of.first + (of.last - of.first) * along_N
    if of.kind == "exponential":
        return of.first * (of.last / of.first) ** along_N
    if of.kind == "folded_normal":
        return np.abs(of.centre + of.spread * np.asarray(jax.random.normal(key, (n,)), np.float64))
    return np.full(n, of.first)


def thresholds(p_N: np.ndarray) -> np.ndarray:
    """t with P(z > t) = p for a standard normal z, float64 [N]; -inf for p = 1."""
    from scipy.special import ndtri

    return -ndtri(p_N)


def common_causes(world: World) -> np.ndarray:
    """F, float64 [N, R], of z = e F^T + sqrt(1 - |F_i|^2) n: the correlation of features i and j is F_i . F_j.

    Rows longer than sqrt(0.99) are shortened to that, so that 1 % of each feature's variance is its own.
    """
    shape = (world.n_features, world.rank)
    factor_NR = world.correlation * np.asarray(jax.random.normal(stream(world.seed, "truth.causes"), shape), np.float64)
    squared_N = np.square(factor_NR).sum(1)
    too_long = 1 - squared_N < _LEAST_OWN
    shorter_N = np.sqrt((1 - _LEAST_OWN) / np.where(too_long, squared_N, 1))
    return factor_NR * np.where(too_long, shorter_N, 1)[:, None]
