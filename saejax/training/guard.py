"""Steps that are computed and not taken: whose loss or gradient is not finite, or whose loss is a spike.

ok = isfinite(loss) & isfinite(||grad||) & (loss <= spike_factor x median of the last 32 finite losses)

A step that is not ok leaves every parameter, moment, statistic and average as it was, to the bit; the step's number
goes on, and with it the order of the batches. So does the window of losses, so that a loss that stays high becomes the
median again. The learning rate's schedule counts the steps that the optimizer took.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from saejax.training.config import TrainConfig

_WINDOW = 32


def start_losses(config: TrainConfig) -> dict[str, jax.Array]:
    """The memory of a judgement of spikes before the first step: infinite losses, which nothing exceeds."""
    return {"losses": jnp.full(_WINDOW, jnp.inf, jnp.float32)} if config.spike_factor else {}


def judge(
    config: TrainConfig, recent: dict[str, jax.Array], loss: jax.Array, grad_norm: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(whether the step is to be taken, the memory after it). Pure."""
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if not config.spike_factor:
        return finite, recent
    losses = recent["losses"]
    ok = finite & (loss <= config.spike_factor * jnp.median(losses))
    return ok, {"losses": jnp.where(finite, jnp.roll(losses, -1).at[-1].set(loss), losses)}


def state_if(ok: jax.Array | bool, after: Any, before: Any) -> Any:
    """The state `after` where ok, else that `before`, leaf by leaf and to the bit; the step's number is that `after`.

    The number stays out of it: the members of a sweep share it, and not what is ok.
    """
    rest = (dataclasses.replace(state, step=None) for state in (after, before))
    chosen = jax.tree.map(lambda new, old: jnp.where(ok, new, old), *rest)
    return dataclasses.replace(chosen, step=after.step)


@jax.jit
def _sound(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # Optimizers begin single numbers at infinity (the plateau's best loss); arrays must be finite.
    checks = [(jnp.isfinite(leaf) if leaf.ndim else ~jnp.isnan(leaf)).all() for leaf in leaves]
    return jnp.stack(checks).all() if checks else jnp.bool_(True)


_each_sound = jax.jit(jax.vmap(_sound))


def is_sound(tree: Any) -> bool:
    """All arrays of a tree are finite, and no single number of it is NaN. Waits for the device."""
    return bool(_sound(tree))


def are_sound(stacked: Any) -> list[bool]:
    """`is_sound` of each of the trees that are stacked on a leading axis."""
    return np.asarray(_each_sound(stacked)).tolist()  # type: ignore[no-any-return]
