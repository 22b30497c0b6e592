"""L4: training a coder on stored activations, exactly resumable."""

from saejax.train.config import TrainConfig
from saejax.train.loop import EXIT_PREEMPTED, Outcome, Setup, train
from saejax.train.recipes import TRAINING_RECIPES, apply_training_recipe
from saejax.train.state import TrainState

__all__ = [
    "EXIT_PREEMPTED",
    "TRAINING_RECIPES",
    "Outcome",
    "Setup",
    "TrainConfig",
    "TrainState",
    "apply_training_recipe",
    "train",
]
