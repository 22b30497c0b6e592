"""The devices that train, those that run the language model for `capture.into=training`, and who watches them.

Without capture.mesh all of them do both, in turn. With it the language model has the last ones to itself, so that it
makes the next activations while the others train on these.
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from saejax.core.errors import ConfigError
from saejax.fit.trainable import Trainable
from saejax.parallel import ParallelConfig, make_mesh, together
from saejax.training import Profiler
from saejax.training.monitor import Monitor
from saejax.training.watch import Watch


def training_devices(e: Trainable) -> list[jax.Device]:
    """Devices that train. Raises ConfigError: capture.mesh leaves none, or the training has several processes."""
    devices = jax.devices()
    if not e.capture.mesh:
        return devices
    if jax.process_count() > 1:
        raise ConfigError("capture.mesh divides the devices of one process; leave it empty with several.")
    count = e.capture.mesh[0] * e.capture.mesh[1]
    if count >= len(devices):
        wanted = ",".join(map(str, e.capture.mesh))
        raise ConfigError(
            f"capture.mesh={wanted} gives the language model {count} devices, and there are {len(devices)}: none is "
            "left to train on. Lower it, or leave it empty."
        )
    return devices[:-count]


def training_mesh(e: Trainable) -> Mesh:
    """The mesh of the training. Raises ConfigError: there are too few devices."""
    return make_mesh(e.parallel, training_devices(e))


def lm_mesh(e: Trainable) -> Mesh:
    """The mesh of the language model."""
    if not e.capture.mesh:
        return make_mesh(e.parallel)
    return make_mesh(ParallelConfig(e.capture.mesh), jax.devices()[len(training_devices(e)) :])


def watches_of(
    e: Trainable, devices: Sequence[jax.Device], slow: str, tell: Callable[[str], None], stage: str
) -> list[Watch]:
    """The watchers of memory, waits and, where it is profiled, steps; of several processes the first has them.

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
