"""All stages, one after the other."""

import dataclasses

from saejax.app import console, init_from
from saejax.app.devices import training_mesh
from saejax.app.experiment import Experiment, refuse_other_run
from saejax.app.extras import refuse_missing
from saejax.app.left_open import with_batch_size, with_rate
from saejax.app.loading import load
from saejax.app.stages.capture import run_capture
from saejax.app.stages.evaluate import run_evaluate
from saejax.app.stages.report import run_report
from saejax.app.stages.retries import check_retries, run_retries
from saejax.app.stages.train import run_train
from saejax.app.workspace import Workspace, verify_stores
from saejax.checkpoints import Checkpoints
from saejax.core.errors import EXIT_PREEMPTED
from saejax.core.files import read_json
from saejax.parallel import check_divides, own_rows, refuse_many


def run_pipeline(work: Workspace) -> int:
    """All stages. Returns the exit code of the first that does not end well; failed gates end it with 1.

    With `gates.retries` failed gates are tried again first, and the code is that of the attempt that is kept.
    """
    refuse_many(work.experiment.parallel, "saejax pipeline")
    check_retries(work.experiment)
    refuse_missing(work.experiment, "text", "lm", "train")
    work = with_batch_size(work)
    coder = work.build()
    work = dataclasses.replace(work, experiment=with_rate(work.experiment, coder))
    e = work.experiment
    # What training would refuse is refused before hours of capture.
    refuse_other_run(e)
    verify_stores(e)
    mesh = training_mesh(e)
    check_divides(mesh, coder.topology.d_sae)
    with Checkpoints(e.run.checkpoints) as checkpoints:
        if not init_from.is_begun([checkpoints]):
            init_from.check(e, coder, work.sites, lambda: load(e.train.init_from))
    own_rows(mesh, e.train.batch_size, e.train.accumulate, e.train.neighbours)
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
    console.summary(read_json(kept.experiment.run.evaluation), stages, page, _live(e))
    return code


def _live(e: Experiment) -> str:
    """The command that shows the run with all others."""
    folders = [f" --{key}={value}" for key, value in (("runs", e.runs_dir), ("stores", e.stores_dir)) if value != key]
    return f"saejax serve{''.join(folders)}" + ("" if folders else "   (in a checkout: make serve)")
