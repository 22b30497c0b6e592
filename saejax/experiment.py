"""The door for experiment files: every key with its default, shipped experiments to start from, and the check."""

from saejax.app.experiment import Experiment, default_config, experiment
from saejax.app.experiments import shipped

__all__ = ["Experiment", "default_config", "experiment", "shipped"]
