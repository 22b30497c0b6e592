"""`saejax.load`: a trained coder from a run, a saved folder, another project's files or the hub. One CPU is enough."""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax import interop
from saejax.app.attempts import is_attempt, kept_folder
from saejax.app.experiment import read_experiment
from saejax.app.hub import fetched, hub_place
from saejax.app.provenance import PROVENANCE, read_provenance
from saejax.checkpoints import Checkpoints
from saejax.coders import SPARSITIES, CoderConfig, build
from saejax.core.config import plain, to_json
from saejax.core.errors import DataError
from saejax.core.files import read_object
from saejax.core.metrics import last_rows
from saejax.core.places import as_place
from saejax.evals.attempts import FIRST
from saejax.trained import Origin, TrainedCoder, folded, is_saved, sites_from_meta, unscaled


def load(path: str | os.PathLike[str], step: int | str | None = None, hook_points: Sequence[str] = ()) -> TrainedCoder:
    """The coder of a run, in a folder that `TrainedCoder.save` wrote, or of another project (`saejax formats`).

    Args:
        path: the folder or file; or hf://owner/name[@revision][/sub/folder] of the hub. hf:// may be left out where
            nothing is at the path and no folder `owner` is here. origin.source then names the commit. Of a run that was
            tried again (gates.retries) it is the attempt that is kept, which origin.notes says; runs/<name>/attempt-0
            is the run's own.
        step: of a run: which checkpoint (default: the newest), or "best" for what train.keep_best kept.
        hook_points: (what it reads,) or (reads, writes), for files of other projects that do not say.

    Raises:
        DataError: no coder there, several, no such checkpoint, or a damaged file (it is named).
    """
    path, source = as_place(path, "saejax.load", "a run, a folder, a file or hf://owner/name"), ""
    if asked := hub_place(path):
        path, source = fetched(asked)
    path = Path(path)
    if not source and path.name == FIRST and not path.exists() and is_run(path.parent):
        return load_run(path.parent, step)
    if not source and is_run(path):
        return load_run(kept_folder(path), step)
    sae = interop.read(path, hook_points)
    if source:
        sae = dataclasses.replace(sae, origin=dataclasses.replace(sae.origin, source=source))
    if step is not None:
        raise DataError(f"{source or path} is a saved coder and holds one step; step={step!r} is for run folders.")
    return sae


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a run of saejax: it has a config.json, and no other project's files."""
    path = Path(path)
    others = (format.here(path) for format in interop.FORMATS.values())
    try:
        return (path / "config.json").is_file() and not is_saved(path) and not any(others)
    except OSError:  # what may not be looked into is nothing; whoever reads it says why
        return False


def load_run(run: Path, step: int | str | None = None) -> TrainedCoder:
    """As `load`, of this very run, whichever of its attempts is kept."""
    experiment = read_experiment(run / "config.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        step = plain(step)
        at = _best(run, checkpoints) if step == "best" else checkpoints.latest() if step is None else step
        if not isinstance(at, int) or at not in checkpoints.steps():
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            raise DataError(f"{run} has no checkpoint of step {at!r}; it has: {there}.")
        items, meta = checkpoints.restore_numpy(at, names=("params", "averaged", "stats"))
    if meta.get("kind") == "prefix":
        raise DataError(f"{run} holds a prefix and no coder; saejax.app.prefix.load_prefix reads it.")
    sae = from_items(experiment.coder, experiment.train.steps, items, meta)
    finished = at >= experiment.train.steps or bool(meta.get("stopped_early"))
    origin = _origin(run, at, at * experiment.train.batch_size)
    settings = to_json(experiment)
    figures = _figures(run, at, sae) | l0_in_training(
        meta.get("after") or _logged(run, at, experiment.coder, sae, items)
    )
    return dataclasses.replace(sae, origin=origin, figures=figures, settings=settings, finished=finished)


def l0_in_training(after: Mapping[str, float] | None) -> dict[str, float]:
    """The figure by which an evaluation knows whether the coder is still the one that was trained."""
    return {"l0_in_training": after["l0_in_training"]} if after else {}


def _logged(run: Path, at: int, config: CoderConfig, sae: TrainedCoder, items: dict[str, Any]) -> dict[str, float]:
    """The last batch's L0, of runs of earlier versions, where the coder for after training is another."""
    if type(sae.coder.sparsity) is SPARSITIES[config.resolved().sparsity] and not items["averaged"]:
        return {}
    try:
        row = last_rows(run / "metrics.jsonl")
    except DataError:  # the coder is whole without its log
        return {}
    l0 = row.get("train/l0")
    return {"l0_in_training": l0} if row.get("step") == at and l0 is not None else {}


def from_items(config: CoderConfig, steps: int, items: dict[str, Any], meta: dict[str, Any]) -> TrainedCoder:
    """The coder of a checkpoint's items, in a training of `steps` steps; its origin is for the caller to say."""
    widths_in, widths_out = (list(meta[name]) for name in ("d_reads", "d_writes"))
    # Training may multiply in bfloat16; analysis does not.
    trained = build(dataclasses.replace(config, matmul_dtype="float32"), widths_in, steps, widths_out)
    sites = sites_from_meta(meta)
    coder, params = folded(trained, items["averaged"] or items["params"], items["stats"], sites)
    return TrainedCoder(coder, {name: np.asarray(value) for name, value in params.items()}, unscaled(sites))


def _origin(run: Path, step: int, tokens: int) -> Origin:
    """What provenance.json and environment.json of a run say; runs of earlier versions say less."""
    lm: dict[str, Any] = {}
    text: dict[str, Any] = {}
    version = ""
    if (run / PROVENANCE).is_file():
        made_from = read_provenance(run)
        lm, text = made_from.get("lm", {}), made_from.get("text", {})
    if (run / "environment.json").is_file():
        packages = read_object(run / "environment.json").get("packages")
        version = str(packages.get("saejax") or "") if isinstance(packages, dict) else ""
    model, revision, tokenizer = (str(lm.get(key) or "") for key in ("model", "revision", "tokenizer_sha256"))
    notes = (f"{run.name} of {run.parent}, by gates.retries",) if is_attempt(run) else ()
    return Origin(model, revision, tokenizer, text, tokens, step, str(run), version, notes)


def _figures(run: Path, step: int, sae: TrainedCoder) -> dict[str, float]:
    """The metrics of eval.json, where it is about this step and, as far as it says, these weights."""
    if not (run / "eval.json").is_file():
        return {}
    content = read_object(run / "eval.json")
    metrics = content.get("metrics")
    other = "sha256" in content and content["sha256"] != sae.fingerprint()
    if content.get("step") != step or other or not isinstance(metrics, dict):
        return {}
    return {name: float(value) for name, value in metrics.items() if type(value) in (int, float)}


def _best(run: Path, checkpoints: Checkpoints) -> int:
    """The step of the best checkpoint. Each says which is the best up to it; asked is the newest whose meta is intact.

    Those passed over cost a warning.

    Raises:
        DataError: none was kept for being best, or the meta of all is damaged.
    """
    steps = checkpoints.steps()
    best: dict[str, Any] = {}
    for step in reversed(steps):
        try:
            best = checkpoints.restore_numpy(step, names=())[1].get("best", {})
            break
        except DataError as error:
            warnings.warn(f"{error} What it says of the best one is not used.", stacklevel=4)
    else:
        if steps:
            raise DataError(f"None of the checkpoints of {run} can say which is the best: {steps}; see the warnings.")
    if best.get("step") is None:
        there = ", ".join(map(str, steps)) or "none"
        raise DataError(f"{run} keeps no best checkpoint: train with train.keep_best=val/fve. It has steps: {there}.")
    return int(best["step"])
