"""26 logistic regressions at once, one for each letter against the others, trained by Adam as SAEBench trains them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from saejax.core.rng import stream


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Training of such probes: the rate falls exponentially from one epoch to the next, from lr to last_lr."""

    batch: int
    l1: float = 0.0
    l2: float = 0.0
    lr: float = 0.01
    last_lr: float = 1e-5
    epochs: int = 50


# SAEBench's probe on activations, and the one on latents whose weights choose them.
ON_ACTIVATIONS = Recipe(batch=64, l2=1e-4)
ON_LATENTS = Recipe(batch=4096, l1=0.01, l2=1e-6)


@dataclasses.dataclass(frozen=True)
class Probe:
    """scores = x W + b; W [D, C], b [C]."""

    weights: np.ndarray
    biases: np.ndarray

    def scores(self, x: np.ndarray) -> np.ndarray:
        """[N, D] -> [N, C]."""
        return x @ self.weights + self.biases[None]


def train_probe(
    x_ND: np.ndarray,
    classes_N: np.ndarray,
    n_classes: int,
    recipe: Recipe,
    seed: int,
    read: Callable[[Any, jax.Array], jax.Array] | None = None,
    params: Any = (),
) -> Probe:
    """Minimise mean(BCE(read(x) W + b, one-hot)) + l1 mean_c(sum |W_c|) + l2 |W, b|^2 / 2 from weights of 0.

    The positive rows of a class weigh n_negative / n_positive; a class without rows weighs 1. Batches are random by
    (seed, epoch), the last one of an epoch is short.

    Args:
        read: (params, x [B, D]) -> [B, F], what the probe sees; x itself without it.
    """
    n, size = len(x_ND), min(recipe.batch, len(x_ND))
    steps = -(-n // size)
    count_C = np.bincount(classes_N, minlength=n_classes)
    weight_C = jnp.asarray(np.where(count_C > 0, (n - count_C) / np.maximum(count_C, 1), 1.0), jnp.float32)
    x, classes = jnp.asarray(x_ND, jnp.float32), jnp.asarray(classes_N, jnp.int32)
    seen: Callable[[Any, jax.Array], jax.Array] = read or (lambda _, rows: rows)
    width = jax.eval_shape(seen, params, jax.ShapeDtypeStruct((size, *x.shape[1:]), jnp.float32)).shape[-1]
    fall = (recipe.last_lr / recipe.lr) ** (1 / recipe.epochs)
    optimizer = optax.chain(
        optax.add_decayed_weights(recipe.l2), optax.adam(lambda step: recipe.lr * fall ** (step // steps))
    )

    def loss(probe: Any, z_BF: jax.Array, target_BC: jax.Array, real_B: jax.Array) -> jax.Array:
        logit_BC = z_BF @ probe["W"] + probe["b"][None]
        yes, no = jax.nn.log_sigmoid(logit_BC), jax.nn.log_sigmoid(-logit_BC)
        bce_BC = -(weight_C[None] * target_BC * yes + (1 - target_BC) * no)
        mean = (bce_BC * real_B[:, None]).sum() / (real_B.sum() * n_classes)
        # |W|, whose slope at 0 is 0; that of jnp.abs is 1 there.
        size = jax.lax.stop_gradient(jnp.sign(probe["W"])) * probe["W"]
        return mean + recipe.l1 * size.sum(0).mean()

    def step(params: Any, carry: Any, rows_B: jax.Array) -> Any:
        probe, state = carry
        real_B = (rows_B >= 0).astype(jnp.float32)
        target_BC = jax.nn.one_hot(classes[rows_B], n_classes)
        gradient = jax.grad(loss)(probe, seen(params, x[rows_B]), target_BC, real_B)
        updates, state = optimizer.update(gradient, state, probe)
        return (optax.apply_updates(probe, updates), state), None

    @jax.jit
    def epoch(params: Any, carry: Any, key: jax.Array) -> Any:
        order = jnp.pad(jax.random.permutation(key, n), (0, steps * size - n), constant_values=-1)
        return jax.lax.scan(lambda c, rows: step(params, c, rows), carry, order.reshape(steps, size))[0]

    probe = {"W": jnp.zeros((width, n_classes)), "b": jnp.zeros(n_classes)}
    carry = (probe, optimizer.init(probe))
    for i in range(recipe.epochs):
        carry = epoch(params, carry, stream(seed, "first letter", i))
    return Probe(np.asarray(carry[0]["W"]), np.asarray(carry[0]["b"]))
