"""Changes of latents: every operation is one line of the same form, so that one program runs all of them.

    f' = clip(scale f + shift, low, high)       of chosen latents, at chosen tokens

    zero        scale 0, shift 0                an ablation
    mean        scale 0, shift mean f           an ablation that stays among usual values
    set_to      scale 0, shift v
    scaled      scale s                         0 is zero, 1 changes nothing
    added       shift a                         steering
    clamped     low, high
    patched     scale 0, shift f of another run, token by token; resampled where that run is another prompt

(Marks et al. 2024, sparse feature circuits; Templeton et al. 2024, feature steering.)

Shape letters: K chosen latents, R rows, S tokens of a row.
"""

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from saejax.core.arrays import as_array

Array = jax.Array | np.ndarray


@flax.struct.dataclass
class Change:
    """One intervention on the latents of one dictionary. A pytree: stacked ones are vmapped.

    Attributes:
        latents: int32 [K], numbers of latents; g F + f for latent f of group g of a cross-layer transcoder.
        at: bool, broadcast against [R, S]: the tokens that it acts on.
        scale, shift, low, high: float32, broadcast against [R, S, K].
    """

    latents: Array
    at: Array
    scale: Array
    shift: Array
    low: Array
    high: Array

    def __call__(self, f_RSK: jax.Array) -> jax.Array:
        """f' of the chosen latents; f itself at tokens that are left alone."""
        numbers = (self.scale, self.shift, self.low, self.high)
        scale, shift, low, high = (jnp.broadcast_to(part, f_RSK.shape) for part in numbers)
        at_RS = jnp.broadcast_to(self.at, f_RSK.shape[:2])
        return jnp.where(at_RS[:, :, None], jnp.clip(scale * f_RSK + shift, low, high), f_RSK)


def change(
    latents: Sequence[int] | jax.Array,
    at: Any = True,
    scale: Any = 1.0,
    shift: Any = 0.0,
    low: Any = -jnp.inf,
    high: Any = jnp.inf,
) -> Change:
    """A `Change`, with numbers that change nothing where none are given."""
    numbers = (jnp.asarray(as_array(value), jnp.float32) for value in (scale, shift, low, high))
    return Change(_numbers(latents), jnp.asarray(as_array(at), bool), *numbers)


def zero(latents: Any, at: Any = True) -> Change:
    """f' = 0."""
    return change(latents, at, scale=0.0)


def set_to(latents: Any, value: Any, at: Any = True) -> Change:
    """f' = value, broadcast against [R, S, K]: a mean, a number, or the latents of another run (a patch)."""
    return change(latents, at, scale=0.0, shift=value)


def patched(latents: Any, source: Any, at: Any = True) -> Change:
    """f' = f of another run, token by token: `source` holds all its latents, [R, S, F] or [R, S, G, F]. Rows of other
    prompts in `source` make it a resampling.
    """
    latents = _numbers(latents)
    source = jnp.asarray(as_array(source))
    return change(latents, at, scale=0.0, shift=source.reshape(*source.shape[:2], -1)[..., latents])


def scaled(latents: Any, factor: Any, at: Any = True) -> Change:
    """f' = factor f."""
    return change(latents, at, scale=factor)


def added(latents: Any, amount: Any, at: Any = True) -> Change:
    """f' = f + amount: steering. Latents of one sign may leave it."""
    return change(latents, at, shift=amount)


def clamped(latents: Any, low: Any = -jnp.inf, high: Any = jnp.inf, at: Any = True) -> Change:
    """f' = min(max(f, low), high)."""
    return change(latents, at, low=low, high=high)


def stacked(changes: Sequence[Change]) -> Change:
    """Many changes as one with a leading axis, for `vmap`, of numpy arrays: only the part that runs goes to the device.

    Numbers broadcast; what has fewer latents is filled up with latent 0, which the filling leaves as it is.
    """
    most = max(one.latents.shape[0] for one in changes)
    nothing = {"latents": 0, "scale": 1.0, "shift": 0.0, "low": -np.inf, "high": np.inf}

    def filled(one: Change) -> Change:
        n, parts = one.latents.shape[0], {}
        for part, filling in nothing.items():
            value = np.asarray(getattr(one, part))
            value = np.broadcast_to(value, np.broadcast_shapes(value.shape, (n,)))
            parts[part] = np.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, most - n)], constant_values=filling)
        return Change(at=np.asarray(one.at), **parts)

    def joined(*values: np.ndarray) -> np.ndarray:
        shape = np.broadcast_shapes(*(value.shape for value in values))
        return np.stack([np.broadcast_to(value, shape) for value in values])

    return jax.tree.map(joined, *map(filled, changes))


def _numbers(latents: Any) -> jax.Array:
    return jnp.asarray(as_array(latents), jnp.int32).reshape(-1)
