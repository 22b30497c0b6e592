"""A plan as text: one table for all numbers of devices, the recommendation, and what does not fit."""

from collections.abc import Sequence

from saejax.core.amounts import size, span
from saejax.lm.shape import ModelShape
from saejax.plans.devices import EFFICIENCY, Device
from saejax.plans.estimate import OF_STUDY, Estimate
from saejax.plans.outline import ROOM
from saejax.plans.recommendation import Recommendation
from saejax.plans.stage import StageEstimate
from saejax.reports.table_page import markdown

_BYTES = (
    ("state", ("state", "coder")),
    ("batch", ("batch",)),
    ("temporaries", ("temporaries",)),
    ("model", ("language model",)),
    ("cache", ("key-value cache",)),
)
_COLUMN_NAMES = (
    *("devices", "stage", *(name for name, _ in _BYTES), "of a device", "disk"),
    *("time", "device-hours", "used", "most of it"),
)


def head(name: str, device: Device, models: Sequence[ModelShape]) -> list[str]:
    """The experiment, the device, and the figures by which it is planned."""
    lines = [
        f"plan of {name} for {device.name}: {size(device.memory)}, {device.bfloat16 / 1e12:,.4g} TFLOP/s bfloat16, "
        f"{device.float32 / 1e12:,.4g} float32, {device.bandwidth / 1e9:,.4g} GB/s ({device.source})"
    ]
    for shape in models:
        note = f" ({shape.note})" if shape.note else ""
        size_of = f"{shape.n_parameters:,} parameters, {shape.n_layer} blocks of {shape.d_model:,}"
        lines.append(f"{shape.model}: {size_of}{note}")
    if not device.measured:
        shares = ", ".join(f"{share:.0%} of its {what}" for what, share in EFFICIENCY.items())
        lines.append(f"Times are for {shares}; `saejax calibrate` on the machine itself replaces these.")
    return lines


def estimates_table(estimates: Sequence[Estimate], price: float = 0.0) -> str:
    """Stages by number of devices, each number with the whole of it below."""
    rows = [[*_COLUMN_NAMES, "cost"]]
    for estimate in estimates:
        if estimate.refused:
            rows.append([str(estimate.devices), f"cannot be: {estimate.refused}", *[""] * (len(rows[0]) - 2)])
            continue
        rows += [_stage_cells(estimate, stage, price) for stage in estimate.stages]
        rows.append(_sum_cells(estimate, price))
    return markdown(rows if price else [row[:-1] for row in rows])


def _stage_cells(whole: Estimate, stage: StageEstimate, price: float) -> list[str]:
    hours = stage.seconds * whole.devices / 3600
    could = stage.seconds * whole.devices * whole.device.bfloat16
    over = stage.device_bytes > ROOM * whole.device.memory
    held = (sum(stage.parts.get(part, 0.0) for part in parts) for _, parts in _BYTES)
    return [
        f"({whole.devices})" if stage.stage in OF_STUDY else str(whole.devices),
        stage.stage,
        *(size(count) if count else "" for count in held),
        f"{stage.device_bytes / whole.device.memory:.0%}" + (" TOO MUCH" if over else ""),
        size(stage.disk_bytes),
        span(stage.seconds),
        f"{hours:,.2f}",
        f"{stage.flops / could:.1%}" if could else "",
        stage.bound,
        f"{price * hours:,.2f}",
    ]


def _sum_cells(whole: Estimate, price: float) -> list[str]:
    return [
        str(whole.devices),
        "all",
        *[""] * len(_BYTES),
        f"{whole.device_bytes / whole.device.memory:.0%}",
        size(whole.disk_bytes),
        span(whole.seconds),
        f"{whole.device_hours:,.2f}",
        f"{whole.utilisation:.1%}",
        "",
        f"{price * whole.device_hours:,.2f}",
    ]


def below(estimates: Sequence[Estimate], advice: Recommendation, remedies: Sequence[str]) -> list[str]:
    """The recommendation, what is wasted, what was assumed, and the changes that make it fit."""
    best = advice.estimate
    lines = [f"Take {best.devices} x {best.device.name}: {advice.why}." if best else advice.why]
    lines += [f"{devices} devices take {what}." for devices, what in advice.wasteful.items()]
    lines += [f"Does not fit. {change}" for change in remedies]
    stages = [stage for estimate in estimates for stage in estimate.stages]
    lines += sorted({f"{stage.stage}: {stage.note}." for stage in stages if stage.note})
    if any(stage.stage in OF_STUDY for stage in stages):
        lines.append("Stages of numbers in brackets are of `saejax study` alone, and not in the sums.")
    return lines
