"""L4: training a coder on stored activations, exactly resumable."""

from saejax.core.errors import EXIT_PREEMPTED
from saejax.training.config import TRAINING_RECIPES, TrainConfig, apply_training_recipe
from saejax.training.loop import Outcome, Setup, run_loop
from saejax.training.profile import Profiler
from saejax.training.program import Program, program_of_one, put_on
from saejax.training.state import TrainState

__all__ = [
    "EXIT_PREEMPTED",
    "TRAINING_RECIPES",
    "Outcome",
    "Profiler",
    "Program",
    "Setup",
    "TrainConfig",
    "TrainState",
    "apply_training_recipe",
    "program_of_one",
    "put_on",
    "run_loop",
]
