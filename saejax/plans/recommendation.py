"""The number of devices to take, and the smallest change where nothing fits."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from saejax.app.experiment import Experiment
from saejax.core.errors import SaejaxError
from saejax.plans.devices import Device
from saejax.plans.estimate import Estimate, stage_of
from saejax.plans.outline import ROOM, Outline

# Of the device-hours of the least devices that fit: what more devices may cost before it is called a waste.
_WASTE = 1.5


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The number of devices to take.

    Attributes:
        estimate: of that number; None where none will do.
        why: in a sentence.
        wasteful: {devices: what of them is wasted}.
    """

    estimate: Estimate | None
    why: str
    wasteful: dict[int, str]


def recommend(estimates: Sequence[Estimate], deadline: float = 0.0) -> Recommendation:
    """The least devices that fit and meet the deadline (seconds; 0 for none), and what more of them would waste."""
    fitting = sorted((option for option in estimates if option.fits), key=lambda option: option.devices)
    if not fitting:
        return Recommendation(None, "Nothing fits.", {})
    wasteful, least = {}, fitting[0]
    for more in fitting[1:]:
        spent, left = more.device_hours / least.device_hours, more.seconds / least.seconds
        if spent > _WASTE:
            wasteful[more.devices] = f"{spent:.1f} times the device-hours of {least.devices} for {left:.0%} of its time"
    in_time = [option for option in fitting if not deadline or option.seconds <= deadline]
    if not in_time:
        quickest = min(fitting, key=lambda option: option.seconds)
        why = f"No number of devices meets the deadline; {quickest.devices} are the quickest."
        return Recommendation(None, why, wasteful)
    why = "the least that fits" + (" and meets the deadline" if deadline else "")
    if (used := in_time[0].utilisation) < 0.05:
        why += f"; {used:.1%} of the operations that it could do are done, so most of it idles"
    return Recommendation(in_time[0], why, wasteful)


def changes(e: Experiment, stage: str, devices: int) -> Iterator[tuple[str, Experiment]]:
    """(--config flags, the changed experiment), the smallest change first, that may make a stage fit."""
    for change in _changes(e, stage, devices):
        flags, changed = [], e
        for key, value in change.items():
            part, _, name = key.partition(".")
            section = dataclasses.replace(getattr(changed, part), **{name: value})
            changed = dataclasses.replace(changed, **{part: section})
            words = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            flags.append(f"--config.{key}={words.lower()}")
        yield " ".join(flags), changed


# The setting that says how many rows of a stage are in memory at once.
_ROWS = {
    "prefix": "train.batch_size",
    "capture": "capture.batch_rows",
    "evaluate": "eval.batch_rows",
    "report": "report.batch_rows",
}


def _changes(e: Experiment, stage: str, devices: int) -> Iterator[dict[str, Any]]:
    """{setting: value} of each change."""
    t, jitted = e.train, e.parallel.mode == "jit"
    if stage in ("train", "sweep"):
        spread = [{"parallel.fsdp": True}] if devices > 1 and not e.parallel.fsdp and jitted else []
        yield from spread
        for accumulate in (t.accumulate * parts for parts in (2, 4, 8, 16, 32)):
            if t.batch_size % (accumulate * devices) == 0 and t.batch_size >= 2 * accumulate * devices:
                yield from (each | {"train.accumulate": accumulate} for each in ({}, *spread))
        for latent in (2, 4, 8):
            if devices % latent == 0 and jitted:
                yield {"parallel.mesh": (devices // latent, latent), "parallel.fsdp": True}
        return
    part, _, name = _ROWS[stage].partition(".")
    rows = getattr(getattr(e, part), name) or 32  # of a capture that leaves it open
    while rows > 1:
        rows //= 2
        if stage != "prefix" or rows % devices == 0:
            yield {_ROWS[stage]: rows}
    others: list[dict[str, Any]] = [{"lm.dtype": "bfloat16"}] if e.lm.dtype == "float32" else []
    if stage in ("prefix", "capture") and devices > 1:
        others.insert(0 if stage == "prefix" else len(others), {"parallel.mesh": (1, devices)})
    yield from others


def remedy(outline: Outline, device: Device, devices: int, over: Sequence[str]) -> list[str]:
    """For each of these stages, the smallest change that makes it fit, in words."""

    def of_stage(stage: str) -> str:
        for flags, changed in changes(outline.experiment, stage, devices):
            try:
                after = stage_of(outline.with_experiment(changed), device, devices, stage)
            except SaejaxError:
                continue
            if after.device_bytes <= ROOM * device.memory:
                return f"{flags} fits, with {after.device_bytes / 1e9:,.1f} GB"
        return f"no change of the mesh, the batch or the dtype makes it fit on {devices} x {device.name}"

    return [f"{stage}: {of_stage(stage)}" for stage in over]
