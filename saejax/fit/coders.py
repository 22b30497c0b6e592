"""Coders as what learns: one on all devices of a mesh, or those of a sweep as programs on single devices."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from saejax.checkpoints import Checkpoints
from saejax.coders import Coder
from saejax.evals.heldout import VALIDATED, make_validation
from saejax.fit.beginning import Beginning, begin
from saejax.fit.devices import training_devices
from saejax.fit.learner import Data, Materials, Ready, Tell
from saejax.fit.resolve import resolve
from saejax.fit.stacked import GroupProgram, evaluate_heldout, make_program, place
from saejax.fit.trainable import Group, Member, Trainable
from saejax.fit.watching import watches_of
from saejax.parallel import together
from saejax.trained import sites_to_meta
from saejax.training import Program, Setup, TrainState, program_of_one, put_on
from saejax.training.blame import make_blame


@dataclasses.dataclass
class Coders:
    """Groups of coders with what each learns from: a `Learner`.

    Attributes:
        swept: they are members of a sweep, of which every program has a device of its own.
        programs: those of a sweep, once it is ready.
        data: once it is ready.
    """

    groups: Sequence[Group[Any]]
    materials: Sequence[Materials]
    swept: bool = True
    programs: Sequence[GroupProgram] = ()
    data: Data | None = None

    @classmethod
    def alone(cls, materials: Materials) -> "Coders":
        """The one coder of an experiment."""
        e = materials.e
        return cls((Group(e, (Member("", e, e),)),), (materials,), swept=False)

    def ready(self, numbers: Mapping[str, Any], checkpoints: Sequence[Checkpoints], tell: Tell) -> Ready:
        return (self._sweep if self.swept else self._single)(numbers, checkpoints, tell)

    # --- one coder ---------------------------------------------------------------------------------------------

    def _single(self, numbers: Mapping[str, Any], checkpoints: Sequence[Checkpoints], tell: Tell) -> Ready:
        resolved = resolve(self.materials[0], numbers, tell)
        materials, coder, mesh = resolved.materials, resolved.coder, resolved.mesh
        e, sides, stored = materials.e, materials.sides(), checkpoints[0] if checkpoints else None
        self.data = data = materials.data((), mesh, tell)
        start = begin(e, coder, sides, data.batches, materials.source_coder, checkpoints, tell)
        program = _program_on(mesh, e, coder, start, stored)
        validate = make_validation(coder, data.heldout, start.sites, mesh, e.train) if data.heldout else None

        def validated(states: Sequence[TrainState]) -> dict[str, dict[str, float]]:
            assert validate is not None
            return {"": validate(states[0].evaluated(), states[0].stats)}

        setup = Setup(
            programs=[program],
            batches=data.batches,
            put=put_on(mesh, e.train.batch_size, start.sites.hook_points),
            validate=validated if validate else None,
            mesh=mesh,
            blame=make_blame(e.run_dir, data.batches, data.open_reader) if stored and together().first else None,
            tell=tell,
            watches=watches_of(e, list(mesh.devices.flat), _slow(data), tell),
        )
        topology, reads = coder.topology, sides[0]
        groups = f"{len(reads)} x " if len(topology.latent_shape) > 1 else ""
        line = (
            f"{e.coder.preset}, {' '.join(reads)} ({topology.d_in}) -> "
            f"{groups}{topology.d_sae:,} latents, {e.train.steps:,} steps"
        )
        return Ready(e.train, setup, [f"train: {line}"], start.identity)

    # --- a sweep -----------------------------------------------------------------------------------------------

    def _sweep(self, numbers: Mapping[str, Any], checkpoints: Sequence[Checkpoints], tell: Tell) -> Ready:
        e = self.materials[0].e
        hook_points = list(dict.fromkeys(name for one in self.materials for side in one.sides() for name in side))
        self.data = data = self.materials[0].data(hook_points, None, tell)
        assert data.heldout is not None, "a sweep without held-out activations is refused before"
        devices, programs, starts = training_devices(e), [], []
        source = functools.cache(self.materials[0].source_coder)
        for i, (group, materials) in enumerate(zip(self.groups, self.materials, strict=True)):
            coder, how = materials.coder(), (data.batches, source, checkpoints, tell, "sweep", i)
            starts.append(begin(group.experiment, coder, materials.sides(), *how))
            device = devices[i % len(devices)]
            programs.append(make_program(group, coder, starts[i], device, checkpoints[i]))
        self.programs = programs

        def validated(states: Sequence[TrainState]) -> dict[str, dict[str, float]]:
            metrics = self.evaluated(states)
            return {name: {key: row[key] for key in VALIDATED} for name, row in metrics.items()}

        setup = Setup(
            programs=[program.program for program in programs],
            batches=data.batches,
            put=functools.partial(place, programs),
            validate=validated,
            stage="sweep",
            tell=tell,
            watches=watches_of(e, jax.local_devices(), _slow(data), tell, "sweep"),
        )
        return Ready(e.train, setup, _size_lines(e, programs), starts[0].identity)

    def evaluated(self, states: Sequence[TrainState]) -> dict[str, dict[str, float]]:
        """{member: metrics on the held-out activations} of a sweep."""
        assert self.data is not None and self.data.heldout is not None
        return evaluate_heldout(self.programs, states, self.data.heldout)


def _program_on(mesh: Mesh, e: Trainable, coder: Coder, start: Beginning, checkpoints: Checkpoints | None) -> Program:
    about = sites_to_meta(start.sites, coder.topology) | {"dead_after_tokens": coder.dead_after_tokens}
    return program_of_one(
        coder,
        e.train,
        start.sites,
        start.prepare,
        mesh,
        warm=start.warm,
        spread=start.spread,
        seed=e.start_seed,
        checkpoints=checkpoints,
        meta=about | start.to_meta(),
        fsdp=e.parallel.fsdp,
        mode=e.parallel.mode,
    )


def _size_lines(e: Trainable, programs: Sequence[GroupProgram]) -> list[str]:
    """The size of a sweep in words: members, programs, devices, bytes."""
    count = sum(len(program.group.members) for program in programs)
    devices = list(dict.fromkeys(program.device for program in programs))
    on = {device: sum(p.bytes()[1] for p in programs if p.device == device) for device in devices}
    parameters = sum(program.bytes()[0] for program in programs)
    lines = [
        f"sweep: {count} coders in {len(programs)} programs on {len(devices)} of {jax.device_count()} devices, "
        f"{e.train.steps:,} steps of {e.train.batch_size:,} activations; parameters {parameters / 1e6:,.1f} MB, state "
        f"with the optimizer's at most {max(on.values()) / 1e6:,.1f} MB on a device"
    ]
    for i, program in enumerate(programs):
        topology = program.coder.topology
        lines.append(
            f"  {i} on {name_of(program.device)}: {program.group.experiment.coder.preset}, "
            f"{' '.join(program.sites.reads)} ({topology.d_in}) -> {topology.d_sae:,} latents, "
            f"{program.bytes()[1] / 1e6:,.1f} MB: {', '.join(program.program.members)}"
        )
    return lines


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
