"""What a training run may be told."""

import dataclasses
import math
from collections.abc import Callable

from saejax.core.config import in_float32, nearest
from saejax.core.errors import ConfigError
from saejax.training.best import BETTER

OPTIMIZERS = ("adam", "adamw", "adafactor", "muon", "lion", "schedule_free")
SCHEDULES = ("cosine", "constant", "linear", "cosine_restarts", "plateau", "decay")
_DECAYED_WEIGHTS = ("adamw", "lion", "muon")
_NO_MOMENTS_PER_LATENT = ("adafactor", "schedule_free")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Training of one coder.

    Attributes:
        tokens: activations to train on, over as many epochs of the store as that takes.
        max_rows: use at most so many stored activations (a sample limit); 0 uses all.
        batch_size: activations in a step.
        accumulate: the batch is taken in so many parts, one after the other, to save memory; each must divide among the
            devices along "data". The variance in FVU and FVE stays that of the whole batch, dead latents are those from
            before it, and statistics move once a step. batchtopk selects within a part, AuxK's residual has the
            variance of a part, and a target L0 is reached in each. A part has two activations at least: one alone has
            no variance.
        optimizer: adam, adamw, adafactor, muon (orthogonalised updates for matrices, adam for the rest), lion or
            schedule_free (adamw that needs no schedule; evaluation reads its averaged weights).
        lr, b1, b2, eps: of the optimizer, where it has them (adafactor has only lr, lion no eps; of muon b1, b2 and
            eps are those of its adam).
        weight_decay: of adamw, lion and muon; of weight matrices alone, not of biases and thresholds.
        schedule: after a linear warm-up: `decay` (constant, then linear to lr x final_lr_fraction over the last
            decay_fraction); `constant`; `cosine` or `linear`, down to lr x final_lr_fraction; `cosine_restarts` (cycles
            of growing length); `plateau` (down when the training loss stalls).
        warmup_fraction: share of the steps over which the learning rate rises from 0.
        final_lr_fraction: where schedules end, as a share of lr.
        decay_fraction: share of the steps that `decay` takes.
        restart_period, restart_multiplier: first cycle of cosine_restarts, as a share of the steps after the warm-up;
            each next one is so many times longer (T_mult).
        plateau_factor, plateau_patience, plateau_window: the rate is multiplied by the factor when the loss, averaged
            over windows of so many steps, has not fallen for `patience` windows.
        clip_norm: gradients are scaled down to this global norm; 0 leaves them.
        ema_decay: evaluation reads an exponential moving average of the weights with this decay (at first with
            (1 + step) / (10 + step), if that is smaller); 0 reads the weights themselves.
        resample_every, resample_until_fraction: every so many steps, up to this share of training, latents that have
            not fired for half as long start anew from badly reconstructed tokens; 0 never.
        early_stop_patience, early_stop_min_delta: stop when so many validations in a row did not raise val/fve by more
            than this; 0 never stops early.
        max_skipped_steps: a step whose loss or gradient is not finite is not taken, but counted; after so many in a row
            training stops and says which rows they had. 1 stops at the first.
        spike_factor: nor is a step taken whose loss exceeds this many times the median of the last 32; 0 takes them.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: how many of the last ones stay.
        keep_best: val/fve, val/r2 or val/relative_error: a validation that is the best so far by it is saved, and that
            checkpoint stays too (`saejax.load(run, step="best")`); "" keeps none for being best.
        keep_every: also every checkpoint stays whose step is a multiple of this; 0 for none.
        validate_every: steps between validations on held-out activations; 0 for none.
        validate_epochs: the same as a share of an epoch of the store; 0 leaves it to validate_every.
        log_every: steps between rows of metrics.jsonl.
        block_chunks: inner chunks of the store that are shuffled together in memory.
        shares: the store is dealt out to so many streams, and a batch is as many rows of each. Several processes then
            read the chunks of their own rows alone, where each has whole shares: a multiple of the processes.
        tensorboard: also write TensorBoard events into the run's folder.
    """

    tokens: int = 100_000_000
    max_rows: int = 0
    batch_size: int = 4096
    accumulate: int = 1
    optimizer: str = "adam"
    lr: float = 3e-4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "decay"
    warmup_fraction: float = 0.05
    final_lr_fraction: float = 0.1
    decay_fraction: float = 0.2
    restart_period: float = 0.25
    restart_multiplier: float = 2.0
    plateau_factor: float = 0.5
    plateau_patience: int = 5
    plateau_window: int = 50
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    resample_every: int = 0
    resample_until_fraction: float = 0.5
    early_stop_patience: int = 0
    early_stop_min_delta: float = 0.0
    max_skipped_steps: int = 10
    spike_factor: float = 0.0
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    keep_best: str = ""
    keep_every: int = 0
    validate_every: int = 250
    validate_epochs: float = 0.0
    log_every: int = 10
    block_chunks: int = 64
    shares: int = 1
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name, known in (("schedule", SCHEDULES), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"train.{name} is {getattr(self, name)!r}.{nearest(getattr(self, name), known)}")
        for holds, must, names in _RANGES:
            for name in names:
                value = getattr(self, name)
                if not holds(in_float32(value)):
                    seen = " in float32" if holds(value) else ""
                    raise ConfigError(f"train.{name} is {value}; it must be {must}{seen}.")
        if self.tokens < self.batch_size:
            raise ConfigError(f"train.tokens is {self.tokens}, less than one batch of {self.batch_size}.")
        if self.max_rows and self.max_rows < self.batch_size:
            raise ConfigError(f"train.max_rows is {self.max_rows}, less than one batch of {self.batch_size}.")
        if self.batch_size % self.shares:
            raise ConfigError(f"train.batch_size {self.batch_size} is not a multiple of train.shares {self.shares}.")
        if self.batch_size % self.accumulate:
            raise ConfigError(f"train.batch_size {self.batch_size} is not a multiple of accumulate {self.accumulate}.")
        if self.batch_size // self.accumulate < 2:
            raise ConfigError(
                f"train.batch_size {self.batch_size} with train.accumulate {self.accumulate} leaves parts of one "
                "activation, which has no variance. Raise batch_size or lower accumulate: a part needs two."
            )
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        if self.weight_decay and self.optimizer not in _DECAYED_WEIGHTS:
            raise ConfigError(
                f"train.weight_decay is set, but {self.optimizer} has none; "
                f"use {', '.join(_DECAYED_WEIGHTS)}, or set 0."
            )
        if self.optimizer == "schedule_free" and self.schedule != "constant":
            raise ConfigError(
                f"train.optimizer=schedule_free replaces the schedule {self.schedule!r} by averaging; "
                "set train.schedule=constant."
            )
        if self.optimizer == "schedule_free" and not self.b1:
            raise ConfigError("train.optimizer=schedule_free divides by train.b1, which is 0; set 0.9.")
        if self.optimizer == "schedule_free" and self.ema_decay:
            raise ConfigError("train.optimizer=schedule_free averages weights itself; set train.ema_decay=0.")
        if self.resample_every and self.optimizer in _NO_MOMENTS_PER_LATENT:
            raise ConfigError(
                f"train.resample_every needs moments of each latent to reset, which {self.optimizer} has not; "
                "use adam, adamw, lion or muon."
            )
        if 0 < self.spike_factor <= 1:
            raise ConfigError(f"train.spike_factor is {self.spike_factor}: half of all losses are above; set 3, or 0.")
        if self.keep_best and self.keep_best not in BETTER:
            raise ConfigError(f"train.keep_best is {self.keep_best!r}.{nearest(self.keep_best, BETTER)}")
        if self.keep_best and not (self.validate_every or self.validate_epochs):
            raise ConfigError("train.keep_best needs validations; set train.validate_every.")
        if self.early_stop_patience and not (self.validate_every or self.validate_epochs):
            raise ConfigError("train.early_stop_patience needs validations; set train.validate_every.")

    @property
    def steps(self) -> int:
        """Whole batches in `tokens`."""
        return self.tokens // self.batch_size

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_fraction * self.steps)

    def validation_interval(self, epoch_rows: int) -> int:
        """Steps between validations, for a store of `epoch_rows` activations; 0 for none."""
        if not self.validate_epochs:
            return self.validate_every
        return max(1, round(self.validate_epochs * epoch_rows / self.batch_size))


# What must hold of values, as float32 has them, how to say it, and of which. Comparisons are such that NaN fails them.
_RANGES: tuple[tuple[Callable[[float], bool], str, tuple[str, ...]], ...] = (
    (
        lambda value: 1 <= value < math.inf,
        "at least 1, and finite",
        (
            *(
                "batch_size",
                "accumulate",
                "checkpoint_every",
                "keep_checkpoints",
                "log_every",
                "block_chunks",
                "shares",
            ),
            *("plateau_patience", "plateau_window", "restart_multiplier", "max_skipped_steps"),
        ),
    ),
    (
        lambda value: 0 <= value < math.inf,
        "finite, not negative",
        (
            *("max_rows", "weight_decay", "clip_norm", "resample_every"),
            *(
                "early_stop_patience",
                "early_stop_min_delta",
                "validate_every",
                "validate_epochs",
                "spike_factor",
                "keep_every",
            ),
        ),
    ),
    # What a step counts is an int32.
    (
        lambda value: value < 2**31,
        f"at most {2**31 - 1}",
        ("steps", "accumulate", "resample_every", "plateau_patience", "plateau_window"),
    ),
    (lambda value: 0 < value < math.inf, "positive and finite", ("lr", "eps")),
    (lambda value: 0 <= value < 1, "below 1, and not negative", ("b1", "b2", "ema_decay")),
    (
        lambda value: 0 <= value <= 1,
        "between 0 and 1",
        ("warmup_fraction", "final_lr_fraction", "decay_fraction", "resample_until_fraction"),
    ),
    (lambda value: 0 < value <= 1, "above 0 and at most 1", ("restart_period",)),
    (lambda value: 0 < value < 1, "above 0 and below 1", ("plateau_factor",)),
)
