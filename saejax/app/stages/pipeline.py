"""All stages, one after the other."""

import time

from saejax.app import console
from saejax.app.experiment import refuse_other_run
from saejax.app.extras import refuse_missing
from saejax.app.stages.capture import run_capture
from saejax.app.stages.evaluate import run_evaluate
from saejax.app.stages.report import run_report
from saejax.app.stages.retries import check_retries, run_retries
from saejax.app.stages.train import run_train
from saejax.app.training_folders import open_numbers
from saejax.app.workspace import Workspace, verify_stores
from saejax.checkpoints import Checkpoints
from saejax.core.amounts import span
from saejax.core.compiled import compile_clock
from saejax.core.errors import EXIT_PREEMPTED
from saejax.core.files import read_json
from saejax.fit.resolve import check
from saejax.parallel import refuse_many


def run_pipeline(work: Workspace) -> int:
    """All stages. Returns the exit code of the first that does not end well; failed gates end it with 1.

    With `gates.retries` failed gates are tried again first, and the code is that of the attempt that is kept.
    """
    compiling = compile_clock()
    started, before = time.monotonic(), compiling()
    refuse_many(work.experiment.parallel, "saejax pipeline")
    check_retries(work.experiment)
    refuse_missing(work.experiment, "text", "lm", "train")
    # What training would refuse is refused before hours of capture.
    run = work.experiment.run
    with Checkpoints(run.checkpoints) as checkpoints:
        work = check(work, open_numbers(run), [checkpoints], console.say).materials
    e = work.experiment
    refuse_other_run(e)
    verify_stores(e)
    run_capture(work)
    if code := run_train(work):
        return code
    kept, code = run_retries(work, run_evaluate(work))
    if code == EXIT_PREEMPTED:
        return code
    page = run_report(work)
    if kept.experiment != e:
        page = run_report(kept)
    stages = e.run.read_stages() | kept.experiment.run.read_stages()
    folders = [f" --{key}={value}" for key, value in (("runs", e.runs_dir), ("stores", e.stores_dir)) if value != key]
    live = f"saejax serve{''.join(folders)}" + ("" if folders else "   (in a checkout: make serve)")
    took = f"{span(time.monotonic() - started)}, {span(compiling() - before)} of it compiling"
    console.summary(read_json(kept.experiment.run.evaluation), stages, page, live, took)
    return code
