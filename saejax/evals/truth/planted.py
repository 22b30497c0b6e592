"""The world as it is planted: its features, and samples of it as a function of a key."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.config import to_json
from saejax.core.rng import stream
from saejax.core.settings import deciding
from saejax.evals.truth.directions import directions
from saejax.evals.truth.firing import common_causes, magnitudes, probabilities, thresholds
from saejax.evals.truth.hierarchy import Hierarchy, make_hierarchy
from saejax.evals.truth.world import World
from saejax.kernels.dense import EXACT


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
    """

    world: World
    directions: np.ndarray
    bias: np.ndarray
    probability: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    hierarchy: Hierarchy
    causes: np.ndarray

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the settings that decide it."""
        settings = deciding(World, to_json(self.world))
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

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
        """What a draw reads, on the device."""
        own_N = np.sqrt(1 - np.square(self.causes).sum(1))
        of = {
            "directions": self.directions,
            "bias": self.bias,
            "probability": self.probability,
            "threshold": thresholds(self.probability),
            "mean": self.mean,
            "std": self.std,
            "causes": self.causes,
            "own": own_N,
        }
        return {name: jnp.asarray(value, jnp.float32) for name, value in of.items()}

    # Two programs: in one XLA draws the numbers again for everything that reads them, at three times the time on a CPU.
    @functools.cached_property
    def _drawn(self) -> Callable[..., jax.Array]:
        return jax.jit(_draw, static_argnums=2)

    @functools.cached_property
    def _left(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        return jax.jit(functools.partial(_keep, self.hierarchy))


def plant(world: World) -> Planted:
    """The features of a world: a function of its settings."""
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


def _draw(of: dict[str, Any], key: jax.Array, n: int) -> jax.Array:
    """Who fires (by a Gaussian copula where there are common causes) and how strongly, [n, N], without a hierarchy."""
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
