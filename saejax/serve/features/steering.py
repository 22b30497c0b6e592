"""The text of a model with some latents changed, beside that without, for a page."""

from typing import Any

from saejax.app.steer import Operation, features, steer
from saejax.core.errors import ConfigError
from saejax.interventions import Interventions
from saejax.lm.generation import Sampling


def steered_text(
    inside: Interventions, latents: list[int | str], operation: str, scale: float, prompt: str, **choice: Any
) -> dict[str, Any]:
    """{prompt, without, with, about, operation, tokens_without, tokens_with}, as `saejax steer` prints it.

    Args:
        inside: with one dictionary.
        latents: numbers, or layer:latent of a cross-layer transcoder.
        choice: tokens, temperature, top_p, seed, as of `Sampling`.

    Raises:
        ConfigError: latents, an operation or numbers that are not there.
        DataError: a prompt without a token, or longer than the model reads.
    """
    lm, (name, sae) = inside.lm, next(iter(inside.dictionaries.items()))
    if not lm.tokenizer.encode_behind_bos([prompt])[0]:
        raise ConfigError("The prompt is empty: give the text that the model continues.")
    numbers = features(",".join(map(str, latents)), sae, "features")
    change = Operation(operation, numbers, scale)
    sampling = Sampling(**choice, stop=tuple(lm.tokenizer.special_ids))
    (written,) = steer(inside, name, change, [prompt], sampling)
    return {
        "prompt": prompt,
        "without": lm.tokenizer.decode_inside(written.without),
        "with": lm.tokenizer.decode_inside(written.changed),
        "about": written.about,
        "operation": change.reads,
        "tokens_without": lm.tokenizer.pieces(written.without),
        "tokens_with": lm.tokenizer.pieces(written.changed),
    }
