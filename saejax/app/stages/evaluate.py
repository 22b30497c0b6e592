"""The stage after training: held-out text -> eval.json, documents.npz and the gates."""

import json
from pathlib import Path
from typing import Any

from saejax.app import console
from saejax.app.experiment import Experiment, refuse_other_run
from saejax.app.loading import load_run
from saejax.app.workspace import Workspace
from saejax.coders import SPARSITIES, CoderConfig
from saejax.core.bootstrap import LEVEL
from saejax.core.config import differences, to_json
from saejax.core.errors import DataError
from saejax.core.files import finite, read_json, write_json
from saejax.core.metrics import read_metrics
from saejax.evals import Documents, Evaluated, Gate, GateConfig, check_gates, check_warnings, ends_well, evaluate
from saejax.evals.intervals import FEWEST, RESAMPLES
from saejax.parallel import refuse_many
from saejax.runs.made import made
from saejax.runs.provenance import Provenance, record_provenance, verify_provenance
from saejax.trained import TrainedCoder

# Beside eval.json: sums of each document and the resampled metrics, for paired comparisons.
DOCUMENTS = "documents.npz"
# Sections of the configuration that decide what eval.json says.
_DECIDES_EVAL = ("eval", "gates")


def run_evaluate(work: Workspace, redo: bool = False) -> int:
    """Evaluate the last checkpoint on held-out text and check the gates.

    Returns:
        0; 1 when a gate fails, or could not be measured although the experiment sets its bar.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax evaluate")
    path = e.run_dir / "eval.json"
    sae = finished_run(e)
    # Text and model are those of the run's record, which cannot change.
    of: dict[str, Any] = {"step": sae.step, "sha256": sae.fingerprint(), "config": _decides(e)}
    result = made(
        path,
        of | {"config": _recorded(path, of["config"])},
        lambda: _evaluated(work, sae.at(work.lm)),
        redo,
        already=lambda: console.say(f"evaluate: already done, {path}"),
    )
    # Judged anew each time: what was evaluated by an earlier version has its figures, and not all of today's gates.
    judged = json.loads(json.dumps(finite(result | {"config": of["config"]} | _judged(e, result["metrics"]))))
    if judged != result:
        write_json(path, judged)
    console.non_finite(result.get("non_finite_tokens"))
    console.other_l0(result)
    gates = [Gate.from_json(gate) for gate in judged["gates"]]
    console.gates(gates, [Gate.from_json(warning) for warning in judged["warnings"]])
    return 0 if ends_well(gates) else 1


def _decides(e: Experiment) -> dict[str, Any]:
    """The settings that eval.json depends on. How often a run is tried again says nothing of its figures."""
    config = {key: to_json(getattr(e, key)) for key in _DECIDES_EVAL}
    return config | {"gates": {key: bar for key, bar in config["gates"].items() if key != "retries"}}


def _recorded(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """`config` as an eval.json of an earlier version has it: without bars at their defaults that there were not yet."""
    content = read_json(path) if path.is_file() else {}
    there = content.get("config", {}).get("gates") if isinstance(content, dict) else None
    if not isinstance(there, dict):
        return config
    usual = to_json(GateConfig())
    return config | {"gates": {key: b for key, b in config["gates"].items() if key in there or b != usual[key]}}


def stale(e: Experiment) -> bool:
    """Whether there is an eval.json that was made with other settings."""
    path = e.run_dir / "eval.json"
    return path.is_file() and bool(differences(read_json(path).get("config", {}), _recorded(path, _decides(e))))


def _evaluated(work: Workspace, sae: TrainedCoder) -> dict[str, Any]:
    """What eval.json holds beside what it was made from."""
    e, made_from = work.experiment, of_text_and_model(work)
    done = evaluate(sae, work.lm, work.packer, e.eval, e.capture.max_norm_ratio)
    done.documents.save(e.run_dir / DOCUMENTS)
    record_provenance(e.run, made_from, console.say)
    e.run.record_stage("evaluate", done.tokens, done.seconds)
    return figures(work, sae, done) | {"k": _k(e.coder)} | _judged(e, done.metrics)


def _judged(e: Experiment, metrics: dict[str, float]) -> dict[str, Any]:
    """The gates and warnings of eval.json."""
    rows = read_metrics(e.run_dir / "metrics.jsonl")
    gates, warnings = check_gates(e.gates, metrics, rows), check_warnings(e.gates, rows)
    return {"gates": [gate.to_json() for gate in gates], "warnings": [gate.to_json() for gate in warnings]}


def figures(work: Workspace, sae: TrainedCoder, done: Evaluated) -> dict[str, Any]:
    """What eval.json says of a coder wherever it is from."""
    return {
        "model": work.lm.identity["model"],
        "hook_point": sae.hook_point,
        "reads": list(sae.sites.reads),
        "writes": list(sae.sites.writes),
        "d_in": sae.coder.topology.d_in,
        "d_sae": sae.n_latents,
        "metrics": done.metrics,
        "l0_in_training": sae.figures.get("l0_in_training"),
        **of_documents(done.documents),
        "density": done.density,
        "cosine": done.cosine,
        "coactivation": done.coactivation,
        "breakdown": done.breakdown,
        "non_finite_tokens": done.non_finite,
    }


def of_documents(documents: Documents) -> dict[str, Any]:
    """The intervals of the metrics, and from what they are."""
    count = len(documents.numbers)
    said: dict[str, Any] = {"count": count, "text_sha256": documents.text, "resamples": RESAMPLES, "level": LEVEL}
    if count < FEWEST:
        said["note"] = f"no intervals: {count} documents, and they need {FEWEST}"
    return {"intervals": documents.intervals, "documents": said}


def _k(coder: CoderConfig) -> int | None:
    """Latents kept for a token, where the sparsity keeps a number of them."""
    return coder.k if "k" in SPARSITIES[coder.resolved().sparsity].provides else None


def finished_run(e: Experiment) -> TrainedCoder:
    """The coder of an experiment's run, which has come to its end.

    Raises:
        DataError: there is no run, or another one, or it is not finished.
    """
    if not (e.run_dir / "config.json").is_file():
        raise DataError(f"There is no run in {e.run_dir}. Train it first: saejax train with this --config.")
    refuse_other_run(e)
    sae = load_run(e.run_dir)
    if not sae.finished:
        raise DataError(f"{e.run_dir} is at step {sae.step:,} of {e.train.steps:,}. Finish it: saejax train.")
    return sae


def of_text_and_model(work: Workspace) -> Provenance:
    """What the run was made from, with the text and the model that it is to be looked at with.

    Held-out text is what was not trained on, of the text that was captured and of no other.

    Raises:
        DataError: the run was made from another text or model.
    """
    return verify_provenance(work.experiment.run, {"lm": work.lm.identity, "text": work.source.identity})
