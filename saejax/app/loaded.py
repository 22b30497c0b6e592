"""Dictionaries together with the language model that they belong to."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from saejax.app.evaluated import coder_of, experiment_of
from saejax.app.loading import load
from saejax.core.errors import ConfigError
from saejax.lm import LanguageModel, LMConfig, load_lm
from saejax.lm.torch_hooks import TorchModel
from saejax.runs import Run
from saejax.trained import TrainedCoder


def with_model(places: Sequence[str], model: str = "") -> tuple[list[TrainedCoder], LanguageModel]:
    """The dictionaries of runs, evaluated dictionaries, folders, files or hub ids, and their model.

    Args:
        model: the language model; empty for the first dictionary's own.

    Raises:
        ConfigError: it is not said which model it is, they are of several, or JAX does not run it.
        DataError: a dictionary or the model cannot be read.
    """
    saes = [coder_at(place) for place in places]
    if not model:
        refuse_several_models(
            {place: sae.origin.model for place, sae in zip(places, saes, strict=True)}, "--model=NAME"
        )
    lm = model_of(places[0], saes[0], model)
    if not isinstance(lm, LanguageModel):
        raise ConfigError(
            f"{lm.identity['model']} is run by PyTorch; this needs a model that JAX runs (lm.backend=jax)."
        )
    return saes, lm


def refuse_several_models(models: Mapping[str, str], named_by: str = "") -> None:
    """Raise ConfigError where dictionaries that belong together are of different language models.

    Args:
        models: {place of a dictionary: its model, empty where it does not say}.
        named_by: what a user gives to say that all of them are of one model.
    """
    known = {place: model for place, model in models.items() if model}
    first = next(iter(known), "")
    if other := next((place for place, model in known.items() if model != known[first]), ""):
        also = f"; if both names mean one model, say it: {named_by}" if named_by else ""
        raise ConfigError(
            f"{first} is of the model {known[first]}, and {other} of {known[other]}. Give those of one model{also}."
        )


def coder_at(place: str) -> TrainedCoder:
    """The dictionary of a run, an evaluated dictionary, a folder, a file or a hub id.

    Raises:
        DataError: it cannot be read.
    """
    return coder_of(Path(place)) if _of_run(place) else load(place)


def model_config(place: str, sae: TrainedCoder, model: str = "") -> LMConfig:
    """Which language model the dictionary of a place belongs to; `model` names another.

    Raises:
        ConfigError: it is not said which.
    """
    if model:
        return LMConfig(model)
    if _of_run(place):
        return experiment_of(place).lm
    if not sae.origin.model:
        raise ConfigError(f"{place} does not say which language model it belongs to: --model=owner/name")
    return LMConfig(sae.origin.model, sae.origin.revision)


def model_of(place: str, sae: TrainedCoder, model: str = "") -> LanguageModel | TorchModel:
    """The (first) language model of a dictionary, loaded.

    Raises:
        ConfigError: as `model_config`.
        DataError: the model cannot be read.
    """
    c = model_config(place, sae, model)
    return load_lm(c.model, c.revision, c.dtype, c.backend, c.device)


def _of_run(place: str) -> bool:
    return Run(Path(place)).exists or Run(Path(place)).evaluation.is_file()
