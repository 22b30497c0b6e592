"""L4: training a coder on stored activations, exactly resumable."""

from saejax.train.config import TrainConfig
from saejax.train.loop import EXIT_PREEMPTED, Outcome, Setup, train
from saejax.train.state import TrainState

__all__ = ["EXIT_PREEMPTED", "Outcome", "Setup", "TrainConfig", "TrainState", "train"]
