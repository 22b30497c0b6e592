"""Coders where they lie: in a run, in the folder of an evaluated dictionary, anywhere; with experiment and model.

Of a dictionary that `--sae` evaluated, runs/<name>/evaluated/<dictionary>, eval.json says where it lies, its sha256,
and the experiment on whose model and text it was evaluated.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment, read_experiment, recorded
from saejax.app.load import load
from saejax.app.workspace import Workspace
from saejax.capture import store_identity
from saejax.core.config import to_json
from saejax.core.errors import ConfigError, DataError
from saejax.core.files import finite, read_object
from saejax.lm import LanguageModel, LMConfig
from saejax.lm.pair import load_models
from saejax.runs import Run, differing
from saejax.runs.made import listed
from saejax.runs.shape import fault
from saejax.trained import TrainedCoder


def experiment_of(folder: str | Path) -> Experiment:
    """The experiment of a run or of an evaluated dictionary, wherever its folder was moved to: that is its run_dir.

    Of a run with several attempts (`gates.retries`) it is that of the one that is kept.

    Raises:
        DataError: the folder is neither.
    """
    path = Path(folder)
    run = Run(path if path.name not in ("", "..") else Path(os.path.abspath(path))).counted()
    e = read_experiment(run.config) if run.exists else recorded(run.evaluation, _evaluation(run)["experiment"])
    return dataclasses.replace(e, runs_dir=str(run.path.parent), name=run.path.name)


def coder_at(place: str | Path, step: int | str | None = None) -> TrainedCoder:
    """The coder of a run, an evaluated dictionary, a folder, a file or a hub id.

    An evaluated dictionary has the model's names for its hook points.

    Raises:
        DataError: it cannot be read, or is another one than was evaluated.
    """
    run = Run(Path(place))
    if not run.is_dictionary:
        return load(place, step)
    content = _evaluation(run)
    source, reads, writes = content["source"], tuple(content["reads"]), tuple(content["writes"])
    if step is not None:
        raise DataError(f"{place} is the evaluation of one dictionary; --step={step} is for runs.")
    try:
        sae = load(source, hook_points=(*reads, *writes))
    except DataError as error:
        raise DataError(f"{place} is the evaluation of {source}, which cannot be read from here: {error}") from None
    sae = dataclasses.replace(sae, sites=dataclasses.replace(sae.sites, reads=reads, writes=writes))
    if sae.fingerprint() != content["sha256"]:
        raise DataError(
            f"{source} is another dictionary than the one that was evaluated into {place}. Evaluate it again: saejax "
            f"report --config=... --sae={source} --redo"
        )
    return sae


def verify_made_from(work: Workspace) -> None:
    """Raise DataError where text or model are not those that the run was made from, or the dictionary evaluated on."""
    run = work.experiment.run
    if not run.is_dictionary:
        work.verify_text_and_model()
    elif changed := differing({"on": _evaluation(run)["on"]}, {"on": evaluation_identity(work)}):
        raise DataError(f"{run.path} was evaluated on another text or model ({listed(changed)}). Restore it.")


def evaluation_identity(work: Workspace) -> dict[str, Any]:
    """All that decides the figures of a dictionary besides itself, as JSON."""
    e = work.experiment
    identity = store_identity(work.lm, work.source, e.text, "heldout", e.capture)
    identity.pop("parts", None)  # which process captures what; nothing is captured here
    return json.loads(json.dumps(finite(identity | {"dtype": e.lm.dtype, "eval": to_json(e.eval)})))


def _evaluation(run: Run) -> dict[str, Any]:
    """eval.json of an evaluated dictionary."""
    content = read_object(run.evaluation) if run.is_dictionary else {}
    if "dictionary" not in content:
        raise DataError(
            f"{run.path} is no run. Give a folder such as runs/quickstart, or of a dictionary that `saejax report "
            "--sae` has shown, such as runs/quickstart/evaluated/theirs."
        )
    if fault(content, {"source": str, "reads": [str], "writes": [str]}):
        raise DataError(
            f"{run.evaluation} is damaged: it does not say which dictionary it is about. Evaluate it again."
        )
    return content


def with_model(places: Sequence[str], model: str = "", adapter: str = "") -> tuple[list[TrainedCoder], LanguageModel]:
    """The coders at places (`coder_at`), and their model.

    Args:
        model: the language model; empty for the first dictionary's own.
        adapter: a folder of changes of it (`LMConfig.adapter`).

    Raises:
        ConfigError: it is not said which model it is, they are of several, or JAX does not run it.
        DataError: a dictionary or the model cannot be read.
    """
    saes = [coder_at(place) for place in places]
    if not model:
        refuse_several_models(
            {place: sae.origin.model for place, sae in zip(places, saes, strict=True)}, "--model=NAME"
        )
    c = model_config(places[0], saes[0], model)
    lm = load_models(dataclasses.replace(c, second="", adapter=adapter or c.adapter))
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


def model_config(place: str, sae: TrainedCoder, model: str = "") -> LMConfig:
    """The language model that the coder of a place belongs to; `model` names another.

    Raises:
        ConfigError: it is not said which.
    """
    if model:
        return dataclasses.replace(sae.origin.lm, model=model, revision="")
    if Run(Path(place)).exists or Run(Path(place)).is_dictionary:
        return experiment_of(place).lm
    if not sae.origin.model:
        raise ConfigError(f"{place} does not say which language model it belongs to: --model=owner/name")
    return sae.origin.lm
