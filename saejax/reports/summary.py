"""The summary that a run's page draws: the header, the headline numbers, the curves; plain JSON-ready values.

What no file says is left out of the header.
"""

import shlex
from typing import Any

from saejax.core.files import finite
from saejax.core.metrics import l0_note
from saejax.reports.curves import curves_of, is_number, monitored
from saejax.reports.evaluation import failed_of
from saejax.reports.read import EVALUATE, EVALUATE_ANY, TRAIN, RunFiles


def summarise(run: RunFiles) -> dict[str, Any]:
    """Everything the page shows except the features themselves, with NaN and infinities as None."""
    evaluation = run.evaluation or {}
    curves = curves_of(run.metrics)
    summary = {
        "run": _header(run),
        "tiles": _tiles(run),
        "note": _other_l0(run),
        "gates": evaluation.get("gates"),
        "warnings": evaluation.get("warnings"),
        "skipped_gates": evaluation.get("skipped_gates"),
        "eval_step": evaluation.get("step"),
        "eval_metrics": evaluation.get("metrics"),
        "density": evaluation.get("density"),
        **{key: evaluation.get(key) for key in ("intervals", "documents", "breakdown", "cosine", "coactivation")},
        "stages": run.stages,
        "profile": run.profile,
        "attempts": run.attempts,
        "norms": run.norms,
        "monitor": monitored(run.metrics),
        "curves": curves,
        "has_validation": any(key.startswith("val/") for key in curves),
        "has_features": run.features is not None,
        "config": run.config,
        "environment": _environment(run.environment),
        "files": [{"name": name, "bytes": size, "sha256": digest} for name, size, digest in run.sources],
        "commands": {"train": TRAIN, "evaluate": EVALUATE if run.trained else EVALUATE_ANY},
    }
    return finite(summary)


def _header(run: RunFiles) -> dict[str, Any]:
    evaluation, features = run.evaluation or {}, run.features or {}
    sections = ("lm", "coder", "capture")
    lm, coder, capture = (part if isinstance(part := run.config.get(key), dict) else {} for key in sections)
    hook_points = run.config.get("hook_point") or run.config.get("reads") or capture.get("hook_points")
    gates = evaluation.get("gates") or []
    return {
        "name": run.name,
        "trained": run.trained,
        "model": evaluation.get("model") or features.get("model") or _joined(lm.get("model")),
        "hook_point": _read_and_written(evaluation) or features.get("hook_point") or _joined(hook_points),
        "preset": _joined(evaluation.get("coder") or coder.get("preset")) or "",
        "d_in": _whole(evaluation.get("d_in")),
        "d_sae": _whole(evaluation.get("d_sae") or features.get("d_sae")),
        "k": _whole(evaluation.get("k")),
        "tokens": max((row["tokens"] for row in run.metrics if is_number(row.get("tokens"))), default=None),
        "step": run.metrics[-1]["step"] if run.metrics else evaluation.get("step"),
        "gates_passed": sum(bool(gate["passed"]) for gate in gates),
        "gates_failed": len(failed_of(gates)),
        "gates_total": len(gates),
    }


def _read_and_written(evaluation: dict[str, Any]) -> str | None:
    """All hook points that a dictionary reads, and those that it writes where they are others."""
    reads, writes = (_joined(evaluation.get(side)) for side in ("reads", "writes"))
    return f"{reads} -> {writes}" if writes and reads != writes else reads or evaluation.get("hook_point")


def _joined(value: Any) -> str | None:
    if value is None or isinstance(value, dict):
        return None
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _environment(environment: dict[str, Any] | None) -> dict[str, Any] | None:
    """The last session's, and how many there were."""
    if environment is None:
        return None
    shown = dict(environment)
    if isinstance(shown.get("command"), list):
        shown["command"] = shlex.join(map(str, shown["command"]))
    if isinstance(shown.get("sessions"), list):
        shown["sessions"] = len(shown["sessions"])
    return shown


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


# (heading, {metric: how its value is written}, what it is): a metric has one unit, wherever it was logged.
_TILES = (
    ("L0", {"l0": "number"}, "latents active per token, mean"),
    ("FVE", {"fve": "number"}, "fraction of variance explained, centred"),
    ("R²", {"r2": "number"}, "coefficient of determination"),
    ("Loss recovered", {"loss_recovered": "percent"},
     "of the model's loss between ablating the site and leaving it alone"),
    ("Dead features", {"dead_fraction": "percent", "dead": "count"}, "latents that never fired in the scan"),
    ("Relative error", {"relative_error": "percent"},
     "sum ‖x − x̂‖² / sum ‖x‖²: the share of the activations' energy that is lost"),
)  # fmt: skip


def _tiles(run: RunFiles) -> list[dict[str, Any]]:
    """The headline numbers: from the evaluation where it has them, else the latest validation or training."""
    tiles = []
    density = (run.evaluation or {}).get("density") or {}
    metrics = (run.evaluation or {}).get("metrics") or {}
    for label, kinds, what in _TILES:
        hint = what
        name, value, source = _headline(run, tuple(kinds))
        of = None
        if "dead" in kinds and is_number(density.get("dead")):
            name, value, source = "dead", density["dead"], "evaluation"
            of = sum(density["counts"]) + density["dead"]
        if is_number(of_all := metrics.get(f"{name}_with_sinks")):
            written = f"{of_all:.2%}" if kinds[name] == "percent" else f"{of_all:.4g}"
            hint = f"{hint}; {written} with the sinks, {metrics['sinks']:.2%} of the tokens"
        if is_number(in_turn := metrics.get(f"{name}_in_turn")):
            hint = f"{hint}; {in_turn:.2%} with each place rebuilt behind the replaced ones"
        tiles.append({"label": label, "value": value, "kind": kinds[name], "of": of, "hint": hint, "source": source})
    return tiles


def _headline(run: RunFiles, names: tuple[str, ...]) -> tuple[str, float | None, str]:
    """(which of the names, its value, where it is from); the first name, None and why where nobody measured any."""
    metrics = (run.evaluation or {}).get("metrics") or {}
    evaluated = {key.rsplit("/", 1)[-1]: value for key, value in metrics.items()}
    for name in names:
        if is_number(evaluated.get(name)):
            return name, evaluated[name], "evaluation"
    for prefix, source in (("val", "validation"), ("train", "training")):
        for row in reversed(run.metrics):
            for name in names:
                if is_number(row.get(f"{prefix}/{name}")):
                    return name, row[f"{prefix}/{name}"], f"{source}, step {row['step']:,}"
    # What an evaluation left out comes with no other one.
    return names[0], None, "not measured yet" if run.evaluation is None else "not in this evaluation"


def _other_l0(run: RunFiles) -> str:
    """A note where the coder keeps another number of latents than in training; from the evaluation, or from
    the end of the training before there is one."""
    last: dict[str, Any] = next((row for row in reversed(run.metrics) if "after/l0" in row), {})
    known = {"l0_in_training": last.get("after/l0_in_training"), "l0": last.get("after/l0")}
    if run.evaluation:
        in_training = run.evaluation.get("l0_in_training")
        in_training = known["l0_in_training"] if in_training is None else in_training
        known = {"l0_in_training": in_training, "l0": (run.evaluation.get("metrics") or {}).get("l0")}
    note = l0_note(**{name: value if is_number(value) else None for name, value in known.items()})
    return note[:1].upper() + note[1:]
