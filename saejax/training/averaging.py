"""The weights that evaluation reads, where those are not the ones being trained.

EMA:           a <- d a + (1 - d) w,   d = min(ema_decay, (1 + step) / (10 + step)), so that the start is forgotten
schedule-free: the optimizer's own average (Defazio et al. 2024, arXiv:2405.15682)
"""

from typing import Any

import jax
import jax.numpy as jnp
from optax import contrib

from saejax.training.config import TrainConfig


def start_average(config: TrainConfig, params: Any) -> Any:
    """The average before the first step: the parameters, or {} where nothing is averaged."""
    averages = config.ema_decay or config.optimizer == "schedule_free"
    return jax.tree.map(jnp.array, params) if averages else {}


def next_average(config: TrainConfig, averaged: Any, params: Any, opt_state: Any, step: jax.Array) -> Any:
    """The average after a step that left `params` and `opt_state`; `step` counts those before it."""
    if config.optimizer == "schedule_free":
        return contrib.schedule_free_eval_params(opt_state[1], params)
    if not config.ema_decay:
        return averaged
    decay = jnp.minimum(config.ema_decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, averaged, params)
