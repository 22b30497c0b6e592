"""Mesh (DATA, LATENT), in messages and documents "data" and "latent", and shardings from logical axes.

Parameters carry logical axis names (`d_in`, `latent`; of the language model `heads`, `d_mlp`, `vocab`); `_RULES` maps
those to mesh axes. With one device every sharding is trivial and the programs are the same.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from saejax.core.errors import ConfigError
from saejax.core.settings import Settings, setting
from saejax.kernels.batch import DATA, LATENT, MESH_AXES
from saejax.kernels.shards import split

R = TypeVar("R")

_RULES: dict[str | None, str | None] = {
    **dict.fromkeys(("d_in", "site", "d_model", "d_head", None)),
    **dict.fromkeys(("latent", "heads", "kv_heads", "d_mlp", "vocab"), LATENT),
}


def on_mesh(function: Callable[..., R], mesh: Mesh) -> Callable[..., R]:
    """`function`, for jit: what it traces knows how tokens and latents lie on `mesh`, and selects and sums by shards.

    Without it the result is the same, but the compiler may gather what is split. On one device nothing changes.
    """

    def traced(*arguments: Any) -> R:
        with split(mesh):
            return function(*arguments)

    return traced


def on_each_device(function: Callable[..., R], mesh: Mesh) -> Callable[..., R]:
    """`function` (state, {name: rows}, ...), for jit: every device of `mesh` runs it on its own rows, under pmap.

    Everything but the rows is the same on every device, before and after. `function` ensures this with the sums of
    `kernels.batch`.

    Raises:
        ConfigError: several processes, whose arrays pmap would take for each one's own.
    """
    if jax.process_count() > 1:
        raise ConfigError("parallel.mode=pmap is for the devices of one process; for several set parallel.mode=jit.")
    n = mesh.shape[DATA]

    def each(state: Any, rows: Mapping[str, Any], *others: Any) -> R:
        in_axes = (None, 0, *[None] * len(others))
        mapped = jax.pmap(function, DATA, in_axes=in_axes, out_axes=None, devices=list(mesh.devices.flat))
        parts = {name: array.reshape(n, -1, *array.shape[1:]) for name, array in rows.items()}
        result: R = mapped(state, parts, *others)
        return result

    return each


# How a step becomes a program for all devices.
MODES: dict[str, Callable[[Callable[..., Any], Mesh], Callable[..., Any]]] = {"jit": on_mesh, "pmap": on_each_device}


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Settings, section="parallel"):
    """Settings of devices and processes."""

    mesh: tuple[int, ...] = setting(
        (), 'Devices along ("data", "latent"), as in 4,2; empty means all devices along "data".'
    )
    processes: str = setting(
        "",
        "Which of several processes this one is, in a capture by capture.parts or in a training: 2/8 for number 2 "
        "(from 0) of 8; slurm for what SLURM_PROCID and SLURM_NTASKS say; jax for what jax.distributed finds. Empty: "
        "alone.",
    )
    fsdp: bool = setting(
        False,
        'Parameters, their moments and averages are spread over "data" too, so that no device holds what another has; '
        "XLA gathers them where they are needed. The numbers stay the same.",
    )
    coordinator: str = setting(
        "", "host:port of process 0, where the processes of a training meet; needed with 2/8, found by slurm and jax."
    )
    heartbeat: int = setting(
        100, "Seconds without a word from one of a training's processes after which the others end.", low=1
    )
    mode: str = setting(
        "jit",
        "How training uses the devices: jit, one program over the mesh; pmap, a program that every device runs on its "
        "own rows of a batch, with all of the parameters. The numbers are the same.",
        choices=MODES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "pmap" and (self.fsdp or self.mesh[1:] not in ((), (1,))):
            raise ConfigError(
                "parallel.mode=pmap has all parameters on every device: leave parallel.fsdp, and give parallel.mesh as "
                "8,1; or set parallel.mode=jit."
            )
        if self.mesh and (len(self.mesh) != 2 or min(self.mesh) < 1):
            raise ConfigError(f"parallel.mesh is {self.mesh}; it must be two positive numbers, as in 4,2.")
        explicit = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.processes, re.ASCII)
        if self.processes not in ("", "slurm", "jax") and not (explicit and int(explicit[1]) < int(explicit[2])):
            raise ConfigError(
                f"parallel.processes is {self.processes!r}; it must be rank/processes, ranks from 0, as 0/8 to 7/8, "
                "or slurm, or jax, or empty for one process."
            )
        if self.coordinator and not re.fullmatch(r"\S+:\d{1,5}", self.coordinator, re.ASCII):
            raise ConfigError(f"parallel.coordinator is {self.coordinator!r}; it must be host:port.")


def make_mesh(config: ParallelConfig, devices: Any = None) -> Mesh:
    """The mesh that `config` asks for, over `devices` (default: all).

    Raises:
        ConfigError: it needs more devices than there are.
    """
    devices = jax.devices() if devices is None else devices
    shape = config.mesh or (len(devices), 1)
    if math.prod(shape) > len(devices):
        wanted = ",".join(map(str, shape))
        raise ConfigError(
            f"parallel.mesh={wanted} needs {math.prod(shape)} devices; there are {len(devices)}: lower it."
        )
    chosen = np.array(devices[: math.prod(shape)]).reshape(shape)
    if len({device.process_index for device in chosen.flat}) < len({device.process_index for device in devices}):
        raise ConfigError(
            f"parallel.mesh={','.join(map(str, shape))} has no device of some processes: set it to all {len(devices)}."
        )
    return Mesh(chosen, MESH_AXES, axis_types=(AxisType.Auto,) * 2)


def check_divides(mesh: Mesh, d_sae: int) -> None:
    """Refuse a mesh over which the latents cannot be split evenly.

    Raises:
        ConfigError: d_sae is not a multiple of the devices along "latent".
    """
    n = mesh.shape[LATENT]
    if d_sae % n:
        raise ConfigError(
            f"{d_sae} latents cannot be split over the {n} devices along latent of parallel.mesh; "
            f"set coder.d_sae={-(-d_sae // n) * n}, or another mesh."
        )


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over "data", everything else whole."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def own_rows(mesh: Mesh, batch_size: int, parts: int = 1, together: int = 1) -> tuple[int, int]:
    """(first, stop) of the rows of a global batch that this process's devices hold, by `batch_sharding`.

    Processes whose devices share a place along "data" have the same rows. If a batch is taken in `parts`, every device
    has rows of each part. Windows of so many rows `together` stay on one device.

    Raises:
        ConfigError: the batch, or a part, is not a multiple of the devices along "data", or the rows are not one range.
    """
    n = mesh.shape[DATA]
    if batch_size % (least := n * parts * together):
        of, or_parts = (
            (f" in {parts} parts (train.accumulate)", ", or another train.accumulate") if parts > 1 else ("", "")
        )
        of += f" of windows of {together} (train.neighbours)" if together > 1 else ""
        raise ConfigError(
            f"train.batch_size {batch_size}{of} cannot be split over the {n} devices along data of parallel.mesh; "
            f"set train.batch_size={-(-batch_size // least) * least}, or another mesh{or_parts}."
        )
    indices = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    held = sorted({index[0].indices(batch_size)[:2] for index in indices.values() if index})
    if any(range_[1] != other[0] for range_, other in pairwise(held)):
        raise ConfigError("The rows of this process's devices are not neighbours; choose another parallel.mesh.")
    return held[0][0], held[-1][1]


def sharding_of(
    mesh: Mesh, shape: tuple[int, ...], logical: tuple[str | None, ...], fsdp: bool = False
) -> NamedSharding:
    """Sharding of an array of `shape` with these logical axes; whole on every device if one of them does not divide.

    With `fsdp` it is spread over "data" too: along its longest axis that nothing else is spread along, or along the one
    of the latents, whichever of these divides first.
    """
    mesh_axes: list[Any] = [_RULES[axis] for axis in logical]
    if any(axis and size % mesh.shape[axis] for axis, size in zip(mesh_axes, shape, strict=True)):
        mesh_axes = [None] * len(shape)
    if fsdp:
        free_first = sorted(range(len(shape)), key=lambda i: (mesh_axes[i] is not None, -shape[i]))
        for i in free_first:
            taken = (mesh_axes[i],) if mesh_axes[i] else ()
            if shape[i] % math.prod(mesh.shape[axis] for axis in (*taken, DATA)) == 0:
                mesh_axes[i] = (*taken, DATA)
                break
    return NamedSharding(mesh, PartitionSpec(*mesh_axes))


def tree_shardings(mesh: Mesh, tree: Any, axes: Mapping[str, tuple[str | None, ...]], fsdp: bool = False) -> Any:
    """Shardings for every leaf of `tree`, found by the leaf's own name; see `sharding_of` for `fsdp`.

    A leaf whose last named path entry is in `axes` and whose rank fits (a parameter, its optimizer moments,
    its statistics) follows those logical axes; every other leaf is replicated.
    """

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        names = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
        logical = axes.get(names[-1]) if names else None
        if logical is None or len(logical) != leaf.ndim:
            return replicated(mesh)
        # Some optimizers keep a placeholder of size 1 where others keep a moment: it does not divide either.
        return sharding_of(mesh, leaf.shape, logical, fsdp)

    return jax.tree_util.tree_map_with_path(sharding, tree)
