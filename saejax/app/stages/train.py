"""The stage that trains: the experiment's stores -> a run folder."""

from saejax.app.console import say
from saejax.app.training_folders import RunFolder
from saejax.app.workspace import Workspace, verify_stores
from saejax.core.errors import EXIT_PREEMPTED
from saejax.fit.coders import Coders
from saejax.fit.train import train
from saejax.parallel import joined


def run_train(work: Workspace) -> int:
    """Train the coder. Returns 0, or EXIT_PREEMPTED when a signal stopped it (all is saved)."""
    e = work.experiment
    with joined(e.parallel) as process:
        folder = RunFolder(e, work.made_from, known=lambda: verify_stores(e))
        outcome = train(Coders.alone(work), folder, process, say)
    return EXIT_PREEMPTED if outcome is not None and outcome.stopped else 0
