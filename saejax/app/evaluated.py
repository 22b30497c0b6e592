"""The folders that exports and explanations take: a run's, or that of a dictionary which `--sae` evaluated.

Of the latter, runs/<name>/evaluated/<dictionary>, eval.json says where the dictionary lies, its sha256, and the
experiment on whose model and text it was evaluated.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from saejax.app.experiment import Experiment, read_experiment, recorded
from saejax.app.loading import load
from saejax.app.workspace import Workspace
from saejax.capture import store_identity
from saejax.core.config import differences, to_json
from saejax.core.errors import DataError
from saejax.core.files import finite, read_object
from saejax.runs import Run
from saejax.trained import TrainedCoder


def experiment_of(folder: str | Path) -> Experiment:
    """The experiment of a run or of an evaluated dictionary, wherever its folder was moved to: that is its run_dir.

    Of a run with several attempts (`gates.retries`) it is that of the one that is kept.

    Raises:
        DataError: the folder is neither.
    """
    path = Path(folder)
    path = path if path.name not in ("", "..") else Path(os.path.abspath(path))
    run = Run(path).counted()
    e = read_experiment(run.config) if run.exists else recorded(run.evaluation, _evaluation(run)["experiment"])
    return dataclasses.replace(e, runs_dir=str(run.path.parent), name=run.path.name)


def coder_of(folder: Path, step: int | str | None = None) -> TrainedCoder:
    """The coder of a run, or the dictionary that was evaluated, with the model's names for its hook points.

    Raises:
        DataError: it cannot be read, or is another one by now.
    """
    if Run(folder).exists:
        return load(folder, step)
    content = _evaluation(Run(folder))
    source, reads, writes = content["source"], tuple(content["reads"]), tuple(content["writes"])
    if step is not None:
        raise DataError(f"{folder} is the evaluation of one dictionary; --step={step} is for runs.")
    try:
        sae = load(source, hook_points=(*reads, *writes))
    except DataError as error:
        raise DataError(f"{folder} is the evaluation of {source}, which cannot be read from here: {error}") from None
    sae = dataclasses.replace(sae, sites=dataclasses.replace(sae.sites, reads=reads, writes=writes))
    if sae.fingerprint() != content["sha256"]:
        raise DataError(
            f"{source} is another dictionary than the one that was evaluated into {folder}. Evaluate it again: saejax "
            f"report --config=... --sae={source} --redo"
        )
    return sae


def agree(work: Workspace) -> None:
    """Raise DataError where text or model are not those that the run was made from, or the dictionary evaluated on."""
    e = work.experiment
    if not e.run.is_dictionary:
        work.verify_text_and_model()
    elif changed := differences(_evaluation(e.run)["on"], evaluated_on(work)):
        raise DataError(f"{e.run_dir} was evaluated on another text or model ({'; '.join(changed[:5])}). Restore it.")


def evaluated_on(work: Workspace) -> dict[str, Any]:
    """What decides the figures of a dictionary besides itself, as JSON."""
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
    names = [content.get(key) for key in ("reads", "writes")]
    if not isinstance(content.get("source"), str) or not all(
        isinstance(own, list) and all(isinstance(name, str) for name in own) for own in names
    ):
        raise DataError(
            f"{run.evaluation} is damaged: it does not say which dictionary it is about. Evaluate it again."
        )
    return content
