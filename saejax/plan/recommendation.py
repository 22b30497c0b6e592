"""The number of devices to take, and the smallest change where nothing fits."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from saejax.app.experiment import Experiment
from saejax.core.errors import SaejaxError
from saejax.plan.devices import Device
from saejax.plan.estimate import Estimate, stage_of
from saejax.plan.outline import ROOM, Outline

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


def _changed(e: Experiment, part: str, **values: Any) -> Experiment:
    return dataclasses.replace(e, **{part: dataclasses.replace(getattr(e, part), **values)})


def changes(e: Experiment, stage: str, devices: int) -> Iterator[tuple[str, Experiment]]:
    """(--config flags, the changed experiment), the smallest change first, that may make a stage fit."""
    t = e.train
    if stage == "prefix":
        for rows in _halves(t.batch_size):
            if rows % devices == 0:
                yield f"--config.train.batch_size={rows}", _changed(e, "train", batch_size=rows)
        if devices > 1:
            yield f"--config.parallel.mesh=1,{devices}", _changed(e, "parallel", mesh=(1, devices))
    if stage in ("train", "sweep"):
        if devices > 1 and not e.parallel.fsdp and e.parallel.mode == "jit":
            yield "--config.parallel.fsdp=true", _changed(e, "parallel", fsdp=True)
        for parts in (2, 4, 8, 16, 32):
            size = t.batch_size // (t.accumulate * parts * devices)
            if size >= 2 and t.batch_size % (t.accumulate * parts * devices) == 0:
                changed = _changed(e, "train", accumulate=t.accumulate * parts)
                yield f"--config.train.accumulate={t.accumulate * parts}", changed
                if devices > 1 and not e.parallel.fsdp and e.parallel.mode == "jit":
                    flags = f"--config.parallel.fsdp=true --config.train.accumulate={t.accumulate * parts}"
                    yield flags, _changed(changed, "parallel", fsdp=True)
        for latent in (2, 4, 8):
            if devices % latent == 0 and e.parallel.mode == "jit":
                mesh = (devices // latent, latent)
                yield f"--config.parallel.mesh={mesh[0]},{mesh[1]}", _changed(e, "parallel", mesh=mesh, fsdp=True)
        return
    if stage == "evaluate":
        for rows in _halves(e.eval.batch_rows):
            yield f"--config.eval.batch_rows={rows}", _changed(e, "eval", batch_rows=rows)
    if stage == "report":
        for rows in _halves(e.report.batch_rows):
            yield f"--config.report.batch_rows={rows}", _changed(e, "report", batch_rows=rows)
    if stage == "capture":
        for rows in _halves(e.capture.batch_rows or 32):
            yield f"--config.capture.batch_rows={rows}", _changed(e, "capture", batch_rows=rows)
    if e.lm.dtype == "float32":
        yield "--config.lm.dtype=bfloat16", _changed(e, "lm", dtype="bfloat16")
    if stage == "capture" and devices > 1:
        yield f"--config.parallel.mesh=1,{devices}", _changed(e, "parallel", mesh=(1, devices))


def _halves(rows: int) -> Iterator[int]:
    while rows > 1:
        rows //= 2
        yield rows


def remedy(outline: Outline, device: Device, devices: int, over: Sequence[str]) -> list[str]:
    """For each of these stages, the smallest change that makes it fit, in words."""
    return [f"{stage}: {_of_stage(outline, device, devices, stage)}" for stage in over]


def _of_stage(outline: Outline, device: Device, devices: int, stage: str) -> str:
    for flags, changed in changes(outline.experiment, stage, devices):
        try:
            after = stage_of(outline.with_experiment(changed), device, devices, stage)
        except SaejaxError:
            continue
        if after.device_bytes <= ROOM * device.memory:
            return f"{flags} fits, with {after.device_bytes / 1e9:,.1f} GB"
    return f"no change of the mesh, the batch or the dtype makes it fit on {devices} x {device.name}"


def over(estimate: Estimate) -> list[str]:
    """The stages of the pipeline that do not fit."""
    return [stage.stage for stage in estimate.pipeline if stage.device_bytes > ROOM * estimate.device.memory]
