"""L8: one command from a behaviour of a language model to the features that cause it."""

from saejax.study.config import Study, study

__all__ = ["Study", "study"]
