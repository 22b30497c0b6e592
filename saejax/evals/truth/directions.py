"""The features' directions: random unit rows, pushed apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from saejax.core.rng import stream
from saejax.evals.truth.world import World
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


def superposition(rows_ND: np.ndarray, block: int = 1024) -> float:
    """Mean over features of the largest |cos| with another one: 0 for orthogonal directions."""
    largest = []
    for start in range(0, len(rows_ND), block):
        cosines_BN = np.abs(rows_ND[start : start + block] @ rows_ND.T)
        cosines_BN[np.arange(len(cosines_BN)), start + np.arange(len(cosines_BN))] = 0
        largest.append(cosines_BN.max(1))
    return float(np.concatenate(largest).mean())
