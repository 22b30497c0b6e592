"""A loss beside the coder's own: of arrays of its own, and of other models' parameters.

    gradient = grad(coder's loss) + weight sg(R / L) grad(L)        R the reconstruction's error in the coder's loss

So L counts `weight` times as much as the reconstruction, whatever its unit. The weights of sparsity are multiplied by
1 + weight, and keep their proportion to the sum. (Karvonen 2025, arXiv:2503.17272: settings of a training then need no
change.)
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from saejax.training.state import TrainState

# A loss that is exactly 0 is not made larger than this allows.
_TINIEST = 1e-12


class Beside(Protocol):
    """A second loss L.

    Attributes:
        name: of its metric.
        weight: above.
        begins: the first step that has it.
        arrays: {name of an array of a batch: (shape, dtype)}, the first dimension spread over "data".
        inputs: arrays on the mesh that every step is told besides.
    """

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def begins(self) -> int: ...
    @property
    def arrays(self) -> Mapping[str, tuple[tuple[int, ...], Any]]: ...
    @property
    def inputs(self) -> Any: ...

    def gradient(self, params: Any, stats: Any, arrays: Mapping[str, jax.Array], inputs: Any) -> tuple[jax.Array, Any]:
        """(L, its gradient by the parameters). Pure."""
        ...


def sparsity_factor(beside: Beside, step: jax.Array) -> jax.Array:
    """By which the weights of sparsity are multiplied in a step."""
    return jnp.where(step >= beside.begins, 1 + beside.weight, 1.0)


def added(
    beside: Beside,
    state: TrainState,
    arrays: Mapping[str, jax.Array],
    inputs: Any,
    grads: Any,
    metrics: Any,
    reconstruction: str,
) -> tuple[Any, dict[str, jax.Array]]:
    """(gradients, metrics) of a step with the second loss, whose own metric is NaN before it begins.

    The metric "loss" is the sum divided by 1 + weight, so that it does not jump where the second loss begins.

    Args:
        reconstruction: the metric that is R.
    """

    def there() -> tuple[jax.Array, Any]:
        return beside.gradient(state.params, state.stats, arrays, inputs)

    def not_yet() -> tuple[jax.Array, Any]:
        return jnp.float32(jnp.nan), jax.tree.map(jnp.zeros_like, state.params)

    begun = state.step >= beside.begins
    with jax.named_scope("loss/through"):
        value, more = jax.lax.cond(begun, there, not_yet) if beside.begins else there()
        scale = beside.weight * metrics[reconstruction] / jnp.maximum(value, _TINIEST)
        loss = metrics["loss"] + jnp.where(begun, scale * value, 0.0)
        loss = loss / sparsity_factor(beside, state.step)
        scale = jnp.where(begun, scale, 0.0)
        grads = jax.tree.map(lambda a, b: a + scale * b, grads, more)
    return grads, metrics | {"loss": loss, beside.name: value}
