"""Dictionaries together with the language model that they belong to."""

from collections.abc import Sequence
from pathlib import Path

from saejax.app.evaluated import coder_of, experiment_of
from saejax.app.loading import is_run, load
from saejax.core.errors import ConfigError
from saejax.lm import LanguageModel, load_lm
from saejax.trained import TrainedCoder


def with_model(places: Sequence[str], model: str = "") -> tuple[list[TrainedCoder], LanguageModel]:
    """The dictionaries of runs, evaluated dictionaries, folders, files or hub ids, and their model.

    Args:
        model: the language model; empty for the first dictionary's own.

    Raises:
        ConfigError: it is not said which model it is, or JAX does not run it.
        DataError: a dictionary or the model cannot be read.
    """
    saes = [coder_of(Path(place)) if _of_run(place) else load(place) for place in places]
    first, sae = places[0], saes[0]
    if not (model or sae.origin.model or _of_run(first)):
        raise ConfigError(f"{first} does not say which language model it belongs to: --model=owner/name")
    if model:
        lm = load_lm(model)
    elif _of_run(first):
        c = experiment_of(first).lm
        lm = load_lm(c.model, c.revision, c.dtype, c.backend, c.device)
    else:
        lm = load_lm(sae.origin.model, sae.origin.revision)
    if not isinstance(lm, LanguageModel):
        raise ConfigError(
            f"{lm.identity['model']} is run by PyTorch; this needs a model that JAX runs (lm.backend=jax)."
        )
    return saes, lm


def _of_run(place: str) -> bool:
    return is_run(place) or (Path(place) / "eval.json").is_file()
