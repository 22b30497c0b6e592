"""Learning rate schedules and optimizers, all Optax. A new one is a row of a table."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from saejax.training.config import TrainConfig


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Step -> learning rate: linear warm-up from 0, then what `config.schedule` says."""
    warmup = config.warmup_steps
    after = _AFTER_WARMUP[config.schedule](config, max(1, config.steps - warmup))
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, max(1, warmup)), after], [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformationExtraArgs:
    """Clip to the global norm, then the optimizer on its schedule, then the plateau's factor.

    `update` takes `value`, the loss, which only the plateau looks at.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    chain = [clip, _OPTIMIZERS[config.optimizer](config, make_schedule(config))]
    if config.schedule == "plateau":
        chain.append(
            contrib.reduce_on_plateau(
                factor=config.plateau_factor,
                patience=config.plateau_patience,
                accumulation_size=config.plateau_window,
            )
        )
    return optax.with_extra_args_support(optax.chain(*chain))


def steps_taken(opt_state: optax.OptState, steps: Any) -> Any:
    """How far the optimizer is on its schedule: what it did not take of `steps` did not move it.

    `steps` themselves for schedule_free without a warm-up, which has no schedule.
    """
    counts = optax.tree.get_all_with_path(
        opt_state, "count", filtering=lambda path, _: _in(path, "ScaleByScheduleState")
    )
    return counts[0][1] if counts else steps


def learning_rate_factor(opt_state: optax.OptState) -> object:
    """What the plateau has multiplied the schedule's learning rate by; 1 without one."""
    return optax.tree.get(opt_state, "scale", 1.0, filtering=lambda path, _: _in(path, "ReduceLROnPlateauState"))


def _in(path: tuple[object, ...], name: str) -> bool:
    return any(getattr(entry, "tuple_name", "") == name for entry in path)


def _restarts(config: TrainConfig, steps: int) -> optax.Schedule:
    """Cosine cycles from lr to lr x final_lr_fraction, each `restart_multiplier` times as long as the one before.

    (Loshchilov and Hutter 2017, arXiv:1608.03983)
    """
    length, lengths = config.restart_period * steps, [0]
    while sum(lengths) <= steps:
        lengths.append(max(1, round(length)))
        length *= config.restart_multiplier
    ends_C = jnp.array(list(itertools.accumulate(lengths)))
    cycle = optax.cosine_decay_schedule(config.lr, 1, alpha=config.final_lr_fraction)

    def schedule(step: jax.Array) -> jax.Array:
        at = jnp.searchsorted(ends_C, step, side="right")
        # How much of its cycle is done; `join_schedules` also asks about steps of the warm-up, and discards them.
        return cycle((step - ends_C[at - 1]) / (ends_C[at] - ends_C[at - 1]))

    return schedule


def _decay(config: TrainConfig, steps: int) -> optax.Schedule:
    """lr, then in a straight line to lr x final_lr_fraction over the last decay_fraction of all steps."""
    last = min(steps, max(1, round(config.decay_fraction * config.steps)))
    fall = optax.linear_schedule(config.lr, config.lr * config.final_lr_fraction, last)
    return optax.join_schedules([optax.constant_schedule(config.lr), fall], [steps - last])


def _weights(params: dict[str, Any]) -> dict[str, bool]:
    """Which parameters are weight matrices (or stacks of them): by the convention of names, W_enc, W_dec_3, ..."""
    return {name: name.startswith("W") for name in params}


def _matrices(params: dict[str, Any]) -> dict[str, contrib.MuonDimensionNumbers | None]:
    """Which axes of each weight are its matrix; a site axis stacks matrices, each of which stands for itself."""
    rows = {name: 0 if name.startswith("W_dec") else -2 for name in params}
    return {
        name: contrib.MuonDimensionNumbers(rows[name], -1) if weight else None
        for name, weight in _weights(params).items()
    }


_AFTER_WARMUP: dict[str, Callable[[TrainConfig, int], optax.Schedule]] = {
    "cosine": lambda c, steps: optax.cosine_decay_schedule(c.lr, steps, alpha=c.final_lr_fraction),
    "constant": lambda c, steps: optax.constant_schedule(c.lr),
    "linear": lambda c, steps: optax.linear_schedule(c.lr, c.lr * c.final_lr_fraction, steps),
    "cosine_restarts": _restarts,
    "plateau": lambda c, steps: optax.constant_schedule(c.lr),
    "decay": _decay,
}

_OPTIMIZERS: dict[str, Callable[[TrainConfig, optax.Schedule], optax.GradientTransformation]] = {
    "adam": lambda c, lr: optax.adam(lr, b1=c.b1, b2=c.b2, eps=c.eps),
    "adamw": lambda c, lr: optax.adamw(lr, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=_weights),
    "adafactor": lambda c, lr: optax.adafactor(lr, multiply_by_parameter_scale=False),
    "muon": lambda c, lr: contrib.muon(
        lr,
        weight_decay=c.weight_decay,
        adam_b1=c.b1,
        adam_b2=c.b2,
        eps=c.eps,
        muon_weight_dimension_numbers=_matrices,
    ),
    "lion": lambda c, lr: optax.lion(lr, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=_weights),
    "schedule_free": lambda c, lr: contrib.schedule_free_adamw(
        c.lr, warmup_steps=c.warmup_steps or None, b1=c.b1, b2=c.b2, eps=c.eps
    ),
}
