"""Learning rate schedules and the optimizer, all Optax."""

import optax

from saejax.train.config import TrainConfig


def make_schedule(config: TrainConfig) -> optax.Schedule:
    """Step -> learning rate: linear warm-up from 0, then cosine or constant."""
    warmup = round(config.warmup_fraction * config.steps)
    rest = max(1, config.steps - warmup)
    after = {
        "cosine": optax.cosine_decay_schedule(config.lr, rest, alpha=config.final_lr_fraction),
        "constant": optax.constant_schedule(config.lr),
    }[config.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, max(1, warmup)), after], [warmup])


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clip to the global norm, then Adam on the schedule."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    adam = optax.adam(make_schedule(config), b1=config.b1, b2=config.b2, eps=config.eps)
    return optax.chain(clip, adam)
