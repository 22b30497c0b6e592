"""A planted world: its features, and samples of it as a function of a key."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from saejax.core.config import to_json
from saejax.core.errors import ConfigError
from saejax.core.rng import stream
from saejax.core.settings import deciding
from saejax.evals.truth.hierarchy import Hierarchy, make_hierarchy
from saejax.evals.truth.saelens import read_world
from saejax.evals.truth.world import Magnitudes, World
from saejax.kernels.dense import EXACT


def directions(world: World) -> tuple[np.ndarray, np.ndarray]:
    """(directions [N, D] with rows of length 1, bias [D]), float32."""
    rows_ND = jax.random.normal(stream(world.seed, "truth.directions"), (world.n_features, world.d_in))
    rows_ND = apart(unit(rows_ND), world.orthogonal_steps, world.orthogonal_lr)
    bias_1D = jax.random.normal(stream(world.seed, "truth.bias"), (1, world.d_in))
    return np.asarray(rows_ND), np.asarray(world.bias * unit(bias_1D)[0])


def unit(rows_ND: jax.Array) -> jax.Array:
    """Rows at length 1."""
    return rows_ND / jnp.maximum(jnp.linalg.norm(rows_ND, axis=1, keepdims=True), 1e-8)


def apart(rows_ND: jax.Array, steps: int, lr: float) -> jax.Array:
    """Rows after `steps` of Adam on sum_{i != j} (d_i . d_j)^2 + N sum_i (|d_i|^2 - 1)^2, at length 1.

    The loss is that of SAELens' `orthogonalize_embeddings`. Its gradient needs no N x N matrix:
    sum_{j != i} (d_i . d_j) d_j = d_i (D^T D) - |d_i|^2 d_i.
    """
    adam, n = optax.adam(lr), len(rows_ND)

    def step(_: int, state: tuple[jax.Array, optax.OptState]) -> tuple[jax.Array, optax.OptState]:
        rows_ND, moments = state
        squared_N1 = jnp.square(rows_ND).sum(1, keepdims=True)
        gram_DD = jnp.matmul(rows_ND.T, rows_ND, precision=EXACT)
        others_ND = jnp.matmul(rows_ND, gram_DD, precision=EXACT) - squared_N1 * rows_ND
        gradient_ND = 4 * others_ND + 4 * n * (squared_N1 - 1) * rows_ND
        updates, moments = adam.update(gradient_ND, moments)
        return rows_ND + updates, moments

    @jax.jit
    def run(rows_ND: jax.Array) -> jax.Array:
        return unit(jax.lax.fori_loop(0, steps, step, (rows_ND, adam.init(rows_ND)))[0])

    return run(rows_ND) if steps else rows_ND


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


@dataclasses.dataclass(frozen=True, eq=False)
class Planted:
    """The true features of a world.

    Attributes:
        world: its settings.
        directions: float32 [N, D], rows of length 1.
        bias: float32 [D].
        probability: float64 [N], with which features are drawn, before the hierarchy silences some.
        mean, std: float64 [N], of the magnitude of each where it fires.
        hierarchy: who is whose child.
        causes: float64 [N, R], each feature's weights on the common causes; R = 0 without correlation.
        saved: sha256 of the files of a world that was read; empty where the settings made it.
    """

    world: World
    directions: np.ndarray
    bias: np.ndarray
    probability: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    hierarchy: Hierarchy
    causes: np.ndarray
    saved: str = ""

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the settings that decide it, or of its files."""
        settings = deciding(World, to_json(self.world))
        return self.saved or hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def described(self) -> dict[str, Any]:
        """Its settings, or where it was read from, for JSON."""
        if not self.saved:
            return to_json(self.world)
        n_features, d_in = self.directions.shape
        return {"source": self.world.source, "sha256": self.saved, "n_features": n_features, "d_in": d_in}

    def sample(self, key: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
        """n samples: (activations [n, D], the true features' magnitudes [n, N], 0 where they do not fire), float32.

        A function of the key: the same bits in another process on the same kind of device.
        """
        return self._left(self._arrays, key, self._drawn(self._arrays, key, n))

    def rows(self, n: int, seed: int = 0) -> np.ndarray:
        """n activations [n, D], as `saejax.train` takes them."""
        return np.asarray(self.sample(stream(seed, "truth.rows"), n)[0])

    @functools.cached_property
    def _arrays(self) -> dict[str, jax.Array]:
        of = {name: getattr(self, name) for name in ("directions", "bias", "probability", "mean", "std", "causes")}
        of |= {"threshold": thresholds(self.probability), "own": np.sqrt(1 - np.square(self.causes).sum(1))}
        return {name: jnp.asarray(value, jnp.float32) for name, value in of.items()}

    # Two programs: in one XLA draws the numbers again for everything that reads them, at three times the time on a CPU.
    @functools.cached_property
    def _drawn(self) -> Callable[..., jax.Array]:
        return jax.jit(_draw, static_argnums=2)

    @functools.cached_property
    def _left(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return jax.jit(functools.partial(_keep, self.hierarchy))


def plant(world: World) -> Planted:
    """The features of a world: a function of its settings, or those of the folder that `source` names.

    Raises:
        ConfigError: beside `source` there are settings that would make features.
        DataError: the folder holds no world that can be sampled.
    """
    if world.source:
        return _read(world)
    hierarchy, p_N = make_hierarchy(world), probabilities(world)
    if world.compensate:
        p_N = np.minimum(p_N * hierarchy.factors(p_N), 1)
    rows_ND, bias_D = directions(world)
    mean_N, std_N = (
        magnitudes(of, world.n_features, stream(world.seed, f"truth.{name}"))
        for name, of in (("mean", world.mean), ("std", world.std))
    )
    causes_NR = common_causes(world) if world.rank else np.zeros((world.n_features, 0))
    return Planted(world, rows_ND, bias_D, p_N, mean_N, std_N, hierarchy, causes_NR)


def _read(world: World) -> Planted:
    makes = [name for name in deciding(World, to_json(world)) if getattr(world, name) != getattr(World(), name)]
    if makes:
        raise ConfigError(
            f"truth.{makes[0]} is set, and the features are those of truth.source={world.source}. Begin with "
            "--config=truth:saelens, which sets nothing else, or leave truth.source empty."
        )
    saved, digest = read_world(world.source)
    n_features, d_in = saved["directions"].shape
    return Planted(dataclasses.replace(world, n_features=n_features, d_in=d_in), **saved, saved=digest)


def _draw(of: dict[str, Any], key: jax.Array, n: int) -> jax.Array:
    """Magnitudes without a hierarchy, [n, N]: features fire by a Gaussian copula where there are common causes."""
    fire, size, cause, _ = jax.random.split(key, 4)
    shape, rank = (n, of["mean"].shape[0]), of["causes"].shape[1]
    if rank:
        common_BN = jnp.matmul(jax.random.normal(cause, (n, rank)), of["causes"].T, precision=EXACT)
        fires_BN = common_BN + jax.random.normal(fire, shape) * of["own"][None] > of["threshold"][None]
    else:
        fires_BN = jax.random.uniform(fire, shape) < of["probability"][None]
    drawn_BN = of["mean"][None] + of["std"][None] * jax.random.normal(size, shape)
    return jnp.where(fires_BN, jax.nn.relu(drawn_BN), 0)


def _keep(hierarchy: Hierarchy, of: dict[str, Any], key: jax.Array, drawn_BN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(activations [B, D], magnitudes [B, N]) of what the hierarchy leaves."""
    a_BN = hierarchy.apply(jax.random.split(key, 4)[3], drawn_BN, of["mean"])
    return jnp.matmul(a_BN, of["directions"], precision=EXACT) + of["bias"][None], a_BN
