"""One of several processes: alone with its part of a capture, or joined with the others in a training."""

import atexit
import contextlib
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.backend import clear_backends
from jax.sharding import Mesh

from saejax.core.errors import ConfigError, DataError, SaejaxError
from saejax.parallel.mesh import ParallelConfig, make_mesh

_GRACE = 3.0  # seconds


@dataclasses.dataclass(frozen=True)
class Process:
    """Number `rank` of `world` processes."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

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

    SLURM's variables are read only if `slurm` is asked for, because a shell inside `salloc` has them too.
    Call it before anything that makes JAX look for devices: `jax` joins JAX's processes for a moment, if they are not.

    Raises:
        ConfigError: SLURM's variables are not there, or JAX cannot join its processes; says what to set.
    """
    if explicit := re.fullmatch(r"(\d+)/(\d+)", config.processes):
        return Process(int(explicit[1]), int(explicit[2]))
    if config.processes == "slurm":
        return _slurm(config)
    if config.processes != "jax":
        return Process()
    if jax.distributed.is_initialized():
        return together()
    try:
        jax.distributed.initialize(config.coordinator or None)
        process = together()
        # The ranks are known now, so the processes part again. Joined processes all end when one of them dies, and wait
        # for each other at the end; a capture needs no communication. The devices are those of this process.
        jax.distributed.shutdown()
        clear_backends()
    except Exception as error:  # ValueError, RuntimeError and those of its transport
        raise ConfigError(f"parallel.processes is 'jax', but {_cannot_join(error)}") from None
    return process


def local_mesh(config: ParallelConfig, process: Process) -> Mesh:
    """The mesh of this process's own devices; these are all devices if it is alone."""
    return make_mesh(config, jax.local_devices() if process.world > 1 else None)


@contextlib.contextmanager
def joined(config: ParallelConfig) -> Iterator[Process]:
    """All processes as one: inside, jax.devices() are those of all of them. Call it before JAX looks for devices.

    Process 0 meets the others at `parallel.coordinator`, or where SLURM or JAX find it, and they part at the end. A
    process that leaves through an error does not wait for the others. They notice at once (process 0, or a collective
    that the network breaks off) or after `parallel.heartbeat` seconds, and end too.

    Raises:
        ConfigError: they cannot join; says what to set.
    """
    if not config.processes:
        yield Process()
        return
    meeting = _meeting(config)
    # A signal is ours to handle (train.preemption): JAX's own service would swallow one during a compilation.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **meeting, heartbeat_timeout_seconds=config.heartbeat, shutdown_timeout_seconds=config.heartbeat
        )
        process = together()
    except Exception as error:  # ValueError, RuntimeError and those of its transport
        raise ConfigError(f"parallel.processes is {config.processes!r}, but {_cannot_join(error)}") from None
    try:
        yield process
    except BaseException as error:
        # JAX would wait for all the others at exit, and they for this one.
        atexit.register(_leave, process, error.exit_code if isinstance(error, SaejaxError) else 1)
        raise
    jax.distributed.shutdown()
    clear_backends()


def _meeting(config: ParallelConfig) -> dict[str, Any]:
    """Arguments of jax.distributed.initialize."""
    known = {"coordinator_address": config.coordinator or None}
    if config.processes == "jax":
        return known
    if config.processes != "slurm" and not config.coordinator:
        raise ConfigError(
            f"parallel.processes is {config.processes!r}, and a training's processes must meet: set "
            "parallel.coordinator to host:port of process 0, the same in all of them."
        )
    process = this_process(config)
    # Without SLURM nothing is looked for elsewhere, and all devices that the process sees are its own.
    method = "slurm" if config.processes == "slurm" else "deactivate"
    return known | {"num_processes": process.world, "process_id": process.rank, "cluster_detection_method": method}


def _leave(process: Process, code: int) -> None:
    if process.first:
        # The end of process 0 aborts the others: those that stop by the same error may say so first.
        time.sleep(_GRACE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def from_first(process: Process, decide: Callable[[], int]) -> int:
    """The number that process 0 decides, in all processes: a disk may look different to each of them.

    Raises:
        DataError: deciding failed, with process 0's own error there.
    """
    if process.world == 1:
        return decide()
    failed: Exception | None = None
    number = 0
    try:
        if process.first:
            number = decide()
    except Exception as error:
        failed = error
    answer = multihost_utils.broadcast_one_to_all(np.asarray([failed is not None, number], np.int32))
    if failed is not None:
        raise failed
    if answer[0]:
        raise DataError("Process 0 has stopped with an error; read its output for the cause.")
    return int(answer[1])


def any_of(process: Process, true_here: bool) -> bool:
    if process.world == 1:
        return true_here
    return bool(np.any(multihost_utils.process_allgather(np.asarray([true_here]))))


def together() -> Process:
    return Process(jax.process_index(), jax.process_count())


def refuse_many(config: ParallelConfig, command: str) -> None:
    """For the stages that are the work of one process.

    Raises:
        ConfigError: parallel.processes is set.
    """
    if config.processes:
        raise ConfigError(
            f"parallel.processes is {config.processes!r}, and {command} is the work of one process. Run saejax capture "
            "or saejax train in each process with it, and when all are done "
            f"{command} in one, without parallel.processes."
        )


def _slurm(config: ParallelConfig) -> Process:
    values = {name: os.environ.get(name, "") for name in ("SLURM_PROCID", "SLURM_NTASKS")}
    rank, world = (int(value) if value.isdecimal() else -1 for value in values.values())
    if not 0 <= rank < world:
        seen = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ConfigError(
            f"parallel.processes is 'slurm', but SLURM's variables do not say which task this is ({seen}). Start it by "
            "srun, as in srun --ntasks=8 saejax capture ..., or set parallel.processes to rank/processes."
        )
    return Process(rank, world)


def _cannot_join(error: Exception) -> str:
    return (
        f"JAX cannot join its processes ({error}). It knows them on Cloud TPU and "
        "under SLURM, Open MPI and Kubernetes, and parallel.coordinator=host:port says where they meet. "
        "Elsewhere set parallel.processes to rank/processes, as 0/8."
    )
