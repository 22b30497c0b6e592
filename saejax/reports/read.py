"""Reading a run's folder for its report: what is there, checked, and nothing else.

Of a run only `config.json` must exist, of a dictionary without its training only an `eval.json` that describes it.
Every other file is optional and comes back as None (or an empty list); a file that exists and cannot be understood is
a `DataError` that names it, never a page with a hole.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.core.files import LARGEST_JSON, object_of, read_if_there
from saejax.core.metrics import LARGEST_METRICS
from saejax.reports.evaluation import EVALUATION
from saejax.reports.feature_table import read_features
from saejax.runs import Run
from saejax.runs.shape import Maybe, fault

TRAIN = "saejax train --config=..."
EVALUATE = "saejax evaluate --config=..."
REPORT = "saejax report --config=..."
EVALUATE_ANY = "saejax report --config=... --sae=..."


@dataclass(frozen=True)
class RunFiles:
    """The parsed files of one run, by what `Run` calls them; None where there is none.

    Attributes:
      config: config.json; of a dictionary without its training what eval.json says of it.
      trained: it is a run, with its training.
      metrics: one dict a step, ascending; keys "step" and whatever was logged at that step.
      features: features.sqlite with what explanations.jsonl says of each feature.
      sources: (file name, bytes, sha256) of every file read.
    """

    name: str
    config: dict[str, Any]
    trained: bool
    environment: dict[str, Any] | None
    metrics: list[dict[str, Any]]
    evaluation: dict[str, Any] | None
    features: dict[str, Any] | None
    stages: dict[str, Any] | None
    profile: dict[str, Any] | None
    attempts: dict[str, Any] | None
    norms: dict[str, Any] | None
    sources: tuple[tuple[str, int, str], ...]


def read_run(run_dir: Path, features: bool = True) -> RunFiles:
    """Reads every file of `run_dir` that the report shows.

    Args:
      features: read features.sqlite too, which may be large.

    Raises:
      DataError: no such folder, nothing in it that says what was evaluated, or a damaged file.
    """
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a folder: give the folder of a run, such as runs/<name>")
    run = Run(run_dir)
    raw = {}
    for name in (*FILES, *((Run.explanations,) if features else ())):
        data = read_if_there(run_dir / name, LARGEST_METRICS if name == Run.metrics else LARGEST_JSON)
        if data is not None:
            raw[name] = data
    objects = {name: _checked(run_dir / name, data) for name, data in raw.items() if name in _SHAPES}
    evaluation = objects.get(Run.evaluation)
    table = read_features(run_dir) if features and os.path.lexists(run.features) else None
    described = {key: value for key in ("dictionary", "on") if (value := (evaluation or {}).get(key))}
    if Run.config not in raw and not described:
        raise DataError(f"{run_dir} has no {Run.config}, so it is no run; make one with `{TRAIN}`")
    sources = [(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in raw.items()]
    if table is not None:
        with run.features.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        sources.append((Run.features, run.features.stat().st_size, digest))
    return RunFiles(
        name=run_dir.resolve().name,
        config=objects.get(Run.config, described),
        trained=Run.config in raw,
        environment=objects.get(Run.environment),
        metrics=run.rows() if Run.metrics in raw else [],
        evaluation=evaluation,
        features=table,
        stages=objects.get(Run.stages),
        profile=objects.get(Run.profile),
        attempts=run.read_attempts() if Run.attempts in raw else None,
        norms=objects.get(Run.norms),
        sources=tuple(sources),
    )


FILES = (Run.config, Run.environment, Run.metrics, Run.evaluation, Run.stages, Run.profile, Run.attempts, Run.norms)


_ROWS = [{"name": str, "ms": float, "share": float}]
_PROFILE = {
    "trace": Maybe({"first_step": float, "steps": float, "step_ms": Maybe(float), "components": _ROWS, "idle": _ROWS}),
    "session": {"steps": float, "ms_per_step": float, "phases": _ROWS},
    "memory": [{"step": float, "host_bytes": Maybe(float), "device_bytes": Maybe(float)}],
    "step": {key: Maybe(float) for key in ("flops", "bytes", "memory_bytes")},
}
_NORMS = {
    "rows": int,
    "beyond": float,
    "left_out": Maybe({"first": int, "massive": int}),
    "hook_points": {
        ...: dict.fromkeys(("n", "median", "largest", "long", "share", "mean_over_spread"), float)
        | {"positions": {...: float}}
    },
    "warnings": [str],
}
_AGAIN = f"make it again with `{TRAIN}`"
# What a file holds, and how it is had again.
_SHAPES: dict[str, tuple[Any, str]] = {
    Run.config: ({}, _AGAIN),
    Run.environment: ({}, _AGAIN),
    Run.stages: ({...: {key: Maybe(float) for key in ("tokens", "seconds", "tokens_per_second")}}, _AGAIN),
    Run.evaluation: (EVALUATION, f"make it again with `{EVALUATE}`"),
    Run.profile: (_PROFILE, f"delete it, or {_AGAIN[:-1]} --config.train.profile=true`"),
    Run.norms: (_NORMS, f"delete it, and run `{REPORT}`"),
}


def read_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """eval.json of a run, checked: its figures are numbers or None, its gates whole. None where there is none.

    Raises:
      DataError: it is damaged; names it.
    """
    path = Run(run_dir).evaluation
    data = read_if_there(path, LARGEST_JSON)
    return None if data is None else _checked(path, data)


def _checked(path: Path, data: bytes) -> dict[str, Any]:
    """The object of a file, of the shape that the page draws."""
    shape, remedy = _SHAPES[path.name]
    content = object_of(path, data, remedy)
    if wrong := fault(content, shape):
        raise DataError(f"{path} is damaged: {wrong}; {remedy}")
    return content
