"""How long a training is: what schedules and resampling count by."""

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
    batch_size: int = setting(4096, "Activations in a step.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < self.batch_size:
            raise ConfigError(f"train.tokens is {self.tokens}, less than one batch of {self.batch_size}.")
        if self.steps >= 2**31:  # what a step counts is an int32
            raise ConfigError(f"train.steps is {self.steps}; it must be at most {2**31 - 1}.")

    @property
    def steps(self) -> int:
        """Whole batches in `tokens`."""
        return self.tokens // self.batch_size
