"""Dictionaries from anywhere, on the experiment's model and held-out text: eval.json of each, and all in one table.

runs/<name>/evaluated/<dictionary>/{eval.json, documents.npz, features.sqlite, report.html}, and beside them
table.{md,png,html,csv,tex,svg,pdf}
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from saejax.analysis import collect_features
from saejax.app import console
from saejax.app.dictionaries import dictionaries
from saejax.app.experiment import deciding, to_run_json
from saejax.app.load import load
from saejax.app.run_coders import evaluation_identity
from saejax.app.stages.comparisons import comparisons
from saejax.app.stages.evaluate import figures
from saejax.app.stages.report import write_page
from saejax.app.workspace import Workspace
from saejax.core.config import differences, to_json
from saejax.core.errors import DataError, SaejaxError
from saejax.core.files import read_json, write_json
from saejax.core.metrics import l0_note
from saejax.evals import OF_TRAINING, Evaluated, Gate, check_gates, ends_well, evaluate_together
from saejax.evals.seeds import Trained, over_seeds
from saejax.interop.hooks import UNKNOWN
from saejax.parallel import refuse_many
from saejax.reports.dictionaries_page import render_dictionaries
from saejax.runs import Run
from saejax.runs.made import existing
from saejax.trained import TrainedCoder

# Dictionaries of one hook point are evaluated so many together, if their weights take no more bytes: most forward
# passes are shared by then, and what a signal stops is not much.
_TOGETHER, _BYTES = 8, 2 << 30


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A dictionary with the model's names for its hook points, its folder, and what decides its figures."""

    folder: Path
    source: str
    sae: TrainedCoder
    decided: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(4 * np.size(value) for value in self.sae.params.values())


def run_dictionaries(work: Workspace, words: list[str], redo: bool = False, report: bool = False) -> int:
    """Evaluate the dictionaries that `words` mean, and put them into one table and picture; with their report pages.

    Of the experiment count the language model, the text and which tokens of it, and the settings of evaluation, gates
    and report. Gates that look at a training are skipped. What is evaluated already is only judged again.

    Returns:
        0, or 1 when a gate fails or one of several dictionaries cannot be evaluated; the table says why.

    Raises:
        SaejaxError: of one dictionary alone: what is wrong with it.
    """
    refuse_many(work.experiment.parallel, "saejax evaluate --sae")
    named, folder, on = dictionaries(words), work.experiment.run.evaluated, evaluation_identity(work)
    rows: dict[str, dict[str, Any]] = {}
    waiting: list[_Opened] = []
    saes: dict[str, TrainedCoder] = {}
    room = _BYTES

    def evaluate_waiting() -> None:
        for one, content in zip(waiting, _evaluate_together(work, waiting), strict=True):
            rows[one.folder.name] = _finished(work, one, content, redo, report)
        waiting.clear()

    for name, source in named.items():
        try:
            one = _open_dictionary(work, folder / name, source, on)
            before = existing(Run(one.folder).evaluation, one.decided, redo, name, console.say)
        except SaejaxError as error:
            if len(named) == 1:
                raise
            console.say(f"{name}: error: {error}")
            rows[name] = {"error": str(error)}
            continue
        if (room := room - one.bytes) >= 0:
            saes[name] = one.sae
        if before is not None:
            rows[name] = _finished(work, one, before, redo, report)
            continue
        together = [*waiting, one]
        fits = len(together) <= _TOGETHER and sum(other.bytes for other in together) <= _BYTES
        if waiting and not (fits and one.sae.sites == waiting[0].sae.sites):
            evaluate_waiting()
        waiting.append(one)
    if waiting:
        evaluate_waiting()
    return _shown(work, folder, [{"name": name} | rows[name] for name in named], saes)


def _shown(work: Workspace, folder: Path, rows: list[dict[str, Any]], saes: dict[str, TrainedCoder]) -> int:
    """Say and write the table; 0, or 1 where a dictionary was not evaluated or fails a gate."""
    evaluated = [row for row in rows if "error" not in row]
    if len(rows) == 1:
        console.gates([Gate.from_json(gate) for gate in rows[0]["gates"]])
    tokens = max((row["density"]["n_tokens"] for row in evaluated), default=0)
    lead = (
        f"Evaluated on {tokens:,} tokens of held-out text, the same for all. Intervals are of 95 %, by the bootstrap "
        "over documents. Gates that look at a training are not judged: "
        f"{', '.join(OF_TRAINING)}."
    )
    if not evaluated:
        lead = "Not one of them could be evaluated."
    title, below = f"Dictionaries on {work.lm.identity['model']}", comparisons(folder, rows, saes)
    console.say(render_dictionaries(folder, title, lead, rows, below, over_seeds([_trained(row) for row in evaluated])))
    console.say(f"evaluate: {Run(folder).table.with_suffix('.html')}")
    passed = ends_well(Gate.from_json(gate) for row in evaluated for gate in row["gates"])
    return 0 if passed and len(evaluated) == len(rows) else 1


def _trained(row: dict[str, Any]) -> Trained:
    """A dictionary, as it is compared with those that differ in their seed alone.

    Of one that does not say the whole experiment, as one of an array or of another project, there are none.
    """
    known = row.get("dictionary", {}).get("settings", {})
    like, seed = row["name"], row["name"]
    if all(isinstance(known.get(section), dict) for section in ("lm", "coder", "train")) and known["lm"].get("model"):
        decided = deciding(known)
        order, start = (decided.pop(key, None) for key in ("seed", "coder_seed"))
        like = json.dumps([decided, row.get("step")], sort_keys=True)
        seed = f"{order} {order if start is None else start}"
    figures = {name: row["metrics"].get(name) for name in ("l0", "fve", "loss_recovered", "dead_fraction")}
    return Trained(row["name"], like, seed, " ".join((*row["reads"], *row["writes"])), figures)


def _open_dictionary(work: Workspace, folder: Path, source: str, on: dict[str, Any]) -> _Opened:
    """A dictionary; where its files do not say at which hook points it is, the experiment's settings do."""
    e = work.experiment
    sae = load(source, hook_points=(*(e.reads or filter(None, [e.hook_point])), *e.writes))
    if UNKNOWN in sae.sites.hook_points:
        raise DataError(
            f"{source} does not say at which hook point it is. Say it: --config.hook_point=blocks.6.resid_pre; of a "
            "transcoder --config.reads and --config.writes."
        )
    sae = sae.at(work.lm)
    return _Opened(folder, source, sae, {"sha256": sae.fingerprint(), "on": on})


def _evaluate_together(work: Workspace, together: list[_Opened]) -> list[dict[str, Any]]:
    """Of each dictionary: figures, what it is and where it is from."""
    e, contents = work.experiment, []
    for one in together:
        console.say(f"{one.folder.name}: {one.sae}")
    saes = [one.sae for one in together]
    all_done = evaluate_together(saes, work.lm, work.packer, e.eval, e.capture.sinks)
    for one, done in zip(together, all_done, strict=True):
        done.documents.save(Run(one.folder).documents)
        described = {key: value for key, value in one.sae.describe().items() if key != "figures"}
        kind = described["sparsity"]
        content = {
            "source": one.source,
            "step": one.sae.step,
            "coder": f"{described['topology']} x {kind['name']}",
            "k": kind.get("k"),
            "notes": _notes(work, one.sae, done),
            "skipped_gates": list(OF_TRAINING),
            "dictionary": described,
        }
        contents.append(figures(work, one.sae, done) | content | one.decided)
    return contents


def _finished(work: Workspace, one: _Opened, content: dict[str, Any], redo: bool, report: bool) -> dict[str, Any]:
    """The content of eval.json with the gates as they are set now, written; and the report page."""
    e, path = work.experiment, Run(one.folder).evaluation
    # What to change in a training is no advice about a dictionary that is there.
    gates = [dataclasses.replace(gate, advice="").to_json() for gate in check_gates(e.gates, content["metrics"])]
    judged = content | {"experiment": to_run_json(e), "gates": gates}
    if judged != content:
        write_json(path, judged)
    console.non_finite(judged["non_finite_tokens"])
    console.other_l0(judged)
    console.sinks(judged["metrics"])
    if report:

        def collect() -> dict[str, Any]:
            content, _, _ = collect_features(one.sae, work.lm, work.packer, e.report, e.capture.sinks)
            return content | {"step": one.sae.step, "sha256": one.decided["sha256"]}

        write_page(one.folder, one.decided | {"report": to_json(e.report)}, collect, redo)
    return read_json(path)


def _notes(work: Workspace, sae: TrainedCoder, done: Evaluated) -> list[str]:
    """Notes for readers of its figures: another model, text or L0 than in training, a training that goes on."""
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
    if l0_note(trained := sae.figures.get("l0_in_training"), done.metrics["l0"]):
        notes.append(f"kept {trained:.3g} latents in training")
    return [*notes, *origin.notes, *([f"{done.non_finite:,} tokens not finite"] if done.non_finite else [])]
