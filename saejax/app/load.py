"""`saejax.load`: a trained coder from a run, a saved folder, another project's files or the hub. One CPU is enough."""

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from saejax import interop
from saejax.app.experiment import read_experiment
from saejax.app.hub import fetched, hub_place
from saejax.checkpoints import Checkpoints
from saejax.coders import CoderConfig, build
from saejax.core.config import plain, to_json
from saejax.core.errors import DataError
from saejax.core.files import read_object
from saejax.core.places import as_place
from saejax.runs import Run, differing
from saejax.runs.folder import FIRST
from saejax.runs.provenance import read_provenance
from saejax.trained import Origin, TrainedCoder, folded, sites_from_meta, unscaled


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
    if not source and path.name == FIRST and not path.exists() and Run(path.parent).exists:
        return load_run(Run(path.parent), step)
    if not source and Run(path).exists:
        return load_run(Run(path).counted(), step)
    sae = interop.load_dictionary(path, hook_points)
    if source:
        sae = dataclasses.replace(sae, origin=dataclasses.replace(sae.origin, source=source))
    if step is not None:
        raise DataError(f"{source or path} is a saved coder and holds one step; step={step!r} is for run folders.")
    return sae


def load_run(run: Run, step: int | str | None = None) -> TrainedCoder:
    """As `load`, of this very run, whichever of its attempts is kept."""
    experiment = read_experiment(run.config)
    at, items, meta = restored(run, step, ("params", "averaged", "stats"))
    if meta.get("kind") == "prefix":
        raise DataError(f"{run.path} holds a prefix and no coder; saejax.app.prefix.load_prefix reads it.")
    sae = from_items(experiment.coder, experiment.train.steps, items, meta)
    finished = at >= experiment.train.steps or bool(meta.get("stopped_early"))
    origin = _origin(run, at, at * experiment.train.batch_size)
    settings = to_json(experiment)
    figures = _figures(run, at, sae) | l0_in_training(meta.get("after"))
    sae = dataclasses.replace(sae, origin=origin, figures=figures, settings=settings, metrics=run.rows)
    return dataclasses.replace(sae, finished=finished)


def restored(run: Run, step: int | str | None, names: Sequence[str]) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(step, the items of these names, meta) of a run's checkpoint: the newest, "best", or that of a step.

    Raises:
        DataError: no such checkpoint, or it is damaged.
    """
    with Checkpoints(run.checkpoints) as checkpoints:
        step = plain(step)
        at = _best(run, checkpoints) if step == "best" else checkpoints.latest() if step is None else step
        if not isinstance(at, int) or at not in checkpoints.steps():
            there = ", ".join(map(str, checkpoints.steps())) or "none"
            raise DataError(f"{run.path} has no checkpoint of step {at!r}; it has: {there}.")
        return at, *checkpoints.restore_numpy(at, names=names)


def l0_in_training(after: Mapping[str, float] | None) -> dict[str, float]:
    """The figure by which an evaluation knows whether the coder is still the one that was trained."""
    return {"l0_in_training": after["l0_in_training"]} if after else {}


def from_items(config: CoderConfig, steps: int, items: dict[str, Any], meta: dict[str, Any]) -> TrainedCoder:
    """The coder of a checkpoint's items, in a training of `steps` steps; its origin is for the caller to say."""
    widths_in, widths_out = (list(meta[name]) for name in ("d_reads", "d_writes"))
    # Training may multiply in bfloat16; analysis does not.
    trained = build(dataclasses.replace(config, matmul_dtype="float32"), widths_in, steps, widths_out)
    sites = sites_from_meta(meta)
    coder, params = folded(trained, items["averaged"] or items["params"], items["stats"], sites)
    return TrainedCoder(coder, {name: np.asarray(value) for name, value in params.items()}, unscaled(sites))


def _origin(run: Run, step: int, tokens: int) -> Origin:
    """The origin that provenance.json and environment.json of a run say."""
    made_from = read_provenance(run)
    lm, text = made_from.get("lm", {}), made_from.get("text", {})
    packages = read_object(run.environment).get("packages") if run.environment.is_file() else None
    version = str(packages.get("saejax") or "") if isinstance(packages, dict) else ""
    model, revision, tokenizer = (str(lm.get(key) or "") for key in ("model", "revision", "tokenizer_sha256"))
    notes = (f"{run.path.name} of {run.path.parent}, by gates.retries",) if run.is_attempt else ()
    centred = bool(lm.get("center_writing_weights")) if lm else None
    return Origin(model, revision, tokenizer, text, tokens, step, str(run.path), version, notes, centred)


def _figures(run: Run, step: int, sae: TrainedCoder) -> dict[str, float]:
    """The metrics of eval.json, where it is about this step and these weights."""
    if not run.evaluation.is_file():
        return {}
    content = read_object(run.evaluation)
    metrics = content.get("metrics")
    if differing(content, {"step": step, "sha256": sae.fingerprint()}) or not isinstance(metrics, dict):
        return {}
    return {name: float(value) for name, value in metrics.items() if type(value) in (int, float)}


def _best(run: Run, checkpoints: Checkpoints) -> int:
    """The step of the best checkpoint, by the newest whose meta is intact: each says which is the best up to it."""
    steps = checkpoints.steps()
    best: dict[str, Any] = {}
    for step in reversed(steps):
        try:
            best = checkpoints.restore_numpy(step, names=())[1].get("best", {})
            break
        except DataError as error:
            warnings.warn(f"{error} What it says of the best one is not used.", stacklevel=5)
    else:
        if steps:
            raise DataError(
                f"None of the checkpoints of {run.path} can say which is the best: {steps}; see the warnings."
            )
    if best.get("step") is None:
        there = ", ".join(map(str, steps)) or "none"
        raise DataError(
            f"{run.path} keeps no best checkpoint: train with train.keep_best=val/fve. It has steps: {there}."
        )
    return int(best["step"])
