"""L8: one command from a behaviour of a language model to the features that cause it."""

from saejax.study.config import Study, StudyConfig, default_study, study

__all__ = ["Study", "StudyConfig", "default_study", "study"]
