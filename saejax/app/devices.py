"""Which devices train, and which run the language model for `capture.into=training`.

Without capture.mesh all of them do both, in turn. With it the language model has the last ones to itself, so that it
makes the next activations while the others train on these.
"""

import jax
from jax.sharding import Mesh

from saejax.app.experiment import Experiment
from saejax.core.errors import ConfigError
from saejax.parallel import ParallelConfig, make_mesh


def training_devices(e: Experiment) -> list[jax.Device]:
    """Those that train.

    Raises:
        ConfigError: capture.mesh leaves none, or the training has several processes.
    """
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


def training_mesh(e: Experiment) -> Mesh:
    """What the training runs on.

    Raises:
        ConfigError: there are too few devices.
    """
    return make_mesh(e.parallel, training_devices(e))


def lm_mesh(e: Experiment) -> Mesh:
    """What the language model of a training runs on."""
    if not e.capture.mesh:
        return make_mesh(e.parallel)
    taken = len(training_devices(e))
    return make_mesh(ParallelConfig(e.capture.mesh), jax.devices()[taken:])
