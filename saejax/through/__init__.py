"""L7: a dictionary trained for what the language model does with it: the second loss, and the text that it reads."""

from saejax.through.loss import Through
from saejax.through.text import TextBatches, WithText

__all__ = ["TextBatches", "Through", "WithText"]
