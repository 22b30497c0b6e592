"""Reading a run's folder for its report: what is there, checked, and nothing else.

Of a run only `config.json` must exist, of a dictionary without its training only an `eval.json` that describes it.
Every other file is optional and comes back as None (or an empty list); a file that exists and cannot be understood is
a `DataError` that names it, never a page with a hole.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saejax.core.errors import DataError
from saejax.core.files import LARGEST_JSON, object_of, read_if_there
from saejax.core.metrics import LARGEST_METRICS
from saejax.report import profile as profiles
from saejax.report.evaluation import wrong_in
from saejax.report.explanations import read_explanations, with_explanations
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
      features: features.json.gz with what explanations.jsonl says of each feature, or None.
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
      features: read features.json.gz too, which may be large.

    Raises:
      DataError: no such folder, nothing in it that says what was evaluated, or a damaged file.
    """
    if not run_dir.is_dir():
        raise DataError(f"{run_dir} is not a folder: give the folder of a run, such as runs/<name>")
    run = Run(run_dir)
    names = FILES if features else tuple(name for name in FILES if name not in _OF_FEATURES)
    raw = {name: data for name in names if (data := read_if_there(run_dir / name, _limit(name))) is not None}
    objects = {
        name: object_of(run_dir / name, raw[name], f"make it again with `{TRAIN}`")
        for name in (Run.config, Run.environment, Run.profile)
        if name in raw
    }
    evaluation = _evaluation(run.evaluation, raw[Run.evaluation]) if Run.evaluation in raw else None
    table = None
    if Run.features in raw:
        table = with_explanations(_features(run.features, raw[Run.features]), read_explanations(run_dir))
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
        sources=tuple((name, len(data), hashlib.sha256(data).hexdigest()) for name, data in raw.items()),
    )


FILES = (
    Run.config,
    Run.environment,
    Run.metrics,
    Run.evaluation,
    Run.features,
    Run.stages,
    Run.profile,
    Run.attempts,
    Run.explanations,
)
_OF_FEATURES = (Run.features, Run.explanations)
_LARGEST = {Run.metrics: LARGEST_METRICS, Run.features: 8 << 30}


def _limit(name: str) -> int:
    return _LARGEST.get(name, LARGEST_JSON)


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


def read_features(run_dir: Path) -> dict[str, Any]:
    """features.json.gz of a run, checked, with the run's explanations. Those of earlier versions have no "quantiles".

    Raises:
      DataError: there is none, or one of the two files is damaged.
    """
    path = Run(run_dir).features
    if not path.is_file():
        raise DataError(f"{run_dir} has no {Run.features}. Make it: {REPORT}")
    table = _features(path, path.read_bytes())
    return with_explanations(table, read_explanations(run_dir))


def _features(path: Path, data: bytes) -> dict[str, Any]:
    try:
        text = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"it does not unpack ({error})") from None
    table = object_of(path, text, f"make it again with `{EVALUATE}`")
    vocab, features = table.get("vocab"), table.get("features")
    if not isinstance(vocab, list) or not all(isinstance(token, str) for token in vocab):
        raise _damaged(path, "'vocab' is not a list of token strings")
    if not isinstance(features, list):
        raise _damaged(path, "'features' is not a list")
    for feature in features:
        check_feature(path, feature, len(vocab))
    if len({feature["id"] for feature in features}) != len(features):
        raise _damaged(path, "two features have the same id")
    return table


def check_feature(path: Path, feature: Any, n_vocab: int) -> None:
    """Refuses a feature of `path` that the page could not show, or whose tokens are not of a table of `n_vocab`.

    Raises:
      DataError: says what is wrong with it.
    """
    if not isinstance(feature, dict) or not isinstance(feature.get("id"), int):
        raise _damaged(path, f"a feature has no whole-number id: {str(feature)[:80]}")
    name = f"feature {feature['id']}"
    for key in ("density", "max"):
        if not _is_number(feature.get(key)):
            raise _damaged(path, f"{name} has no number {key!r}")
    if "min" in feature and not _is_number(feature["min"]):
        raise _damaged(path, f"{name} has the min {feature['min']!r}, which is not a number")
    if histogram := feature.get("histogram"):
        _check_histogram(path, f"{name} histogram", histogram, "edges")
    for key in ("top_logits", "bottom_logits", "examples"):
        if not isinstance(feature.get(key) or [], list):
            raise _damaged(path, f"{name} {key} is not a list")
    for key in ("top_logits", "bottom_logits"):
        for pair in feature.get(key) or []:
            if not isinstance(pair, list) or len(pair) != 2 or not _is_number(pair[1]):
                raise _damaged(path, f"{name} {key} holds {str(pair)[:40]}, not [token, value]")
            if not isinstance(pair[0], str):
                _check_tokens(path, name, pair[:1], n_vocab)
    for example in feature.get("examples") or []:
        _check_example(path, name, example, n_vocab)
    if not isinstance(feature.get("quantiles") or [], list):
        raise _damaged(path, f"{name} quantiles is not a list")
    for part in feature.get("quantiles") or []:
        if not isinstance(part, dict) or not all(_is_number(part.get(key)) for key in ("low", "high", "fraction")):
            raise _damaged(path, f"{name} has a quantile without the numbers low, high and fraction: {str(part)[:80]}")
        if not isinstance(part.get("examples"), list):
            raise _damaged(path, f"{name} has a quantile without a list of examples")
        for example in part["examples"]:
            _check_example(path, name, example, n_vocab)


def _check_example(path: Path, name: str, example: Any, n_vocab: int) -> None:
    tokens = example.get("tokens") if isinstance(example, dict) else None
    activations = example.get("activations") if isinstance(example, dict) else None
    if not isinstance(tokens, list) or not isinstance(activations, list) or len(tokens) != len(activations):
        raise _damaged(path, f"an example of {name} does not have as many activations as tokens")
    if not isinstance(example.get("peak"), int) or not 0 <= example["peak"] < len(tokens):
        peak = example.get("peak")
        raise _damaged(path, f"an example of {name} has the peak {peak!r} of {len(tokens)} tokens")
    if not all(map(_is_number, activations)):
        raise _damaged(path, f"an example of {name} has an activation that is not a number")
    _check_tokens(path, name, tokens, n_vocab)


def _check_tokens(path: Path, name: str, tokens: Iterable[Any], n_vocab: int) -> None:
    for token in tokens:
        if type(token) is not int or not 0 <= token < n_vocab:
            raise _damaged(path, f"{name} uses the token {token!r}, outside the table of {n_vocab}")


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
