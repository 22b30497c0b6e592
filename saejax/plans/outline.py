"""The outline of an experiment: models' shapes, coder, store, compiled step; nothing is loaded, no store is needed."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from saejax.app.experiment import Experiment
from saejax.app.workspace import Workspace
from saejax.capture import expand_hook_points
from saejax.coders import Coder
from saejax.core.config import to_json
from saejax.core.errors import ConfigError
from saejax.fit.resolve import batch_size
from saejax.kernels.batch import DATA, LATENT
from saejax.lm.shape import ModelShape
from saejax.parallel import ParallelConfig, check_divides, make_mesh
from saejax.plans.devices import Device
from saejax.plans.models import TwoModels, shapes_of
from saejax.plans.programs import Footprint, step_program, through_program
from saejax.store.files import StoreFiles
from saejax.store.manifest import Header
from saejax.store.space import bytes_on_disk, predicted_bytes

# Of a device's memory, what a program may take: the rest is for the runtime, validation and the next batch.
ROOM = 0.85


@dataclasses.dataclass(frozen=True)
class Outline:
    """An experiment, and what follows from its settings without running anything.

    Attributes:
        work: of the experiment, with the models' names in place of the models.
        models: one, or two to compare.
        known: footprints of train steps by what decides them, so that none is compiled twice.
    """

    work: Workspace
    models: tuple[ModelShape, ...]
    known: dict[Any, Footprint] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, e: Experiment) -> "Outline":
        """Read the models' config.json.

        Raises:
            ConfigError, DataError: a model or hook point that there is not.
        """
        models = shapes_of(e.lm)
        names = models[0] if len(models) == 1 else TwoModels(*models)
        return cls(Workspace(e, named=names), models)

    @property
    def experiment(self) -> Experiment:
        return self.work.experiment

    @functools.cached_property
    def widths(self) -> dict[str, int]:
        """{hook point stored: its width}."""
        return captured_widths(self.work)

    @property
    def weights(self) -> int:
        """Bytes of the model, the first where there are two."""
        return self.models[0].n_parameters * jnp.dtype(self.experiment.lm.dtype).itemsize

    def with_experiment(self, e: Experiment) -> "Outline":
        """The same models under other settings."""
        return dataclasses.replace(self, work=self.work.of(e))

    def coder(self) -> Coder:
        return self.work.build()

    def step(self, mesh: Mesh) -> tuple[Coder, Footprint]:
        """(the experiment's coder, its compiled train step).

        Raises:
            ConfigError: what training itself would refuse of the mesh.
        """
        coder, e = self.coder(), self.experiment
        check_divides(mesh, coder.topology.d_sae)
        t, rows = e.train, mesh.shape[DATA]
        if t.batch_size % (rows * t.accumulate * t.neighbours):
            raise ConfigError(
                f"train.batch_size {t.batch_size} cannot be split over {rows} devices"
                + (f" in {t.accumulate} parts (train.accumulate)" if t.accumulate > 1 else "")
                + (f" of windows of {t.neighbours} (train.neighbours)." if t.neighbours > 1 else ".")
            )
        parts = [to_json(e.coder), to_json(t), e.parallel.fsdp, e.parallel.mode, self.work.sites]
        key = json.dumps([*parts, rows, mesh.shape[LATENT]])
        if key not in self.known:
            self.known[key] = step_program(e, coder, self.work.sites, mesh)[1]
        return coder, self.known[key]

    def through(self, mesh: Mesh) -> Footprint | None:
        """The second loss of a step of the experiment, of one part of its rows; None where there is none."""
        e, sites = self.experiment, self.work.sites
        if not e.train.through:
            return None
        through = {key: value for key, value in to_json(e.train).items() if key.startswith("through")}
        shape = [mesh.shape[DATA], mesh.shape[LATENT]]
        key = json.dumps([to_json(e.coder), through, e.lm.dtype, e.text.context_length, sites, *shape])
        if key not in self.known:
            self.known[key] = through_program(e, self.coder(), sites, self.models[0], mesh)
        return self.known[key]

    def sized(self, device: Device, mesh: Mesh) -> "Outline":
        """The same with train.batch_size=0 replaced by the size that training would find on such devices."""
        e = self.experiment
        if e.train.batch_size or e.prefix.source:
            return self

        def of_size(size: int) -> "Outline":
            return self.with_experiment(dataclasses.replace(e, train=dataclasses.replace(e.train, batch_size=size)))

        def needs(size: int) -> int:
            second = self.through(mesh)
            return int(of_size(size).step(mesh)[1].bytes + (second.bytes if second else 0))

        return of_size(batch_size(e.train, self.work.rows(), mesh, needs, int(ROOM * device.memory))[0])


def captured_widths(work: Workspace) -> dict[str, int]:
    """{hook point that a capture stores: its width}."""
    there = work.names.hook_points()
    return {name: there[name] for name in expand_hook_points(work.experiment.capture.hook_points, work.names)}


def store_bytes(work: Workspace) -> dict[str, int]:
    """{split: bytes on disk}, of what a capture writes."""
    c, widths = work.experiment.capture, captured_widths(work)
    tokens = ({} if c.into == "training" else {"train": c.tokens}) | {"heldout": c.heldout_tokens}
    return {split: predicted_bytes(Header({}, widths, n, c.layout(split), 0, c.parts)) for split, n in tokens.items()}


def missing_bytes(work: Workspace) -> dict[str, int]:
    """{split: bytes that its store still lacks}, of the stores that this experiment captures itself."""
    missing = {}
    for split, count in store_bytes(work).items():
        if work.origin(split) is None:
            there = bytes_on_disk(StoreFiles(work.experiment.store_dir(split)))
            missing[split] = max(0, count - (there or 0))
    return missing


def mesh_of(e: Experiment, devices: int, virtual: Sequence[Any] | None = None) -> Mesh:
    """The mesh that the experiment would have on so many devices: parallel.mesh's devices along "latent" stay.

    Raises:
        ConfigError: they do not divide, or this process has too few virtual devices.
    """
    latent = e.parallel.mesh[1] if e.parallel.mesh else 1
    if devices % latent:
        raise ConfigError(f"parallel.mesh has {latent} devices along latent, which does not divide {devices}.")
    there = list(virtual or jax.devices("cpu"))
    if devices > len(there):
        raise ConfigError(
            f"A plan for {devices} devices needs as many virtual ones, and this process has {len(there)}."
        )
    return make_mesh(ParallelConfig((devices // latent, latent)), there)
