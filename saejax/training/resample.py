"""Dead latents start anew from tokens that the coder reconstructs badly, their optimizer moments forgotten.

Every `resample_every` steps, up to a share of training, each latent that has not fired for half as many steps draws a
token of the batch with probability proportional to its squared error squared, and points at it:

    W_dec[f] = v, of length 1 or of the live latents' mean length
    W_enc[:, f] = 0.2 v, of the live latents' mean length
    b_enc[f] = 0, and thresholds and gates as at the start

(Anthropic, "Towards Monosemanticity", 2023; dictionary_learning)
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from saejax.coders import Coder
from saejax.coders.config import LONG_AGO
from saejax.core.rng import stream
from saejax.kernels.batch import whole_batch
from saejax.training.config import TrainConfig
from saejax.training.guard import state_if
from saejax.training.state import TrainState

ENCODER_SHARE = 0.2


def resample(
    coder: Coder,
    config: TrainConfig,
    state: TrainState,
    batch: dict[str, jax.Array],
    seed: jax.Array,
    ok: jax.Array | bool = True,
) -> TrainState:
    """`state` after a step, with its dead latents resampled where the step calls for it. Pure.

    Not from the batch of a step that was not taken (`ok` is false): its latents wait for the next time.

    Under vmap the branch stays one as long as `state.step` is not mapped; else every step pays for it.
    """
    if not config.resample_every:
        return state
    due = (state.step % config.resample_every == 0) & (state.step <= config.resample_until_fraction * config.steps)
    return jax.lax.cond(due, lambda: state_if(ok, _resampled(coder, config, state, batch, seed), state), lambda: state)


def _resampled(
    coder: Coder, config: TrainConfig, state: TrainState, batch: dict[str, jax.Array], seed: jax.Array
) -> TrainState:
    # The counters stop at LONG_AGO.
    idle = min(max(1, config.resample_every * config.batch_size // 2), LONG_AGO)
    dead = state.stats["tokens_since_fired"] >= idle
    at = _draw(coder, state, batch, stream(seed, "resample", state.step), dead.shape)
    aimed = coder.topology.aim(state.params, *(whole_batch(batch[name])[at] for name in ("x", "y")))
    starts = {"b_enc": 0.0} | coder.sparsity.parameters()
    new = {name: jnp.full_like(state.params[name], value) for name, value in starts.items()}
    for name, direction in aimed.items():
        is_decoder = name in coder.topology.decoders
        share = 1.0 if is_decoder else ENCODER_SHARE
        unit = is_decoder and coder.unit_decoder_every
        new[name] = direction * (1.0 if unit else share * _mean_length(coder, name, state.params[name], dead))

    def renewed(old: Any) -> Any:
        return old | {n: jnp.where(coder.along_latents(n, dead), value, old[n]) for n, value in new.items()}

    since = jnp.where(dead, 0, state.stats["tokens_since_fired"])
    return dataclasses.replace(
        state,
        params=renewed(state.params),
        opt_state=_forget(coder, state.opt_state, state.params, dead),
        stats=state.stats | {"tokens_since_fired": since},
        averaged=renewed(state.averaged) if state.averaged else {},
    )


def _draw(
    coder: Coder, state: TrainState, batch: dict[str, jax.Array], key: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
    """For each latent the index of a token of the batch, drawn in proportion to its squared error squared."""
    error = jnp.square(batch["y"] - coder.reconstruct(state.params, batch["x"]))
    error_B = whole_batch(error.sum(tuple(range(1, error.ndim))))
    # Relative to the largest, whose fourth power might not be finite.
    cumulated_B = jnp.cumsum(jnp.square(error_B / jnp.maximum(error_B.max(), 1e-30)))
    drawn = jax.random.uniform(key, (math.prod(shape),)) * cumulated_B[-1]
    # From the right: a token without error is never drawn.
    return jnp.minimum(jnp.searchsorted(cumulated_B, drawn, side="right"), len(error_B) - 1).reshape(shape)


def _mean_length(coder: Coder, name: str, value: jax.Array, dead: jax.Array) -> jax.Array:
    """Mean length of the live latents' weights in parameter `name`; 1 when none is alive."""
    mask = jnp.broadcast_to(coder.along_latents(name, ~dead), value.shape)
    axes = coder.logical_axes()[name]
    grouped = dead.ndim == 2 and axes[0] == "site" and axes.index("latent") > 0
    latent = axes.index("latent")
    others = tuple(i for i in range(value.ndim) if i != latent and not (grouped and i == 0))
    length = jnp.sqrt(jnp.square(value).sum(others))
    alive = mask.any(others)
    return jnp.where(alive.any(), (length * alive).sum() / jnp.maximum(alive.sum(), 1), 1.0)


def _forget(coder: Coder, opt_state: Any, params: Any, dead: jax.Array) -> Any:
    """The optimizer's state with every moment of the dead latents at 0."""

    def leaf(path: Any, value: jax.Array) -> jax.Array:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        if not names or names[-1] not in params or value.shape != params[names[-1]].shape:
            return value
        if "latent" not in coder.logical_axes()[names[-1]]:
            return value
        return jnp.where(coder.along_latents(names[-1], dead), 0, value)

    return jax.tree_util.tree_map_with_path(leaf, opt_state)
