"""The part of an experiment that decides a training, and the coder that follows from it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from saejax.capture import CaptureConfig
from saejax.coders import Coder, CoderConfig, build
from saejax.core.errors import ConfigError
from saejax.core.settings import Setting
from saejax.parallel import ParallelConfig
from saejax.training import TrainConfig


class Trainable(Protocol):
    """Sections and seeds of an experiment, as far as a training looks at them."""

    @property
    def coder(self) -> CoderConfig: ...

    @property
    def train(self) -> TrainConfig: ...

    @property
    def parallel(self) -> ParallelConfig: ...

    @property
    def capture(self) -> CaptureConfig: ...

    @property
    def start_seed(self) -> int:
        """The seed of the coder's start and of resampling."""
        ...

    @property
    def run_dir(self) -> Path: ...


E = TypeVar("E", bound=Trainable)


@dataclasses.dataclass(frozen=True)
class Member(Generic[E]):
    """One training of a sweep; of a single run the only one, whose name is empty.

    Attributes:
        name: its folder in the sweep's.
        experiment: whole, as a single run would be given it: the sparsity weights are multiplied by the scale.
        unscaled: the same before that.
        sparsity_scale: the factor.
    """

    name: str
    experiment: E
    unscaled: E
    sparsity_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Group(Generic[E]):
    """Members that train as one program. `experiment` is what the program is built from."""

    experiment: E
    members: tuple[Member[E], ...]

    def hyper(self) -> dict[str, list[float]]:
        """Inputs of each member's step: factors of the learning rate and of the sparsity weights, the seed."""
        return {
            "lr": [m.experiment.train.lr / self.experiment.train.lr for m in self.members],
            "sparsity": [m.sparsity_scale for m in self.members],
            "seed": [m.experiment.start_seed for m in self.members],
        }


def coder_of(e: Trainable, d_in: Sequence[int], d_out: Sequence[int]) -> Coder:
    """The coder that `e` trains, for the widths of the hook points that it reads and writes.

    Every door has its coder from here, so that none can leave a setting out.

    Raises:
        ConfigError: settings that do not fit each other or the widths.
    """
    return build(e.coder, d_in, e.train.steps, d_out, e.train.neighbours, e.train.tokens)


def refuse_unused(e: Trainable, lacks: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that would do nothing where a training lacks what it needs (`Setting.needs`).

    Args:
        lacks: {what is not there: the middle of the sentence "train.key=value ... set it to its default"}.
    """
    for section in (e.coder.resolved(), e.train):
        for field in dataclasses.fields(section):
            known: Setting = field.metadata["setting"]
            value, usual = getattr(section, field.name), field.default if known.base is None else known.base
            missing = next((need for need in known.needs if need in lacks), None)
            if missing and value and value != usual:
                raise ConfigError(f"{section.section}.{field.name}={value} {lacks[missing]}set it to {usual!r}.")
