"""Estimates of all stages of an experiment on so many devices of a kind.

A step's bytes are those of its compiled program (`programs`). Seconds are work over speed (`laws`), with the host's
part (`stage.Host`) beside it on an accelerator and added on a CPU, where both want the same cores.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax

from saejax.app.experiment import Experiment
from saejax.core.errors import ConfigError
from saejax.kernels.batch import DATA, LATENT
from saejax.plans import lm_stages, prefix_stages, train_stages
from saejax.plans.devices import Device
from saejax.plans.outline import ROOM, Outline, mesh_of
from saejax.plans.stage import StageEstimate, Terms

Make = Callable[[Outline, Terms], StageEstimate | None]

# Stages over all devices, and those that one device does; in the order in which they run.
SPREAD: dict[str, Make] = {
    "capture": lm_stages.capture,
    "train": train_stages.train,
    "sweep": train_stages.sweep,
    "prefix": prefix_stages.prefix,
}
ALONE: dict[str, Make] = {
    "evaluate": lm_stages.evaluate,
    "report": lm_stages.report,
    "graphs": lm_stages.graphs,
    "interventions": lm_stages.interventions,
}
# Only `saejax study` has these.
OF_STUDY = ("graphs", "interventions")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An experiment on a number of devices of one kind.

    Attributes:
        mesh: devices along data, latent.
        stages: in the order in which they run.
        refused: why this number of devices cannot be had; empty where it can.
    """

    device: Device
    devices: int
    mesh: tuple[int, int]
    stages: tuple[StageEstimate, ...]
    refused: str = ""

    @property
    def pipeline(self) -> tuple[StageEstimate, ...]:
        """The stages of `saejax pipeline`, or of a sweep."""
        return tuple(stage for stage in self.stages if stage.stage not in OF_STUDY)

    @property
    def seconds(self) -> float:
        """Of the pipeline."""
        return sum(stage.seconds for stage in self.pipeline)

    @property
    def device_hours(self) -> float:
        """Of the pipeline: all devices are held from its start to its end."""
        return self.seconds * self.devices / 3600

    @property
    def device_bytes(self) -> float:
        """Of the fullest device at the fullest moment of the pipeline."""
        return max((stage.device_bytes for stage in self.pipeline), default=0.0)

    @property
    def disk_bytes(self) -> float:
        return sum(stage.disk_bytes for stage in self.pipeline)

    @property
    def over(self) -> list[str]:
        """The stages of the pipeline that do not fit."""
        return [stage.stage for stage in self.pipeline if stage.device_bytes > ROOM * self.device.memory]

    @property
    def fits(self) -> bool:
        return not self.refused and not self.over

    @property
    def utilisation(self) -> float:
        """Operations of the pipeline over what all devices could do in its time."""
        could = self.seconds * self.devices * self.device.bfloat16
        return sum(stage.flops for stage in self.pipeline) / could if could else 0.0


def estimate(outline: Outline, device: Device, counts: Sequence[int]) -> list[Estimate]:
    """The estimate for each number of devices, or why there is none.

    Raises:
        ConfigError, DataError: an experiment that cannot be on one device, nor on any number of them.
    """

    def spread(devices: int) -> Estimate:
        try:
            terms = _terms(outline, device, devices)
            stages = _estimates_of(SPREAD, outline.sized(device, terms.mesh), terms)
        except ConfigError as error:
            return Estimate(device, devices, (devices, 1), (), str(error))
        return Estimate(device, devices, (terms.mesh.shape[DATA], terms.mesh.shape[LATENT]), stages)

    # XLA compiles without Python's lock.
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        rest = pool.submit(lambda: _estimates_of(ALONE, outline, _terms(outline, device)))
        estimates = list(pool.map(spread, counts))
    if all(option.refused for option in estimates):
        raise ConfigError(estimates[0].refused)
    return [
        option if option.refused else dataclasses.replace(option, stages=option.stages + rest.result())
        for option in estimates
    ]


def stage_of(outline: Outline, device: Device, devices: int, stage: str) -> StageEstimate:
    """One stage that the experiment has."""
    terms = _terms(outline, device, devices if stage in SPREAD else 0)
    estimated = (SPREAD | ALONE)[stage](outline.sized(device, terms.mesh), terms)
    assert estimated is not None, f"the experiment has no stage {stage}"
    return estimated


def _terms(outline: Outline, device: Device, devices: int = 0) -> Terms:
    """For so many devices; 0 for a stage that one of them does, whatever the experiment's mesh."""
    e = outline.experiment
    if not devices:
        e = dataclasses.replace(e, parallel=dataclasses.replace(e.parallel, mesh=()))
    return Terms(device, mesh_of(e, devices or 1))


def _estimates_of(makes: Mapping[str, Make], outline: Outline, terms: Terms) -> tuple[StageEstimate, ...]:
    # An experiment with a prefix trains that and no coder.
    has = bool(outline.experiment.prefix.source)
    estimated = [make(outline, terms) for stage, make in makes.items() if (stage == "prefix") == has]
    return tuple(stage for stage in estimated if stage is not None)


def estimates(e: Experiment, device: Device, devices: int) -> tuple[StageEstimate, ...]:
    """Estimates of the stages of an experiment on so many devices."""
    return estimate(Outline.of(e), device, [devices])[0].stages


def virtual_devices(count: int) -> None:
    """Let JAX have so many virtual devices of this machine's CPU; before it is first asked for any.

    Programs for them are compiled and not run, so XLA need not make them fast.

    Raises:
        ConfigError: it was asked already, and has fewer.
    """
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices("cpu")) < count:
            raise ConfigError(
                f"A plan for {count} devices needs as many virtual ones, which JAX makes only at its start. Plan "
                f"before anything else, or set XLA_FLAGS=--xla_force_host_platform_device_count={count}."
            ) from None
