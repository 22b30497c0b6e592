"""Reading a run's folder for its report: what is there, checked, and nothing else.

Of a run only `config.json` must exist, of a dictionary without its training only an `eval.json` that describes it.
Every other file is optional and comes back as None (or an empty list); a file that exists and cannot be understood is
a `DataError` that names it, never a page with a hole.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.core.files import LARGEST_JSON, object_of, read_if_there
from saejax.core.metrics import LARGEST_METRICS
from saejax.report import profile as profiles
from saejax.report.evaluation import wrong_in
from saejax.report.feature_table import read_features
from saejax.runs import Run

TRAIN = "saejax train --config=..."
PIPELINE = "saejax pipeline --config=..."
EVALUATE = "saejax evaluate --config=..."
REPORT = "saejax report --config=..."
EVALUATE_ANY = "saejax report --config=... --sae=..."


@dataclass(frozen=True)
class RunFiles:
    """The parsed files of one run.

    Attributes:
      name: the folder's name.
      config: config.json; of a dictionary without its training what eval.json says of it.
      trained: it is a run, with its training.
      environment: environment.json, or None.
      metrics: one dict a step, ascending; keys "step" and whatever was logged at that step.
      evaluation: eval.json, or None.
      features: features.sqlite with what explanations.jsonl says of each feature, or None.
      stages: stages.json, or None: {stage: tokens, seconds, tokens_per_second}.
      profile: profile.json, or None.
      attempts: attempts.json, or None: the attempts of gates.retries, and which is kept.
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
    names = (*FILES, *((Run.explanations,) if features else ()))
    raw = {name: data for name in names if (data := read_if_there(run_dir / name, _limit(name))) is not None}
    objects = {
        name: object_of(run_dir / name, raw[name], f"make it again with `{TRAIN}`")
        for name in (Run.config, Run.environment, Run.profile)
        if name in raw
    }
    evaluation = _evaluation(run.evaluation, raw[Run.evaluation]) if Run.evaluation in raw else None
    table = read_features(run_dir) if features and os.path.lexists(run.features) else None
    described = {key: value for key in ("dictionary", "on") if (value := (evaluation or {}).get(key))}
    if Run.config not in raw and not described:
        raise DataError(f"{run_dir} has no {Run.config}, so it is no run; make one with `{TRAIN}`")
    return RunFiles(
        name=run_dir.resolve().name,
        config=objects.get(Run.config, described),
        trained=Run.config in raw,
        environment=objects.get(Run.environment),
        metrics=run.rows() if Run.metrics in raw else [],
        evaluation=evaluation,
        features=table,
        stages=_stages(run.stages, raw[Run.stages]) if Run.stages in raw else None,
        profile=profiles.checked(run.profile, objects[Run.profile]) if Run.profile in raw else None,
        attempts=run.read_attempts() if Run.attempts in raw else None,
        sources=(
            *((name, len(data), hashlib.sha256(data).hexdigest()) for name, data in raw.items()),
            *([_source(run.features)] if table is not None else []),
        ),
    )


FILES = (
    Run.config,
    Run.environment,
    Run.metrics,
    Run.evaluation,
    Run.stages,
    Run.profile,
    Run.attempts,
)


def _limit(name: str) -> int:
    return LARGEST_METRICS if name == Run.metrics else LARGEST_JSON


def _source(path: Path) -> tuple[str, int, str]:
    """As of `RunFiles.sources`, without the file in memory."""
    with path.open("rb") as handle:
        return path.name, path.stat().st_size, hashlib.file_digest(handle, "sha256").hexdigest()


def read_evaluation(run_dir: Path) -> dict[str, Any] | None:
    """eval.json of a run, checked: its figures are numbers or None, its gates whole. None where there is none.

    Raises:
      DataError: it is damaged; names it.
    """
    path = Run(run_dir).evaluation
    data = read_if_there(path, LARGEST_JSON)
    return None if data is None else _evaluation(path, data)


def _damaged(path: Path, what: str, remedy: str = EVALUATE) -> DataError:
    return DataError(f"{path} is damaged: {what}; make it again with `{remedy}`")


def _evaluation(path: Path, data: bytes) -> dict[str, Any]:
    evaluation = object_of(path, data, f"make it again with `{EVALUATE}`")
    for key, kind in (("metrics", dict), ("gates", list), ("warnings", list), ("density", dict)):
        if key in evaluation and not isinstance(evaluation[key], kind):
            raise _damaged(path, f"{key!r} is not a {kind.__name__}")
    if not isinstance(evaluation.get("skipped_gates") or [], list):
        raise _damaged(path, "'skipped_gates' is not a list")
    _check_numbers(path, "evaluation", evaluation, ("step", "d_in", "d_sae", "k"))
    metrics = evaluation.get("metrics", {})
    _check_numbers(path, "evaluation", metrics, metrics)
    for gate in [*evaluation.get("gates", []), *evaluation.get("warnings", [])]:
        if not isinstance(gate, dict) or not {"name", "value", "bar", "comparison", "passed"} <= gate.keys():
            raise _damaged(path, f"the gate {str(gate)[:80]} lacks name, value, bar, comparison or passed")
        _check_numbers(path, f"gate {gate['name']!r}", gate, ("value", "bar"))
    if density := evaluation.get("density"):
        _check_histogram(path, "density", density, "log10_edges")
        _check_numbers(path, "density", density, ("dead", "n_tokens"))
    for key in ("cosine", "coactivation"):
        if histogram := evaluation.get(key):
            _check_histogram(path, key, histogram, "edges")
            _check_numbers(path, key, histogram, ("tokens", "latents", "rare"))
    if wrong := wrong_in(evaluation):
        raise _damaged(path, wrong)
    return evaluation


def _stages(path: Path, data: bytes) -> dict[str, Any]:
    stages = object_of(path, data, f"make it again with `{TRAIN}`")
    for stage, row in stages.items():
        if not isinstance(row, dict):
            raise _damaged(path, f"the stage {stage!r} is not an object")
        _check_numbers(path, f"stage {stage!r}", row, ("tokens", "seconds", "tokens_per_second"))
    return stages


def _check_numbers(path: Path, name: str, row: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if row.get(key) is not None and not _is_number(row[key]):
            raise _damaged(path, f"the {name} has the {key} {row[key]!r}, which is not a number")


def _check_histogram(path: Path, name: str, histogram: Any, edges_key: str) -> None:
    edges = histogram.get(edges_key) if isinstance(histogram, dict) else None
    counts = histogram.get("counts") if isinstance(histogram, dict) else None
    if not isinstance(edges, list) or not isinstance(counts, list) or len(edges) != len(counts) + 1:
        raise _damaged(path, f"the {name} does not have one edge more than counts")
    if not all(map(_is_number, edges)) or not all(map(_is_number, counts)):
        raise _damaged(path, f"the {name} holds something that is not a number")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
