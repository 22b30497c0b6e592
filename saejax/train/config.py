"""What a training run may be told."""

import dataclasses

from saejax.core.config import nearest
from saejax.core.errors import ConfigError

SCHEDULES = ("cosine", "constant")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Training of one coder.

    Attributes:
        tokens: activations to train on, over as many epochs of the store as that takes.
        batch_size: activations in a step.
        lr, b1, b2, eps: Adam.
        schedule: `cosine` (warm-up, then down to lr x final_lr_fraction) or `constant` (after warm-up).
        warmup_fraction: share of the steps over which the learning rate rises from 0.
        clip_norm: gradients are scaled down to this global norm; 0 leaves them.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: how many of the last ones stay.
        validate_every: steps between validations on held-out activations; 0 for none.
        log_every: steps between rows of metrics.jsonl.
        block_chunks: inner chunks of the store that are shuffled together in memory.
        tensorboard: also write TensorBoard events into the run's folder.
    """

    tokens: int = 100_000_000
    batch_size: int = 4096
    lr: float = 3e-4
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    schedule: str = "cosine"
    warmup_fraction: float = 0.05
    final_lr_fraction: float = 0.1
    clip_norm: float = 1.0
    checkpoint_every: int = 1000
    keep_checkpoints: int = 3
    validate_every: int = 250
    log_every: int = 10
    block_chunks: int = 64
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"train.schedule is {self.schedule!r}.{nearest(self.schedule, SCHEDULES)}")
        for name in ("batch_size", "checkpoint_every", "keep_checkpoints", "log_every", "block_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.tokens < self.batch_size:
            raise ConfigError(f"train.tokens is {self.tokens}, less than one batch of {self.batch_size}.")
        if not self.lr > 0 or not 0 <= self.warmup_fraction <= 1:
            raise ConfigError("train.lr must be positive and train.warmup_fraction between 0 and 1.")

    @property
    def steps(self) -> int:
        """Whole batches in `tokens`."""
        return self.tokens // self.batch_size
