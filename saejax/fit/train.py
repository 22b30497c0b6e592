"""`train`: the one thing that trains, whoever asks and whatever learns."""

import contextlib
import dataclasses

from saejax.fit.learner import Folder, Learner, Tell
from saejax.parallel import Process
from saejax.training import Outcome, run_loop


def train(learner: Learner, folder: Folder, process: Process, tell: Tell, shown: bool = True) -> Outcome | None:
    """Train what learns, or continue it; None where the training is complete already.

    All that can be refused is refused before the folder becomes this training's.

    Raises:
        ConfigError, DataError: as `Learner.ready`, `Folder.held` and `training.train`.
        BusyError: another process trains in the folder.
    """
    tell = tell if process.first else lambda line: None
    with contextlib.ExitStack() as stack:
        checkpoints, numbers = stack.enter_context(folder.held(process))
        if numbers is None:
            return None
        ready = learner.ready(numbers, checkpoints, tell)
        setup = stack.enter_context(folder.recorded(ready, process, checkpoints))
        for line in ready.lines if checkpoints else ():  # what keeps nothing is a call, whose caller knows it
            tell(line)
        outcome = run_loop(ready.train, dataclasses.replace(setup, shown=shown and process.first))
    folder.ended(ready, outcome, process)
    return outcome
