"""The door for experiment files: every key with its default, and the checked experiment."""

from saejax.app.experiment import Experiment, default_config, experiment

__all__ = ["Experiment", "default_config", "experiment"]
