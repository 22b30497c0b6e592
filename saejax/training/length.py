"""The length of a training, by which schedules and resampling count."""

import dataclasses
import math

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting


@dataclasses.dataclass(frozen=True)
class LengthSettings(Settings, section="train"):
    """Activations and steps."""

    tokens: int = setting(
        100_000_000, "Activations to train on, over as many epochs of the store as that takes.", high=math.inf
    )
    batch_size: int = setting(
        4096,
        "Activations in a step. 0 finds the largest power of two from 256 to 65,536 whose compiled step fits the "
        "devices' memory, and which leaves 1,000 steps and 8 batches of the store; the run keeps it.",
        low=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch_size:
            return
        if self.tokens < self.batch_size:
            raise ConfigError(f"train.tokens is {self.tokens}, less than one batch of {self.batch_size}.")
        if self.steps >= 2**31:  # what a step counts is an int32
            raise ConfigError(f"train.steps is {self.steps}; it must be at most {2**31 - 1}.")

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
