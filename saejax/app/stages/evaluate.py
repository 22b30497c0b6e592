"""The stage after training: held-out text -> eval.json, documents.npz and the gates."""

import dataclasses
import functools
from typing import Any

from saejax.app import console
from saejax.app.experiment import Experiment, refuse_other_run
from saejax.app.load import load_run
from saejax.app.training_folders import as_begun
from saejax.app.workspace import Workspace
from saejax.coders import SPARSITIES
from saejax.core.bootstrap import LEVEL
from saejax.core.config import to_json
from saejax.core.errors import DataError
from saejax.core.files import read_object, write_json
from saejax.core.metrics import read_metrics
from saejax.evals import Documents, Evaluated, Gate, check_gates, check_warnings, ends_well, evaluate
from saejax.evals.intervals import FEWEST, RESAMPLES
from saejax.parallel import refuse_many
from saejax.runs.made import differing, made
from saejax.runs.provenance import record_provenance
from saejax.trained import TrainedCoder


def run_evaluate(work: Workspace, redo: bool = False) -> int:
    """Evaluate the last checkpoint on held-out text and check the gates, which other bars judge anew by its figures.

    Returns:
        0; 1 when a gate fails, or could not be measured although the experiment sets its bar.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax evaluate")
    sae = finished_run(e)
    # Text and model are those of the run's record, which cannot change.
    of = {"step": sae.step, "sha256": sae.fingerprint(), "config": _deciding(e)}
    evaluate_run = functools.partial(_evaluate_run, work, sae)
    done = made(e.run.evaluation, of, evaluate_run, redo, "evaluate", console.say)
    result = done | _judged(e, done["metrics"])
    if result != done:
        write_json(e.run.evaluation, result)
    console.non_finite(result["non_finite_tokens"])
    console.other_l0(result)
    console.sinks(result["metrics"])
    gates = [Gate.from_json(gate) for gate in result["gates"]]
    console.gates(gates, [Gate.from_json(warning) for warning in result["warnings"]])
    return 0 if ends_well(gates) else 1


def _deciding(e: Experiment) -> dict[str, Any]:
    """The settings that the figures of eval.json depend on."""
    return {"eval": to_json(e.eval), "sinks": dataclasses.asdict(e.capture.sinks)}


def stale(e: Experiment) -> bool:
    """There is an eval.json that was made with other settings."""
    path = e.run.evaluation
    return path.is_file() and bool(differing(read_object(path), {"config": _deciding(e)}))


def _evaluate_run(work: Workspace, sae: TrainedCoder) -> dict[str, Any]:
    """The content of eval.json beside what it was made from."""
    e, sae, made_from = work.experiment, sae.at(work.lm), work.verify_text_and_model()
    done = evaluate(sae, work.lm, work.packer, e.eval, e.capture.sinks)
    done.documents.save(e.run.documents)
    record_provenance(e.run, made_from, console.say)
    e.run.record_stage("evaluate", done.tokens, done.seconds)
    # Latents kept for a token, where the sparsity keeps a number of them.
    k = e.coder.k if "k" in SPARSITIES[e.coder.resolved().sparsity].provides else None
    return figures(work, sae, done) | {"k": k} | _judged(e, done.metrics)


def _judged(e: Experiment, metrics: dict[str, Any]) -> dict[str, Any]:
    """{"gates", "warnings"} as their bars are now."""
    rows = read_metrics(e.run.metrics)
    gates, warnings = check_gates(e.gates, metrics, rows), check_warnings(e.gates, rows)
    return {"gates": [gate.to_json() for gate in gates], "warnings": [gate.to_json() for gate in warnings]}


def figures(work: Workspace, sae: TrainedCoder, done: Evaluated) -> dict[str, Any]:
    """The part of eval.json that is said of every coder, wherever it is from."""
    return {
        "model": work.lm.identity["model"],
        "hook_point": sae.hook_point,
        "reads": list(sae.sites.reads),
        "writes": list(sae.sites.writes),
        "d_in": sae.coder.topology.d_in,
        "d_sae": sae.n_latents,
        "metrics": done.metrics,
        "l0_in_training": sae.figures.get("l0_in_training"),
        "intervals": done.documents.intervals,
        "documents": _documents(done.documents),
        "density": done.density,
        "cosine": done.cosine,
        "coactivation": done.coactivation,
        "breakdown": done.breakdown,
        "non_finite_tokens": done.non_finite,
    }


def _documents(documents: Documents) -> dict[str, Any]:
    """The documents of which the intervals are."""
    count = len(documents.numbers)
    note = {} if count >= FEWEST else {"note": f"no intervals: {count} documents, and they need {FEWEST}"}
    return {"count": count, "text_sha256": documents.text, "resamples": RESAMPLES, "level": LEVEL} | note


def finished_run(e: Experiment) -> TrainedCoder:
    """The coder of an experiment's run, which has come to its end.

    Raises:
        DataError: there is no run, or another one, or it is not finished.
    """
    if not e.run.config.is_file():
        raise DataError(f"There is no run in {e.run_dir}. Train it first: saejax train with this --config.")
    e = as_begun(e)
    refuse_other_run(e)
    sae = load_run(e.run)
    if not sae.finished:
        raise DataError(f"{e.run_dir} is at step {sae.step:,} of {e.train.steps:,}. Finish it: saejax train.")
    return sae
