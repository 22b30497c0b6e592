"""Coders as what learns: one on all devices of a mesh, or those of a sweep as programs on single devices."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder
from saejax.evals.heldout import VALIDATED, make_validation
from saejax.fit.beginning import Beginning, begin
from saejax.fit.devices import training_devices, watches_of
from saejax.fit.learner import Data, Materials, Ready, Tell
from saejax.fit.resolve import resolve
from saejax.fit.stacked import GroupProgram, evaluate_heldout, make_program, place
from saejax.fit.trainable import Group, Member
from saejax.parallel import together
from saejax.training import Program, Setup, TrainState, program_of_one, put_on
from saejax.training.blame import make_blame

# The programs of a training, `Setup.put` and `Setup.validate` of them, and their sizes in words.
_Placed = tuple[Sequence[Program], Callable[..., Any], Callable[..., Any] | None, Sequence[str]]


@dataclasses.dataclass
class Coders:
    """Members in groups that train as one program each, with what each group learns from: a `Learner`.

    Attributes:
        groups: a single run is one member without a name, which has a mesh of devices to itself and may leave numbers
            open; of a sweep every program has a device of its own.
        programs: those of a sweep, once it is ready.
        data: once it is ready.
    """

    groups: Sequence[Group[Any]]
    materials: Sequence[Materials]
    programs: Sequence[GroupProgram] = ()
    data: Data | None = None

    @classmethod
    def alone(cls, materials: Materials) -> "Coders":
        """The one coder of an experiment."""
        e = materials.experiment
        return cls((Group(e, (Member("", e, e),)),), (materials,))

    def ready(self, numbers: Mapping[str, Any], checkpoints: Sequence[Checkpoints], tell: Tell) -> Ready:
        mesh: Mesh | None = None
        if not self.groups[0].members[0].name:
            resolved = resolve(self.materials[0], numbers, tell)
            mesh, self.materials = resolved.mesh, (resolved.materials,)
        first, stage = self.materials[0], "train" if mesh else "sweep"
        e, sides = first.experiment, [side for materials in self.materials for side in materials.sites]
        self.data = data = first.data(list(dict.fromkeys(name for side in sides for name in side)), mesh, tell)
        source, coders = functools.cache(first.source_coder), [materials.build() for materials in self.materials]
        starts = [
            begin(materials.experiment, coder, materials.sites, data.batches, source, checkpoints, tell, stage, i)
            for i, (materials, coder) in enumerate(zip(self.materials, coders, strict=True))
        ]
        if mesh:
            programs, put, validate, lines = self._on_mesh(mesh, coders[0], starts[0], checkpoints)
        else:
            programs, put, validate, lines = self._on_devices(coders, starts, checkpoints)
        blamed = mesh and checkpoints and together().first
        blame = make_blame(e.run_dir, data.batches, data.open_reader) if blamed else None
        watches = watches_of(e, list(mesh.devices.flat) if mesh else jax.local_devices(), _slow(data), tell, stage)
        how: dict[str, Any] = {"mesh": mesh, "blame": blame, "stage": stage, "tell": tell, "watches": watches}
        return Ready(e.train, Setup(programs, data.batches, put, validate, **how), lines, starts[0].identity)

    def _on_mesh(self, mesh: Mesh, coder: Coder, start: Beginning, checkpoints: Sequence[Checkpoints]) -> _Placed:
        """One coder, spread over the devices of a mesh."""
        e, topology, data = self.materials[0].experiment, coder.topology, self.data
        beside = self.materials[0].beside(coder, start.sites, mesh)
        program = program_of_one(
            coder,
            e.train,
            start.sites,
            start.prepare,
            mesh,
            beside=beside,
            warm=start.warm,
            spread=start.spread,
            seed=e.start_seed,
            checkpoints=checkpoints[0] if checkpoints else None,
            meta=start.to_meta(coder, dead_after_tokens=coder.dead_after_tokens),
            fsdp=e.parallel.fsdp,
            mode=e.parallel.mode,
        )
        put = put_on(mesh, e.train.batch_size, start.sites.hook_points, beside.arrays if beside else {})
        groups = f"{len(start.sites.reads)} x " if len(topology.latent_shape) > 1 else ""
        line = (
            f"train: {e.coder.preset}, {' '.join(start.sites.reads)} ({topology.d_in}) -> "
            f"{groups}{topology.d_sae:,} latents, {e.train.steps:,} steps"
        )
        if data is None or data.heldout is None:
            return [program], put, None, [line]
        metrics_of = make_validation(coder, data.heldout, start.sites, mesh, e.train)

        def validate(states: Sequence[TrainState]) -> dict[str, dict[str, float]]:
            return {"": metrics_of(states[0].evaluated(), states[0].stats)}

        return [program], put, validate, [line]

    def _on_devices(
        self, coders: Sequence[Coder], starts: Sequence[Beginning], checkpoints: Sequence[Checkpoints]
    ) -> _Placed:
        """The groups of a sweep, each on the next of the devices."""
        e = self.materials[0].experiment
        assert self.data is not None and self.data.heldout is not None, "a sweep without one is refused before"
        devices = training_devices(e)
        self.programs = programs = [
            make_program(group, coder, start, devices[i % len(devices)], checkpoints[i])
            for i, (group, coder, start) in enumerate(zip(self.groups, coders, starts, strict=True))
        ]

        def validate(states: Sequence[TrainState]) -> dict[str, dict[str, float]]:
            metrics = self.evaluated(states)
            return {name: {key: row[key] for key in VALIDATED} for name, row in metrics.items()}

        devices = list(dict.fromkeys(program.device for program in programs))
        on = [sum(program.bytes()[1] for program in programs if program.device == device) for device in devices]
        lines = [
            f"sweep: {sum(len(group.members) for group in self.groups)} coders in {len(programs)} programs on "
            f"{len(devices)} of {jax.device_count()} devices, {e.train.steps:,} steps of {e.train.batch_size:,} "
            f"activations; parameters {sum(program.bytes()[0] for program in programs) / 1e6:,.1f} MB, state "
            f"with the optimizer's at most {max(on) / 1e6:,.1f} MB on a device"
        ]
        for i, program in enumerate(programs):
            topology = program.coder.topology
            lines.append(
                f"  {i} on {name_of(program.device)}: {program.group.experiment.coder.preset}, "
                f"{' '.join(program.sites.reads)} ({topology.d_in}) -> {topology.d_sae:,} latents, "
                f"{program.bytes()[1] / 1e6:,.1f} MB: {', '.join(program.program.members)}"
            )
        return [program.program for program in programs], functools.partial(place, programs), validate, lines

    def evaluated(self, states: Sequence[TrainState]) -> dict[str, dict[str, float]]:
        """{member: metrics on the held-out activations} of a sweep."""
        assert self.data is not None and self.data.heldout is not None
        return evaluate_heldout(self.programs, states, self.data.heldout)


def name_of(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _slow(data: Data) -> str:
    """Advice where a training waits for its batches."""
    if data.slow:
        return data.slow
    if data.open_reader:
        return (
            "Reading the store is slower than the step: put it on a local disk (stores_dir), or leave CPU cores to the "
            "reader."
        )
    return (
        "What makes the activations is slower than the step: capture them into a store once (capture.into=store), or "
        "give it faster or more devices."
    )
