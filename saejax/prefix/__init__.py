"""L6: a latent prefix in place of a text, for frozen language models."""

from saejax.prefix.config import PrefixConfig
from saejax.prefix.records import Record
from saejax.prefix.trained import TrainedPrefix

__all__ = ["PrefixConfig", "Record", "TrainedPrefix"]
