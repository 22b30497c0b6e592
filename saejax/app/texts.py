"""Text that a program holds, as what evaluates a dictionary reads it."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from saejax.capture import Sinks
from saejax.capture.config import CaptureConfig
from saejax.core.config import shortened
from saejax.core.errors import ConfigError, DataError
from saejax.core.places import type_in_words
from saejax.lm.forward import Model
from saejax.text import Packer, Source
from saejax.trained import TrainedCoder

_LONGEST_ROW = 256


@dataclasses.dataclass(frozen=True)
class PackedTexts:
    """A dictionary and the text that it is looked at on.

    Attributes:
        sae: with the model's own names for its hook points.
        packer: the text as rows.
        tokens: how many the text has.
        sinks: those that the dictionary's own training left out.
    """

    sae: TrainedCoder
    packer: Packer
    tokens: int
    sinks: Sinks


def packed_texts(sae: TrainedCoder, lm: Model, text: str | Sequence[str], door: str) -> PackedTexts:
    """One document or several, as rows of the model's context, at most 256 tokens.

    A document that is longer than a row is cut. A model with a bos reads it in front of each row. Of a dictionary that
    does not say how its activations were captured the sinks are those of `CaptureConfig`.

    Args:
        door: the function that was called, for messages.

    Raises:
        ConfigError: no dictionary or no model, or the model has no such hook point.
        DataError: no text, or a model of another width.
    """
    named = at_model(sae, lm, door)
    texts = [text] if isinstance(text, str) or not isinstance(text, Sequence) else list(text)
    if not all(isinstance(one, str) for one in texts):
        raise DataError(f"{door} takes a text or a list of texts, not {shortened(text)}.")
    if not any(one.strip() for one in texts):
        raise DataError(f"{door} needs text, and there is none.")

    def rows(start: int) -> Iterator[tuple[int, str, str, str]]:
        return ((i, f"text {i}", texts[i], texts[i]) for i in range(start, len(texts)))

    digest = hashlib.sha256("\0".join(texts).encode(errors="surrogatepass")).hexdigest()
    length = min(_LONGEST_ROW, lm.config.context_length)
    packer = Packer(Source({"sha256": digest}, rows, 1.0), lm.tokenizer, length, prepend_bos=has_bos(lm))
    return PackedTexts(named, packer, max(1, sum(map(len, lm.tokenizer.encode_many(texts)))), _sinks(sae))


def has_bos(lm: Model) -> bool:
    """Texts of a program get the model's bos: it is known to have one."""
    return not lm.tokenizer.bos_unknown and bool(lm.tokenizer.bos)


def at_model(sae: TrainedCoder, lm: Model, door: str) -> TrainedCoder:
    """The dictionary with the model's own names for its hook points. Raises: as `packed_texts`."""
    if not isinstance(sae, TrainedCoder):
        raise ConfigError(f"{door} takes a dictionary and then its model; the first is {type_in_words(sae)}.")
    return sae.at(lm)


def _sinks(sae: TrainedCoder) -> Sinks:
    recorded = sae.settings.get("capture")
    known = recorded if isinstance(recorded, Mapping) else {}
    first, ratio = (known.get(key, getattr(CaptureConfig, key)) for key in ("drop_first", "max_norm_ratio"))
    whole = isinstance(first, int) and isinstance(ratio, int | float)
    return Sinks(first, float(ratio)) if whole else CaptureConfig().sinks
