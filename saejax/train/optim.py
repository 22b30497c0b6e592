"""Learning rate schedules and optimizers, all Optax. A new one is a row of a table."""

from collections.abc import Callable

import optax
from optax import contrib

from saejax.train.config import TrainConfig


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


def learning_rate_factor(opt_state: optax.OptState) -> object:
    """What the plateau has multiplied the schedule's learning rate by; 1 without one."""
    return optax.tree.get(opt_state, "scale", 1.0, filtering=lambda path, _: _is_plateau(path))


def _is_plateau(path: tuple[object, ...]) -> bool:
    return any(getattr(entry, "tuple_name", "") == "ReduceLROnPlateauState" for entry in path)


def _restarts(config: TrainConfig, steps: int) -> optax.Schedule:
    """Cosine cycles from lr to lr x final_lr_fraction, each `restart_multiplier` times as long as the one before.

    (Loshchilov and Hutter 2017, arXiv:1608.03983)
    """
    length, covered, cycles, starts = max(1.0, config.restart_period * steps), 0, [], []
    while covered < steps:
        whole = max(1, round(length))
        cycles.append(optax.cosine_decay_schedule(config.lr, whole, alpha=config.final_lr_fraction))
        covered += whole
        starts.append(covered)
        length *= config.restart_multiplier
    return optax.join_schedules(cycles, starts[:-1])


def _decay(config: TrainConfig, steps: int) -> optax.Schedule:
    """lr, then in a straight line to lr x final_lr_fraction over the last decay_fraction of all steps."""
    last = min(steps, max(1, round(config.decay_fraction * config.steps)))
    fall = optax.linear_schedule(config.lr, config.lr * config.final_lr_fraction, last)
    return optax.join_schedules([optax.constant_schedule(config.lr), fall], [steps - last])


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
    "adamw": lambda c, lr: optax.adamw(lr, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay),
    "adafactor": lambda c, lr: optax.adafactor(lr, multiply_by_parameter_scale=False),
    "muon": lambda c, lr: contrib.muon(lr, weight_decay=c.weight_decay, adam_b1=c.b1, adam_b2=c.b2, eps=c.eps),
    "lion": lambda c, lr: optax.lion(lr, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay),
    "schedule_free": lambda c, lr: contrib.schedule_free_adamw(
        c.lr, warmup_steps=max(1, c.warmup_steps), b1=c.b1, b2=c.b2, eps=c.eps
    ),
}
