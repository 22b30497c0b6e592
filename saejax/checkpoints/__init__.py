"""L3: named trees of arrays to disk and back: in the background, verified, on any number of devices."""

from saejax.checkpoints.checkpoints import Checkpoints

__all__ = ["Checkpoints"]
