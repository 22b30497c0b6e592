"""Plans of experiments: for `saejax plan`, for jobs, and for the start of a pipeline."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from saejax.app.experiment import Experiment
from saejax.core.errors import ConfigError, SaejaxError
from saejax.fit.devices import training_mesh
from saejax.plans import page
from saejax.plans.devices import HERE, device, devices
from saejax.plans.estimate import OF_STUDY, Estimate, estimate, estimates, virtual_devices
from saejax.plans.outline import Outline
from saejax.plans.recommendation import recommend, remedy
from saejax.plans.stage import StageEstimate

_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, disk, time and cost of an experiment.

    Attributes:
        estimates: for each number of devices.
        fits: whether one of them can do it, and meets the deadline.
        lines: the same as a text.
    """

    estimates: list[Estimate]
    fits: bool
    lines: list[str]


def plan(e: Experiment, name: str, counts: Sequence[int], deadline: str = "", price: float = 0.0) -> Plan:
    """Plan an experiment on each number of the device `name`; empty: this machine, or its processor.

    Raises:
        ConfigError: an unknown device, a deadline that is no time, a mesh that does not divide.
        DataError: a model whose config.json cannot be read.
    """
    longest = seconds(deadline)
    on = device(name or _default_device())
    virtual_devices(max(counts))
    outline = Outline.of(e)
    planned = estimate(outline, on, sorted(set(counts)))
    advice = recommend(planned, longest)
    unfit = next((each for each in planned if not each.refused and each.over), None)
    remedies = remedy(outline, on, unfit.devices, unfit.over) if unfit and advice.estimate is None else []
    head, below = page.head(e.name, on, outline.models), page.below(planned, advice, remedies)
    lines = [*head, "\n" + page.estimates_table(planned, price) + "\n", *below]
    return Plan(planned, bool(advice.estimate), lines)


def _default_device() -> str:
    """The machine at hand: as it was measured, or its processor."""
    return HERE if HERE in devices() else "cpu"


def of_jobs(e: Experiment, name: str, devices: int) -> tuple[StageEstimate, ...]:
    """The stages as jobs have them: graphs and interventions are one, `study`.

    Raises:
        ConfigError, DataError: as `plan`.
    """
    on = device(name)
    virtual_devices(devices)
    stages = {stage.stage: stage for stage in estimates(e, on, devices)}
    if e.gates.retries and "train" in stages:
        each = sum(stages[name].seconds for name in ("train", "evaluate", "report"))
        stages["train"] = dataclasses.replace(stages["train"], seconds=(1 + e.gates.retries) * each)
    study = [stages[name] for name in OF_STUDY if name in stages]
    if study:
        most = max(study, key=lambda stage: stage.host_bytes)
        stages["study"] = dataclasses.replace(most, stage="study", seconds=sum(stage.seconds for stage in study))
    return tuple(stages.values())


def of_this_machine(e: Experiment) -> tuple[StageEstimate, ...]:
    """The stages on the devices that this process has; empty where they cannot be planned, which others then say."""
    try:
        return estimates(e, device(_default_device()), training_mesh(e).size)
    except SaejaxError:
        return ()


def content(plans: list[Estimate]) -> list[dict[str, Any]]:
    """The estimates as JSON, in bytes and seconds."""
    return [
        {
            "device": each.device.name,
            **{name: getattr(each, name) for name in ("devices", "mesh", "refused", "fits")},
            **{name: getattr(each, name) for name in ("seconds", "device_hours", "disk_bytes")},
            "stages": [
                dataclasses.asdict(stage) | {"parts": dict(stage.parts), "device_bytes": stage.device_bytes}
                for stage in each.stages
            ],
        }
        for each in plans
    ]


def seconds(text: str) -> float:
    """The seconds of 12h, 90min, 2d or 3600; 0 for nothing.

    Raises:
        ConfigError: it says no time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if not text:
        return 0.0
    if not match or match[2] not in _UNITS:
        raise ConfigError(f"--deadline is {text!r}; it must be a time such as 12h, 90min or 2d.")
    return float(match[1]) * _UNITS[match[2]]
