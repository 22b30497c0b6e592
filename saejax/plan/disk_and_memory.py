"""Before anything starts: what cannot end is refused, with the smallest change that could.

Disk is compared where stores and runs will lie, memory on the devices of this process. Looking costs little where both
are ample: the step is compiled only where its state and dense latents come near what there is.
"""

import math
import shutil
from pathlib import Path

import jax

from saejax.app.experiment import Experiment
from saejax.core.errors import ConfigError, DataError
from saejax.fit.devices import training_mesh
from saejax.kernels.batch import DATA
from saejax.plan.amounts import size
from saejax.plan.outline import Outline, parameter_count
from saejax.plan.train_stages import checkpoint_bytes
from saejax.store.files import StoreFiles
from saejax.store.space import bytes_on_disk
from saejax.training.batch_size import room_on

# Arrays of float32 that a step holds beside its state, each with a number for every latent of every token of a part.
_DENSE = 8
_REMEDIES = (
    "Split the batch (--config.train.accumulate=4), lower --config.coder.d_sae or --config.train.batch_size, or spread "
    "the latents over devices (--config.parallel.mesh=1,8, --config.parallel.fsdp=true). `saejax plan` with this "
    "--config finds the smallest change; --anyway starts all the same."
)


def check_disk_and_memory(e: Experiment) -> None:
    """Nothing where the pipeline of an experiment has the disk and the memory that it needs.

    What is on disk already is not asked for again, and a run that has begun is not asked about its memory. An
    experiment without lm.model captures nothing, and brings its own store.

    Raises:
        DataError: the disk has too little room.
        ConfigError: the training's step does not fit a device.
    """
    if not e.lm.model:
        return
    outline = Outline.of(e)
    if not _known(outline):
        return  # PyTorch's model has names of its own, which it says when it is loaded
    begun = e.run.config.is_file()
    _refuse_disk(outline, begun)
    if e.train.batch_size and not outline.swept and not begun:
        _refuse_memory(outline)


def _known(outline: Outline) -> bool:
    """All hook points are known; for a model that JAX runs a wrong one is an error."""
    try:
        return bool(outline.widths)
    except ConfigError:
        if all(shape.config is not None for shape in outline.models):
            raise
        return False


def _refuse_disk(outline: Outline, begun: bool) -> None:
    """Stores and checkpoints together, where they share a disk."""
    e = outline.experiment
    wanted: dict[int, tuple[float, Path, list[str]]] = {}

    def ask(folder: Path, count: float, what: str) -> None:
        there = next(above for above in (folder, *folder.resolve().parents) if above.exists())
        before, _, named = wanted.get(there.stat().st_dev, (0.0, there, []))
        wanted[there.stat().st_dev] = (before + count, there, [*named, f"{what} {size(count)}"])

    for split, count in outline.store_bytes().items():
        files = StoreFiles(e.store_dir(split))
        if files.local is not None and outline.work.origin(split) is None:
            ask(files.local, max(0.0, count - (bytes_on_disk(files) or 0)), f"the {split} store")
    if not outline.swept and not begun:
        state = 12.0 * parameter_count(outline.coder())  # parameters and two moments
        ask(e.run_dir, checkpoint_bytes(e.train, state), "checkpoints")
    for needed, folder, named in wanted.values():
        if needed > (free := shutil.disk_usage(folder).free):
            raise DataError(
                f"The disk of {folder} has {size(free)} free, and this experiment needs {size(needed)} there "
                f"({', '.join(named)}). Free space, name another disk (--config.stores_dir, --config.runs_dir), lower "
                "--config.capture.tokens, or store int8 (--config.capture.dtype=int8, half as much). --anyway starts "
                "all the same."
            )


def _refuse_memory(outline: Outline) -> None:
    e, coder = outline.experiment, outline.coder()
    mesh = training_mesh(e)
    try:
        room = room_on(list(mesh.devices.flat))
    except ConfigError:  # nothing says how much there is
        return
    split = 1 if not e.parallel.fsdp else mesh.size
    latents = e.train.batch_size // e.train.accumulate / mesh.shape[DATA] * math.prod(coder.topology.latent_shape)
    if 16.0 * parameter_count(coder) / split + 4.0 * _DENSE * latents < room / 2:
        return
    needed = outline.step(mesh)[1].bytes
    if needed > room:
        raise ConfigError(
            f"A train step takes {size(needed)} of each device, and {size(room)} of {jax.devices()[0].device_kind} can "
            f"be had. {_REMEDIES}"
        )
