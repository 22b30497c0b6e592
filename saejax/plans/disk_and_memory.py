"""Before anything starts: what cannot end is refused, with the smallest change that could.

Disk is compared where stores and runs will lie, memory on the devices of this process. Looking costs little where both
are ample: the step is compiled only where its state and dense latents come near what there is.
"""

import math
import shutil
from pathlib import Path

import jax

from saejax.app.experiment import Experiment
from saejax.core.amounts import size
from saejax.core.errors import ConfigError, DataError
from saejax.fit.devices import training_mesh
from saejax.kernels.batch import DATA
from saejax.lm.conventions import DecoderConfig
from saejax.plans.outline import Outline, missing_bytes
from saejax.plans.programs import parameter_count
from saejax.plans.train_stages import checkpoint_bytes
from saejax.plans.trial import existing
from saejax.training.batch_size import room_on

# Arrays of float32 that a step holds beside its state, each with a number for every latent of every token of a part.
_DENSE = 8


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
    try:
        known = bool(outline.widths)
    except ConfigError:
        if all(isinstance(shape, DecoderConfig) for shape in outline.models):
            raise
        known = False
    if not known:
        return  # PyTorch's model has names of its own, which it says when it is loaded
    begins = not outline.experiment.swept and not e.run.config.is_file()
    _refuse_disk(outline, begins)
    if e.train.batch_size and begins:
        _refuse_memory(outline)


def _refuse_disk(outline: Outline, begins: bool) -> None:
    """Stores and checkpoints together, where they share a disk."""
    e = outline.experiment
    stores = missing_bytes(outline.work).items() if "://" not in e.stores_dir else ()
    wanted = [(e.store_dir(split), float(count), f"the {split} store") for split, count in stores]
    if begins:
        state = 12.0 * parameter_count(outline.coder())  # parameters and two moments
        wanted.append((str(e.run_dir), checkpoint_bytes(e.train, state), "checkpoints"))
    disks: dict[int, list[tuple[Path, float, str]]] = {}
    for where, count, what in wanted:
        folder = existing(where)
        disks.setdefault(folder.stat().st_dev, []).append((folder, count, f"{what} {size(count)}"))
    for of_disk in disks.values():
        folders, counts, named = zip(*of_disk, strict=True)
        if sum(counts) > (free := shutil.disk_usage(folders[0]).free):
            raise DataError(
                f"The disk of {folders[0]} has {size(free)} free, and this experiment needs {size(sum(counts))} there "
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
            "be had. Split the batch (--config.train.accumulate=4), lower --config.coder.d_sae or "
            "--config.train.batch_size, or spread the latents over devices (--config.parallel.mesh=1,8, "
            "--config.parallel.fsdp=true). `saejax plan` with this --config finds the smallest change; --anyway "
            "starts all the same."
        )
