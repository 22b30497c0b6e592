"""Plans of experiments: for `saejax plan`, for jobs, and for the start of a pipeline."""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections.config_dict import ConfigDict

from saejax.app.experiment import Experiment, experiment
from saejax.app.new_experiment import file_of
from saejax.core.errors import ConfigError, DataError, SaejaxError
from saejax.core.files import read_object, write_bytes
from saejax.fit.devices import training_mesh
from saejax.plans import page
from saejax.plans.devices import HERE, PlanSettings, devices
from saejax.plans.devices import device as device_named
from saejax.plans.estimate import OF_STUDY, Estimate, estimate, estimates, virtual_devices
from saejax.plans.outline import Outline
from saejax.plans.recommendation import recommend, remedy
from saejax.plans.stage import StageEstimate

_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Memory, disk, time and cost of an experiment.

    Attributes:
        fits: whether one number of devices can do it, and meets the deadline.
        estimates: for each number of devices, in bytes and seconds: "device", "devices", "fits", "stages", ...
        text: the same in words, with what to take.
    """

    fits: bool
    estimates: list[dict[str, Any]]
    text: str

    def __repr__(self) -> str:
        return self.text


def plan(
    config: ConfigDict | str | Experiment,
    device: str = PlanSettings.device,
    devices: Sequence[int] = PlanSettings.devices,
    deadline: str = PlanSettings.deadline,
    price: float = PlanSettings.price,
) -> Plan:
    """Memory, disk, time and cost of an experiment: plan("models:llama-3-8b", "h100", [1, 8], "12h")

    It is what `saejax plan` says, made in a process of its own: there JAX has as many virtual devices as are wanted.
    Every step is compiled for them and not run; of the model only config.json is read.

    Args:
        config: an experiment's settings, or what --config takes.
        device: its kind: h100, tpu-v5e, cpu, here, ... Empty: this machine as it was measured, or its processor.
        devices: numbers of them.
        deadline: the time that all stages may take, as 12h, 90min or 2d.
        price: of one device for an hour.

    Raises:
        ConfigError: an unknown device, a deadline that is no time, settings that no file can hold.
        DataError: all that the command says is wrong, such as a model whose config.json cannot be read.
    """
    wanted = PlanSettings(device, tuple(devices), deadline, price)
    seconds(deadline)
    if device:
        device_named(device)
    text = file_of(experiment(config), "What saejax.plan is about.", "saejax plan")
    with tempfile.TemporaryDirectory() as folder:
        file, answer = Path(folder) / "experiment.py", Path(folder) / "plan.json"
        write_bytes(file, text)
        words = [f"--{name}={value}" for name, value in vars(wanted).items() if name != "devices"]
        words += [f"--config={file}", f"--out={answer}", f"--devices={','.join(map(str, devices))}"]
        # A GPU or TPU may be this process's alone, and a plan needs none.
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "saejax", "plan", *words]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not answer.is_file():
            errors = re.findall(r"^error: (.*)", ended.stderr, re.MULTILINE)
            unsaid = f"saejax plan ended with exit code {ended.returncode}. {ended.stderr[-2000:]}"
            raise DataError(errors[-1] if errors else unsaid)
        return Plan(**read_object(answer))


def plan_here(e: Experiment, wanted: PlanSettings) -> Plan:
    """Plan an experiment on each number of devices, in this process.

    Raises:
        ConfigError: an unknown device, a deadline that is no time, a mesh that does not divide, or JAX has started with
            fewer devices.
        DataError: a model whose config.json cannot be read.
    """
    longest, counts = seconds(wanted.deadline), wanted.devices
    on = device_named(wanted.device or _default_device())
    virtual_devices(max(counts))
    outline = Outline.of(e)
    planned = estimate(outline, on, sorted(set(counts)))
    advice = recommend(planned, longest)
    unfit = next((each for each in planned if not each.refused and each.over), None)
    remedies = remedy(outline, on, unfit.devices, unfit.over) if unfit and advice.estimate is None else []
    head, below = page.head(e.name, on, outline.models), page.below(planned, advice, remedies)
    lines = [*head, "\n" + page.estimates_table(planned, wanted.price) + "\n", *below]
    return Plan(bool(advice.estimate), _as_json(planned), "\n".join(lines))


def _default_device() -> str:
    """The machine at hand: as it was measured, or its processor."""
    return HERE if HERE in devices() else "cpu"


def of_jobs(e: Experiment, name: str, devices: int) -> tuple[StageEstimate, ...]:
    """The stages as jobs have them: graphs and interventions are one, `study`.

    Raises:
        ConfigError, DataError: as `plan`.
    """
    on = device_named(name)
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
        return estimates(e, device_named(_default_device()), training_mesh(e).size)
    except SaejaxError:
        return ()


def _as_json(plans: list[Estimate]) -> list[dict[str, Any]]:
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
