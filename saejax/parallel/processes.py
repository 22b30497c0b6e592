"""Which of several processes this one is, where they share the work of a capture."""

import dataclasses
import os
import re
from collections.abc import Callable

import jax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from saejax.core.errors import ConfigError
from saejax.parallel.mesh import ParallelConfig, make_mesh

_SLURM = ("SLURM_PROCID", "SLURM_NTASKS")


@dataclasses.dataclass(frozen=True)
class Process:
    """Number `rank` of `world` processes that do not talk to each other."""

    rank: int = 0
    world: int = 1

    def share(self, parts: int) -> range:
        """The parts that this process does, one after the other: rank, rank + world, ...

        Raises:
            ConfigError: there are more processes than parts.
        """
        if self.world > parts:
            raise ConfigError(
                f"{self.world} processes cannot share {parts} parts: set capture.parts to {self.world} or a multiple, "
                "before the store is begun, or start fewer processes."
            )
        return range(self.rank, parts, self.world)


def this_process(config: ParallelConfig) -> Process:
    """The process that `parallel.processes` says: one alone, rank/world, or what SLURM or JAX know.

    SLURM's variables are read only where asked for: a shell inside `salloc` has them too, and is no task of many.
    Call it before anything that makes JAX look for devices: `jax` joins JAX's processes for a moment, if they are not.

    Raises:
        ConfigError: SLURM's variables are not there, or JAX cannot join its processes; says what to set.
    """
    if explicit := re.fullmatch(r"(\d+)/(\d+)", config.processes):
        return Process(int(explicit[1]), int(explicit[2]))
    return _KINDS[config.processes]()


def local_mesh(config: ParallelConfig, process: Process) -> Mesh:
    """The mesh of this process's own devices: of all there are, where it is alone."""
    return make_mesh(config, jax.local_devices() if process.world > 1 else None)


def refuse_many(config: ParallelConfig, command: str) -> None:
    """For the stages that are the work of one process.

    Raises:
        ConfigError: parallel.processes is set.
    """
    if config.processes:
        raise ConfigError(
            f"parallel.processes is {config.processes!r}, and {command} is the work of one process. Run launch.capture "
            f"in each process with it, and when all are done {command} in one, without parallel.processes."
        )


def _slurm() -> Process:
    found = [os.environ.get(name, "") for name in _SLURM]
    if not all(value.isdecimal() for value in found) or not int(found[0]) < int(found[1]):
        said = ", ".join(f"{name}={value!r}" for name, value in zip(_SLURM, found, strict=True))
        raise ConfigError(
            f"parallel.processes is 'slurm', but SLURM's variables do not say which task this is ({said}). Start it by "
            "srun, as in srun --ntasks=8 python -m launch.capture ..., or set parallel.processes to rank/processes."
        )
    return Process(int(found[0]), int(found[1]))


def _jax() -> Process:
    if jax.distributed.is_initialized():
        return Process(jax.process_index(), jax.process_count())
    try:
        jax.distributed.initialize()
        found = Process(jax.process_index(), jax.process_count())
        # Known now who is who, they part again: processes that stay joined all end when one of them dies, and wait for
        # each other at the end; and a capture has nothing to say to the others. The devices are those of this one.
        jax.distributed.shutdown()
        clear_backends()
    except Exception as error:  # ValueError, RuntimeError and those of its transport
        raise ConfigError(
            f"parallel.processes is 'jax', but JAX cannot join its processes ({error}). It knows them on Cloud TPU and "
            "under SLURM, Open MPI and Kubernetes, and JAX_COORDINATOR_ADDRESS=host:port says where they meet. "
            "Elsewhere set parallel.processes to rank/processes, as 0/8."
        ) from None
    return found


_KINDS: dict[str, Callable[[], Process]] = {"": Process, "slurm": _slurm, "jax": _jax}
