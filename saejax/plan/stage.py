"""What a plan says of one stage."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import Mesh

from saejax.plan.devices import Device
from saejax.plan.host import Host


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """What a stage of an experiment needs on one number of devices.

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
class Terms:
    """What every stage's estimate is made with."""

    device: Device
    mesh: Mesh
    host: Host

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def shares_cores(self) -> bool:
        """Whether the host works on the cores that compute, so that its seconds add up with theirs."""
        return self.device.measured.get("platform", self.device.name) == "cpu"

    def together(self, computing: float, host: float) -> float:
        """Seconds of both, one behind the other on a CPU and side by side elsewhere."""
        return computing + host if self.shares_cores else max(computing, host)
