"""The watchers of a training: of memory, waits and, where it is profiled, steps."""

from collections.abc import Sequence

import jax

from saejax.fit.learner import Tell
from saejax.fit.trainable import Trainable
from saejax.parallel import together
from saejax.training import Profiler
from saejax.training.monitor import Monitor
from saejax.training.watch import Watch


def watches_of(e: Trainable, devices: Sequence[jax.Device], slow: str, tell: Tell, stage: str = "train") -> list[Watch]:
    """Measure memory and where the time goes; of several processes the first does.

    Args:
        slow: said where the training waits for its batches.
    """
    if e.train.profile:
        # A program compiled before its parts had names is not the same one.
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if not together().first:
        return []
    here = [device for device in devices if device in jax.local_devices()]
    watches: list[Watch] = []
    if e.train.monitor:
        watches.append(Monitor(here, tell, stage, data=slow))
    if e.train.profile:
        watches.append(Profiler(e.run_dir, here, tell))
    return watches
