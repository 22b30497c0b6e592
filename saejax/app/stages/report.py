"""The stage that people look at: feature examples and report.html."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saejax.analysis import collect_features
from saejax.app import console
from saejax.app.experiment import Experiment
from saejax.app.stages.evaluate import finished_run
from saejax.app.workspace import Workspace
from saejax.core.config import to_json
from saejax.core.errors import DataError
from saejax.core.files import read_json, write_json
from saejax.parallel import refuse_many
from saejax.reports import render
from saejax.reports.feature_table import FeatureTable, write_features
from saejax.runs import Run
from saejax.runs.made import already_done, differing, made
from saejax.runs.provenance import read_provenance, record_provenance
from saejax.store import StoreReader
from saejax.store.norms import store_norms
from saejax.trained import TrainedCoder

# The files of a run whose content is on the page.
_SHOWN = (
    *(Run.features, Run.metrics, Run.evaluation, Run.stages, Run.profile, Run.explanations, Run.attempts),
    Run.norms,
)


def run_report(work: Workspace, redo: bool = False) -> Path:
    """Collect feature examples and write report.html."""
    e = work.experiment
    refuse_many(e.parallel, "saejax report")
    sae = finished_run(e)
    of = {"step": sae.step, "sha256": sae.fingerprint()}

    def collect() -> dict[str, Any]:
        named, made_from = sae.at(work.lm), work.verify_text_and_model()
        content, tokens, seconds = collect_features(named, work.lm, work.packer, e.report, e.capture.sinks)
        record_provenance(e.run, made_from, console.say)
        e.run.record_stage("features", tokens, seconds)
        _know_norms(e, sae, redo)
        return content | of

    return write_page(e.run_dir, of | {"report": to_json(e.report)}, collect, redo)


def _know_norms(e: Experiment, sae: TrainedCoder, redo: bool) -> None:
    """Write the norms of the store that was trained on; where it cannot be read, what was known of it stays."""
    if e.capture.into == "training":
        return
    try:
        reader = StoreReader.open(e.store_dir("train"))
        trained_on = read_provenance(e.run).get("train", {}).get("fingerprint", reader.fingerprint)
        if reader.fingerprint != trained_on:
            raise DataError(f"The store {reader.url} is not the one that was trained on.")
        names = list(dict.fromkeys((*sae.sites.reads, *sae.sites.writes)))
        of = {"fingerprint": reader.fingerprint}
        made(e.run.norms, of, lambda: store_norms(reader, names), redo, "norms", lambda line: None)
    except DataError as error:
        kept = "those known before stay" if e.run.norms.is_file() else "left out"
        console.say(f"report: norms of the training's store: {kept}. {error}")


def write_page(folder: Path, made_from: dict[str, Any], collect: Callable[[], dict[str, Any]], redo: bool) -> Path:
    """features.sqlite of what `collect` gives, and report.html, in the folder of an evaluation.

    What is there is made again where it was made from something else, or shows other files.
    """
    features = Run(folder).features
    if not redo and features.is_file():
        with FeatureTable(features) as table:
            redo = bool(differing(table.made_from, made_from))
    else:
        redo = True
    if redo:
        write_features(features, collect(), made_from)
    return show_again(folder, redo)


def show_again(folder: Path, redo: bool = False) -> Path:
    """Write report.html anew where a file that it shows has changed; its features stay as they are."""
    page, record = Run(folder).page, Run(folder).report
    contents = (path.read_bytes() if path.is_file() else b"" for path in map(folder.joinpath, _SHOWN))
    shown = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()
    if not redo and page.is_file() and record.is_file() and read_json(record).get("shown") == shown:
        console.say(already_done("report", page))
        return page
    page = render(folder)
    write_json(record, {"shown": shown})
    console.say(f"report: {page}")
    return page
