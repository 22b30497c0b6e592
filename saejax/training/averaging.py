"""The weights that evaluation reads, where those are not the ones being trained.

EMA:           a <- d a + (1 - d) w,   d = min(ema_decay, (1 + step) / (10 + step)), so that the start is forgotten
schedule-free: the optimizer's own average (Defazio et al. 2024, arXiv:2405.15682)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from optax import contrib

from saejax.core.errors import ConfigError
from saejax.core.settings import setting
from saejax.training.optim import OPTIMIZERS, OptimSettings, states_of


@dataclasses.dataclass(frozen=True)
class AveragingSettings(OptimSettings):
    """The weights that evaluation reads."""

    ema_decay: float = setting(
        0.0,
        "Evaluation reads an exponential moving average of the weights with this decay (at first with (1 + step) / "
        "(10 + step), if that is smaller); 0 reads the weights themselves.",
        low=0,
        below=1,
        per_member=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ema_decay and OPTIMIZERS[self.optimizer].averages:
            raise ConfigError(f"train.optimizer={self.optimizer} averages weights itself; set train.ema_decay=0.")


def start_average(config: AveragingSettings, params: Any) -> Any:
    """The average before the first step: the parameters, or {} where nothing is averaged."""
    averages = config.ema_decay or OPTIMIZERS[config.optimizer].averages
    return jax.tree.map(jnp.array, params) if averages else {}


def next_average(config: AveragingSettings, averaged: Any, params: Any, opt_state: Any, step: jax.Array) -> Any:
    """The average after a step that left `params` and `opt_state`; `step` counts those before it."""
    if OPTIMIZERS[config.optimizer].averages:
        return contrib.schedule_free_eval_params(states_of(opt_state, contrib.ScheduleFreeState)[0], params)
    if not config.ema_decay:
        return averaged
    decay = jnp.minimum(config.ema_decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, averaged, params)
