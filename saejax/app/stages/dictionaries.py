"""Dictionaries from anywhere, on the experiment's model and held-out text: eval.json of each, and all in one table.

runs/<name>/evaluated/<dictionary>/{eval.json, features.json.gz, report.html}, and beside them table.{md,png,html}
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from saejax.analysis import collect_features
from saejax.app import console
from saejax.app.dictionaries import dictionaries
from saejax.app.experiment import Experiment
from saejax.app.loading import load
from saejax.app.stages.evaluate import measure
from saejax.app.stages.report import write_page
from saejax.app.workspace import Workspace
from saejax.capture import store_identity
from saejax.core.config import differences, to_json
from saejax.core.errors import DataError, SaejaxError
from saejax.core.files import finite, read_json, write_json
from saejax.evals import OF_TRAINING, Gate, check_gates
from saejax.interop.hooks import UNKNOWN
from saejax.parallel import refuse_many
from saejax.report.dictionaries_page import render_dictionaries
from saejax.trained import TrainedCoder
from saejax.trained.files import describe


def run_dictionaries(work: Workspace, words: list[str], redo: bool = False, report: bool = False) -> int:
    """Evaluate the dictionaries that `words` mean, and put them into one table and picture; with their report pages.

    Of the experiment count the language model, the text and which tokens of it, and the settings of evaluation, gates
    and report. Gates that look at a training are skipped. What is evaluated already is only judged again.

    Returns:
        0, or 1 when a gate fails or one of several dictionaries cannot be evaluated; the table says why.

    Raises:
        SaejaxError: of one dictionary alone: what is wrong with it.
    """
    e = work.experiment
    refuse_many(e.parallel, "saejax evaluate --sae")
    named, folder, on = dictionaries(words), e.run_dir / "evaluated", _evaluated_on(work)
    rows: list[dict[str, Any]] = []
    for name, source in named.items():
        try:
            rows.append({"name": name} | _evaluated(work, folder / name, source, on, redo, report))
        except SaejaxError as error:
            if len(named) == 1:
                raise
            console.say(f"{name}: error: {error}")
            rows.append({"name": name, "error": str(error)})
    if len(rows) == 1:
        console.gates([Gate.from_json(gate) for gate in rows[0]["gates"]])
    tokens = max((row["density"]["n_tokens"] for row in rows if "error" not in row), default=0)
    lead = (
        f"Evaluated on the same {tokens:,} tokens of held-out text. Gates that look at a training are not judged: "
        f"{', '.join(OF_TRAINING)}."
    )
    console.say(lead)
    console.say(render_dictionaries(folder, f"Dictionaries on {work.lm.identity['model']}", lead, rows))
    console.say(f"evaluate: {folder / 'table.html'}")
    return 0 if all("error" not in row and all(gate["passed"] for gate in row["gates"]) for row in rows) else 1


def _evaluated_on(work: Workspace) -> dict[str, Any]:
    """What decides the figures besides the dictionary, as JSON."""
    e = work.experiment
    identity = store_identity(work.lm, work.source, e.text, "heldout", e.capture)
    identity.pop("parts", None)  # which process captures what; nothing is captured here
    return json.loads(json.dumps(finite(identity | {"dtype": e.lm.dtype, "eval": to_json(e.eval)})))


def _evaluated(
    work: Workspace, folder: Path, source: str, on: dict[str, Any], redo: bool, report: bool
) -> dict[str, Any]:
    """The content of a dictionary's eval.json, which is made where it is not there, and its report page."""
    e, path = work.experiment, folder / "eval.json"
    sae = _loaded(e, source).at(work.lm)
    of = {"sha256": _fingerprint(sae), "on": on}
    before = read_json(path) if path.is_file() and not redo else None
    if before is None:
        console.say(f"{folder.name}: {sae}")
        content = _content(work, sae, source) | of
    else:
        if changed := differences({key: before.get(key) for key in of}, of):
            raise DataError(
                f"{path} holds the figures of another dictionary ({before.get('source')}), text, model or settings "
                f"({'; '.join(changed[:5])}). Pass --redo to replace them, or choose another --config.name."
            )
        console.say(f"{folder.name}: already evaluated, {path}")
        content = before
    content = content | {"gates": [gate.to_json() for gate in check_gates(e.gates, content["metrics"])]}
    if content != before:
        write_json(path, content)
    console.non_finite(content["non_finite_tokens"])
    if report:
        ratio = e.capture.max_norm_ratio
        wanted = of | {"report": to_json(e.report)}
        write_page(folder, wanted, lambda: collect_features(sae, work.lm, work.packer, e.report, ratio)[0], redo)
    return read_json(path)


def _loaded(e: Experiment, source: str) -> TrainedCoder:
    """A dictionary; where its files do not say at which hook points it is, the experiment's settings do."""
    sae = load(source, hook_points=(*(e.reads or filter(None, [e.hook_point])), *e.writes))
    if UNKNOWN in sae.sites.hook_points:
        raise DataError(
            f"{source} does not say at which hook point it is. Say it: --config.hook_point=blocks.6.resid_pre; of a "
            "transcoder --config.reads and --config.writes."
        )
    return sae


def _content(work: Workspace, sae: TrainedCoder, source: str) -> dict[str, Any]:
    """Figures, what the dictionary is and where it is from."""
    measured, done = measure(work, sae)
    described = sae.describe()
    return measured | {
        "source": source,
        "step": sae.step,
        "coder": f"{described['topology']} x {described['sparsity']['name']}",
        "k": described["sparsity"].get("k"),
        "notes": _notes(work, sae) + ([f"{done.non_finite:,} tokens not finite"] if done.non_finite else []),
        "skipped_gates": list(OF_TRAINING),
        "dictionary": {key: value for key, value in described.items() if key != "figures"},
    }


def _notes(work: Workspace, sae: TrainedCoder) -> list[str]:
    """What a reader of its figures must know: another model or text than here, a training that goes on."""
    origin, lm, text = sae.origin, work.lm.identity, work.source.identity
    notes = [] if sae.finished else [f"training unfinished, at step {sae.step:,}"]
    if origin.model and origin.model != lm["model"]:
        notes.append(f"made for {origin.model}")
    if origin.tokenizer and origin.tokenizer != lm.get("tokenizer_sha256"):
        notes.append("another tokenizer")
    known = sae.settings.get("text", {})
    share = known.get("heldout_fraction") if isinstance(known, dict) else None
    if not origin.text:
        notes.append("training text unknown")
    elif differences(dict(origin.text), text):
        notes.append("trained on another text")
    elif isinstance(share, float) and share < work.experiment.text.heldout_fraction:
        notes.append("trained on a part of this text")
    return [*notes, *origin.notes]


def _fingerprint(sae: TrainedCoder) -> str:
    """sha256 of what the dictionary computes and where: its description and every parameter."""
    digest = hashlib.sha256(json.dumps(describe(sae.coder, sae.sites), sort_keys=True).encode())
    for name in sorted(sae.params):
        value = np.ascontiguousarray(sae.params[name], np.float32)
        digest.update(f"{name}{value.shape}".encode())
        digest.update(value.data)
    return digest.hexdigest()
