"""A plan as text: one table for all numbers of devices, the recommendation, and what does not fit."""

from collections.abc import Sequence

from saejax.lm.shape import ModelShape
from saejax.plan.amounts import size, span
from saejax.plan.choice import Choice
from saejax.plan.devices import EFFICIENCY, Device
from saejax.plan.estimate import OF_STUDY, Estimate
from saejax.plan.planned import ROOM
from saejax.plan.stage import StageEstimate
from saejax.report.table_page import markdown

_BYTES = (
    ("state", ("state", "coder")),
    ("batch", ("batch",)),
    ("temporaries", ("temporaries",)),
    ("model", ("language model",)),
    ("cache", ("key-value cache",)),
)
_HEAD = (
    *("devices", "stage", *(name for name, _ in _BYTES), "of a device", "disk"),
    *("time", "device-hours", "used", "most of it"),
)


def head(name: str, device: Device, models: Sequence[ModelShape]) -> list[str]:
    """What is planned, for what, and by which figures."""
    lines = [
        f"plan of {name} for {device.name}: {size(device.memory)}, {device.bfloat16 / 1e12:,.4g} TFLOP/s bfloat16, "
    ]
    lines[0] += f"{device.float32 / 1e12:,.4g} float32, {device.bandwidth / 1e9:,.4g} GB/s ({device.source})"
    for one in models:
        note = f" ({one.note})" if one.note else ""
        lines.append(f"{one.model}: {one.n_parameters:,} parameters, {one.n_layer} blocks of {one.d_model:,}{note}")
    if not device.measured:
        shares = ", ".join(f"{share:.0%} of its {what}" for what, share in EFFICIENCY.items())
        lines.append(f"Times are for {shares}; `saejax calibrate` on the machine itself replaces these.")
    return lines


def table(found: Sequence[Estimate], price: float = 0.0) -> str:
    """Stages by number of devices, each number with the whole of it below."""
    rows = [[*_HEAD, *(["cost"] if price else [])]]
    for one in found:
        if one.refused:
            rows.append([str(one.devices), f"cannot be: {one.refused}", *[""] * (len(rows[0]) - 2)])
            continue
        for stage in one.stages:
            own = stage.stage not in OF_STUDY
            rows.append(_row(one, stage, price, str(one.devices) if own else f"({one.devices})"))
        rows.append(_total(one, price))
    return markdown(rows)


def _row(whole: Estimate, one: StageEstimate, price: float, devices: str) -> list[str]:
    hours = one.seconds * whole.devices / 3600
    could = one.seconds * whole.devices * whole.device.bfloat16
    over = one.device_bytes > ROOM * whole.device.memory
    cells = [devices, one.stage]
    held = (sum(one.parts.get(part, 0.0) for part in parts) for _, parts in _BYTES)
    cells += [size(count) if count else "" for count in held]
    cells += [f"{one.device_bytes / whole.device.memory:.0%}" + (" TOO MUCH" if over else ""), size(one.disk_bytes)]
    cells += [span(one.seconds), f"{hours:,.2f}", f"{one.flops / could:.1%}" if could else "", one.bound]
    return [*cells, *([f"{price * hours:,.2f}"] if price else [])]


def _total(one: Estimate, price: float) -> list[str]:
    cells = [str(one.devices), "all", *[""] * len(_BYTES), f"{one.device_bytes / one.device.memory:.0%}"]
    cells += [size(one.disk_bytes), span(one.seconds), f"{one.device_hours:,.2f}", f"{one.utilisation:.1%}", ""]
    return [*cells, *([f"{price * one.device_hours:,.2f}"] if price else [])]


def below(found: Sequence[Estimate], choice: Choice, remedies: Sequence[str]) -> list[str]:
    """The recommendation, what is wasted, what was assumed, and the changes that make it fit."""
    lines = []
    if choice.taken:
        lines.append(f"Take {choice.taken.devices} x {choice.taken.device.name}: {choice.why}.")
    else:
        lines.append(choice.why)
    lines += [f"{devices} devices take {what}." for devices, what in choice.wasteful.items()]
    lines += [f"Does not fit. {one}" for one in remedies]
    notes = {f"{one.stage}: {one.note}." for estimate in found for one in estimate.stages if one.note}
    lines += sorted(notes)
    if any(one.stage in OF_STUDY for estimate in found for one in estimate.stages):
        lines.append("Stages of numbers in brackets are of `saejax study` alone, and not in the sums.")
    return lines
