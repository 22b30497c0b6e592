"""Learning rate schedules and optimizers, all Optax. A new one is a row of a table."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting


def _restarts(config: "OptimSettings", steps: int) -> optax.Schedule:
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


def _decay(config: "OptimSettings", steps: int) -> optax.Schedule:
    """lr, then in a straight line to lr x final_lr_fraction over the last decay_fraction of all steps."""
    last = min(steps, max(1, round(config.decay_fraction * config.steps)))
    fall = optax.linear_schedule(config.lr, config.lr * config.final_lr_fraction, last)
    return optax.join_schedules([optax.constant_schedule(config.lr), fall], [steps - last])


def _weights(params: dict[str, Any]) -> dict[str, Any]:
    """Marks the weight matrices (or stacks of them), by the convention of names, W_enc, W_dec_3, ..."""
    return {
        name: _weights(value) if isinstance(value, dict) else name.startswith("W") for name, value in params.items()
    }


def _matrices(params: dict[str, Any]) -> dict[str, contrib.MuonDimensionNumbers | None]:
    """The axes of each weight that are its matrix; a site axis stacks matrices, each of which stands for itself."""
    rows = {name: 0 if name.startswith("W_dec") else -2 for name in params}
    return {
        name: contrib.MuonDimensionNumbers(rows[name], -1) if weight else None
        for name, weight in _weights(params).items()
    }


SCHEDULES: dict[str, Callable[["OptimSettings", int], optax.Schedule]] = {
    "cosine": lambda c, steps: optax.cosine_decay_schedule(c.lr, steps, alpha=c.final_lr_fraction),
    "constant": lambda c, steps: optax.constant_schedule(c.lr),
    "linear": lambda c, steps: optax.linear_schedule(c.lr, c.lr * c.final_lr_fraction, steps),
    "cosine_restarts": _restarts,
    "plateau": lambda c, steps: optax.constant_schedule(c.lr),
    "decay": _decay,
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A row of `OPTIMIZERS`.

    Attributes:
        make: (settings, schedule) -> the transformation.
        decays: it has a weight decay, of weight matrices alone.
        moments_per_latent: resampling can forget a latent's moments.
        averages: it replaces the schedule by an average of the weights, which evaluation reads; its state holds lr.
        rate: its usual learning rate, as a multiple of adam's.
    """

    make: Callable[["OptimSettings", optax.Schedule], optax.GradientTransformation]
    decays: bool = False
    moments_per_latent: bool = True
    averages: bool = False
    rate: float = 1.0


OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Optimizer(lambda c, lr: optax.adam(lr, b1=c.b1, b2=c.b2, eps=c.eps)),
    "adamw": Optimizer(
        lambda c, lr: optax.adamw(lr, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, mask=_weights),
        decays=True,
    ),
    "adafactor": Optimizer(
        lambda c, lr: optax.adafactor(lr, multiply_by_parameter_scale=False), moments_per_latent=False
    ),
    "muon": Optimizer(
        lambda c, lr: contrib.muon(
            lr,
            weight_decay=c.weight_decay,
            adam_b1=c.b1,
            adam_b2=c.b2,
            eps=c.eps,
            muon_weight_dimension_numbers=_matrices,
        ),
        decays=True,
    ),
    "lion": Optimizer(
        lambda c, lr: optax.lion(lr, b1=c.b1, b2=c.b2, weight_decay=c.weight_decay, mask=_weights),
        decays=True,
        rate=0.1,
    ),
    "schedule_free": Optimizer(
        lambda c, lr: contrib.schedule_free_adamw(
            c.lr, warmup_steps=c.warmup_steps or None, b1=c.b1, b2=c.b2, eps=c.eps
        ),
        moments_per_latent=False,
        averages=True,
    ),
}


_varied = functools.partial(setting, per_member=True)


@dataclasses.dataclass(frozen=True)
class OptimSettings(Settings, section="train"):
    """The length of a training, its optimizer and learning rate, and the weights that evaluation reads."""

    tokens: int = setting(
        100_000_000, "Activations to train on, over as many epochs of the store as that takes.", high=math.inf
    )
    batch_size: int = setting(
        4096,
        "Activations in a step. 0 finds the largest power of two from 256 to 65,536 whose compiled step fits the "
        "devices' memory, and which leaves 1,000 steps and 8 batches of the store; the run keeps it.",
        low=0,
    )
    optimizer: str = _varied(
        "adam",
        "muon has orthogonalised updates for matrices and adam for the rest; schedule_free is an adamw that needs no "
        "schedule: evaluation reads its averaged weights.",
        choices=OPTIMIZERS,
    )
    lr: float = _varied(
        0.0,
        "Learning rate; 0 takes 20 (batch_size / 1024)^(1/4) / sqrt(steps x d_in x sqrt(latents)), at most 0.03, and a "
        "tenth of that for lion.",
        low=0,
    )
    b_enc_rate: float | None = _varied(
        None,
        "With coder.encoder_centre, the learning rate of b_enc is lr times this number. Nothing else moves latents' "
        "biases then. None takes 2 (5 for relu). In short trainings it takes up to 20, so that biases get as far as in "
        "long ones. The rate is also multiplied by the activations' spread, sqrt(E||x - mean x||^2 / E||x||^2). "
        "schedule_free ignores it.",
        above=0,
    )
    b1: float = _varied(0.9, "Decay of the first moment (not of adafactor; of muon that of its adam).", low=0, below=1)
    b2: float | None = _varied(
        None,
        "Decay of the second moment (not of adafactor; of muon that of its adam); None takes 0.99 with "
        "coder.encoder_centre and 0.999 without, where more latents would die.",
        low=0,
        below=1,
    )
    eps: float = _varied(1e-8, "Added to the divisor (not of adafactor and lion; of muon that of its adam).", above=0)
    weight_decay: float = _varied(
        0.0, "Of adamw, lion and muon; of weight matrices alone, not of biases and thresholds.", low=0
    )
    schedule: str = _varied(
        "decay",
        "After a linear warm-up: decay (constant, then linear to lr x final_lr_fraction over the last decay_fraction); "
        "constant; cosine or linear, down to lr x final_lr_fraction; cosine_restarts (cycles of growing length); "
        "plateau (down when the training loss stalls).",
        choices=SCHEDULES,
    )
    warmup_fraction: float = _varied(
        0.05, "The share of the steps over which the learning rate rises from 0.", low=0, high=1
    )
    final_lr_fraction: float = _varied(0.0, "Where schedules end, as a share of lr.", low=0, high=1)
    decay_fraction: float = _varied(0.3, "The share of the steps that `decay` takes.", low=0, high=1)
    restart_period: float = _varied(
        0.25, "First cycle of cosine_restarts, as a share of the steps after the warm-up.", above=0, high=1
    )
    restart_multiplier: float = _varied(
        2.0, "How many times longer each cycle is than the one before it (T_mult).", low=1
    )
    plateau_factor: float = _varied(0.5, "The plateau multiplies the rate by this.", above=0, below=1)
    plateau_patience: int = _varied(5, "So many windows without a lower loss are a plateau.", low=1)
    plateau_window: int = _varied(50, "Steps of a window, over which the loss is averaged.", low=1)
    clip_norm: float = _varied(1.0, "Gradients are scaled down to this global norm; 0 leaves them.", low=0)
    ema_decay: float = _varied(
        0.0,
        "Evaluation reads an exponential moving average of the weights with this decay (at first with (1 + step) / "
        "(10 + step), if that is smaller); 0 reads the weights themselves.",
        low=0,
        below=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size and self.tokens < self.batch_size:
            raise ConfigError(f"train.tokens is {self.tokens}, less than one batch of {self.batch_size}.")
        if self.batch_size and self.steps >= 2**31:  # what a step counts is an int32
            raise ConfigError(f"train.steps is {self.steps}; it must be at most {2**31 - 1}.")
        kind = OPTIMIZERS[self.optimizer]
        if self.weight_decay and not kind.decays:
            raise ConfigError(
                f"train.weight_decay is set, but {self.optimizer} has none; "
                f"use {', '.join(name for name, optimizer in OPTIMIZERS.items() if optimizer.decays)}, or set 0."
            )
        if kind.averages and self.schedule != "constant":
            raise ConfigError(
                f"train.optimizer={self.optimizer} replaces the schedule {self.schedule!r} by averaging; "
                "set train.schedule=constant."
            )
        if kind.averages and not self.b1:
            raise ConfigError(f"train.optimizer={self.optimizer} divides by train.b1, which is 0; set 0.9.")
        if kind.averages and self.ema_decay:
            raise ConfigError(f"train.optimizer={self.optimizer} averages weights itself; set train.ema_decay=0.")

    @property
    def steps(self) -> int:
        """Whole batches in `tokens`.

        Raises:
            ConfigError: the batch size is still to be found.
        """
        if not self.batch_size:
            raise ConfigError(
                "train.batch_size is 0, and no training has found a size yet: begin one (saejax train), or set it."
            )
        return self.tokens // self.batch_size

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_fraction * self.steps)


def usual_rate(config: OptimSettings, d_in: int, d_sae: int) -> float:
    """min(20 (batch_size / 1024)^(1/4) / sqrt(steps d_in sqrt(d_sae)), 0.03), to three digits: what train.lr=0 means.

    Fitted to TopK under adam (benchmarks/quality/rates.md); other optimizers have a multiple of it that is not
    measured. For 16,384 latents of width 1,024 and 244,000 steps of 2,048 it is 1.3e-4, where dictionary_learning has
    2e-4; for 4,096 of width 768 and 195,000 steps of 1,024 it is 2e-4, where SynthSAEBench has 3e-4 (arXiv:2602.14687).

    Raises:
        ConfigError: batch_size is 0, so that there is no number of steps yet.
    """
    return float(f"{OPTIMIZERS[config.optimizer].rate * _adams_rate(config, d_in, d_sae):.3g}")


def _adams_rate(config: OptimSettings, d_in: int, d_sae: int) -> float:
    return min(20 * (config.batch_size / 1024) ** 0.25 / math.sqrt(config.steps * d_in * math.sqrt(d_sae)), 0.03)


def usual_bias_rate(config: OptimSettings, d_in: int, d_sae: int, least: float) -> float:
    """min(least max(1, 7 / (steps x usual rate)), 20), to two digits: what train.b_enc_rate=None means.

    Adam moves a parameter by at most about its rate a step, so steps x rate is how far biases get. On the known truth
    and the demo model that is 7 and 10, and `least` is enough; in 800 steps on an encoder's layer it is 2.7, and with 2
    a tenth of TopK's latents died at L0 12, with 6 a fiftieth (benchmarks/quality/encoder.md has its data).
    """
    far = config.steps * _adams_rate(config, d_in, d_sae)
    return float(f"{min(least * max(1.0, 7 / far), 20.0):.2g}")


def make_schedule(config: OptimSettings) -> optax.Schedule:
    """Step -> learning rate: linear warm-up from 0, then what `config.schedule` says."""
    if not config.lr:  # nothing would be learnt
        raise ConfigError("train.lr is 0, and nothing has said which rate that means yet: set train.lr.")
    warmup = config.warmup_steps
    after = SCHEDULES[config.schedule](config, max(1, config.steps - warmup))
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, max(1, warmup)), after], [warmup])


def _clip(most: float) -> optax.GradientTransformationExtraArgs:
    """g min(1, most / ||g||): as Optax's, but one factor for all, which the optimizer's own pass takes along."""

    def update(grads: Any, state: Any, params: Any = None, *, norm: Any = None, **others: Any) -> tuple[Any, Any]:
        norm = optax.tree.norm(grads) if norm is None else norm
        factor = most / jnp.maximum(norm, most)
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _faster_biases(config: OptimSettings, least: float, spread: Sequence[float]) -> optax.GradientTransformation:
    """Updates with b_enc's train.b_enc_rate times as large, where the encoder has a centre; it has no state.

    What the usual rate is times, the spread, is one number for all latents or one for each group.
    """
    of_groups = np.asarray(spread or (1.0,), np.float32)
    relative = of_groups[:, None] if len(of_groups) > 1 else of_groups[0]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if "centre" not in updates:
            return updates, state
        times: Any = config.b_enc_rate
        if times is None:
            d_in, d_sae = updates["W_enc"].shape[-2:]
            times = usual_bias_rate(config, d_in, d_sae, least) * relative
        return {name: times * value if name == "b_enc" else value for name, value in updates.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# Adam's b2 by whether the encoder has a centre. On the demo model (one seed, rate 1e-2) 29 % of jumprelu's latents died
# with 0.99 and 2 % with 0.999; topk and batchtopk, which have a centre, lose 0.004 and 0.007 of FVE with 0.999.
_B2 = {True: 0.99, False: 0.999}


def _base_optimizer(config: OptimSettings, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optimizer of the settings; where they leave b2 open, with what the parameters ask for."""
    make = OPTIMIZERS[config.optimizer].make
    if config.b2 is not None:
        return make(config, schedule)
    by_centre = {has: make(dataclasses.replace(config, b2=b2), schedule) for has, b2 in _B2.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return by_centre["centre" in updates].update(updates, state, params)

    return optax.GradientTransformation(lambda params: by_centre["centre" in params].init(params), update)


def make_optimizer(
    config: OptimSettings, bias_rate: float = 2.0, spread: Sequence[float] = ()
) -> optax.GradientTransformationExtraArgs:
    """Clip to the global norm, then the optimizer on its schedule, then the plateau's factor, and that of b_enc.

    `bias_rate` is the least that train.b_enc_rate=None means: the `Sparsity.bias_rate` of what is trained. `spread` is
    that of what the encoder reads (`start.read_spread`); none counts as 1.
    `update` takes `value`, the loss, which only the plateau looks at, and `norm`, the gradients', if it is known.
    """
    clip = _clip(config.clip_norm) if config.clip_norm else optax.identity()
    chain = [clip, _base_optimizer(config, make_schedule(config))]
    if config.schedule == "plateau":
        chain.append(
            contrib.reduce_on_plateau(
                factor=config.plateau_factor, patience=config.plateau_patience, accumulation_size=config.plateau_window
            )
        )
    if config.b_enc_rate != 1 and not OPTIMIZERS[config.optimizer].averages:
        chain.append(_faster_biases(config, bias_rate, spread))
    return optax.with_extra_args_support(optax.chain(*chain))


def steps_taken(opt_state: optax.OptState, steps: Any) -> Any:
    """Steps of its schedule that the optimizer has taken: what it did not take of `steps` did not move it.

    `steps` themselves for schedule_free without a warm-up, which has no schedule.
    """
    schedules = states_of(opt_state, optax.ScaleByScheduleState)
    return schedules[0].count if schedules else steps


def learning_rate_factor(opt_state: optax.OptState) -> Any:
    """The factor by which the plateau has multiplied the schedule's learning rate; 1 without one."""
    plateaus = states_of(opt_state, contrib.ReduceLROnPlateauState)
    return plateaus[0].scale if plateaus else 1.0


def states_of(opt_state: optax.OptState, kind: Any) -> list[Any]:
    """The states of one kind within an optimizer's, wherever they stand in it."""
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def start_average(config: OptimSettings, params: Any) -> Any:
    """The weights that evaluation reads before the first step: a copy, or {} where they are those being trained."""
    averages = config.ema_decay or OPTIMIZERS[config.optimizer].averages
    return jax.tree.map(jnp.array, params) if averages else {}


def next_average(config: OptimSettings, averaged: Any, params: Any, opt_state: Any, step: jax.Array) -> Any:
    """The average after a step that left `params` and `opt_state`; `step` counts those before it.

    EMA:           a <- d a + (1 - d) w,   d = min(ema_decay, (1 + step) / (10 + step)), so that the start is forgotten
    schedule-free: the optimizer's own average (Defazio et al. 2024, arXiv:2405.15682)
    """
    if OPTIMIZERS[config.optimizer].averages:
        return contrib.schedule_free_eval_params(states_of(opt_state, contrib.ScheduleFreeState)[0], params)
    if not config.ema_decay:
        return averaged
    decay = jnp.minimum(config.ema_decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, averaged, params)
