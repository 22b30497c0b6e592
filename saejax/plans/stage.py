"""Estimates of stages, and what each is made with: a device, a mesh of it, the host beside it."""

import dataclasses
import functools
from collections.abc import Mapping

from jax.sharding import Mesh

from saejax.plans.devices import Device
from saejax.plans.laws import Law, roofline
from saejax.plans.programs import Footprint

# Bytes of a process that has imported everything and holds no arrays.
_PROCESS = 1.0e9


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """Needs of one stage of an experiment on one number of devices.

    Attributes:
        stage: capture, train, sweep, evaluate, report, graphs, interventions or prefix.
        devices: how many work.
        parts: {what: bytes on the fullest device} at the fullest moment: state, batch, temporaries, language model,
            key-value cache.
        host_bytes: of the host's memory.
        disk_bytes: what it leaves on disk.
        seconds: from start to end, without waiting for machines; `start` of them go by before the stage's own clock
            runs: imports, loading, compilation.
        flops: floating-point operations of the whole stage.
        bound: what most of the time goes to.
        note: what was assumed; empty for nothing.
    """

    stage: str
    devices: int
    parts: Mapping[str, float]
    host_bytes: float
    disk_bytes: float
    seconds: float
    flops: float
    bound: str = ""
    note: str = ""
    start: float = 0.0

    @property
    def device_bytes(self) -> float:
        """Bytes of each device."""
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Host:
    """Seconds of the host's work: text to tokens, activations to disk and back, programs to compile.

    The defaults are what `saejax calibrate` found on 2 cores of a server (AMD EPYC, 2026-11-23), rounded; a machine
    with more cores is quicker.

    Attributes:
        token: to read and pack one token of text.
        stored_byte: to permute, hash and write one byte of a store.
        read_byte: to read, shuffle and hand over one byte of a batch.
        step: around each train step.
        save: to write one checkpoint, as far as the training waits for it.
        latent: to look at one latent for the report's pages.
        start: to start a stage: imports, the model, compilation.
    """

    token: float = 2e-6
    stored_byte: float = 1e-8
    read_byte: float = 2e-9
    step: float = 1e-3
    save: float = 0.5
    latent: float = 5e-3
    start: float = 30.0

    @classmethod
    def of(cls, device: Device) -> "Host":
        """Measurements of a device's machine, defaults for the rest."""
        known = {field.name for field in dataclasses.fields(cls)}
        measured = device.measured.get("host", {})
        return cls(**{name: float(value) for name, value in measured.items() if name in known})


@dataclasses.dataclass(frozen=True)
class Terms:
    """Device, mesh and host that every stage's estimate is made with."""

    device: Device
    mesh: Mesh

    @functools.cached_property
    def host(self) -> Host:
        return Host.of(self.device)

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def shares_cores(self) -> bool:
        """The host works on the cores that compute, so that its seconds add up with theirs."""
        return self.device.measured.get("platform", self.device.name) == "cpu"

    def together(self, computing: float, host: float) -> float:
        """Seconds of both, one behind the other on a CPU and side by side elsewhere."""
        return computing + host if self.shares_cores else max(computing, host)

    def seconds(self, law: Law | None, work: Footprint, peak: float) -> float:
        """Seconds of a program: by what was measured of its kind on one such device, else by the data sheet."""
        return law.seconds(work.amounts) if law and self.devices == 1 else roofline(self.device, work, peak)

    def estimate(
        self,
        stage: str,
        parts: Mapping[str, float],
        *,
        host: float,
        disk: float,
        seconds: float,
        flops: float,
        bound: str,
        note: str = "",
        devices: int = 0,
        starts: float = 1.0,
    ) -> StageEstimate:
        """The estimate of a stage.

        Args:
            host: bytes of the host's memory beside those of a process that has imported everything.
            seconds: after the start.
            devices: how many work; 0 for all of the mesh.
            starts: times that the host's start goes by.
        """
        start, devices = self.host.start * starts, devices or self.devices
        return StageEstimate(stage, devices, parts, _PROCESS + host, disk, start + seconds, flops, bound, note, start)
