"""Devices that plans are made for: what their makers say of them, what users add, and what calibration has measured.

A line of your own, in ~/.config/saejax/devices.yaml (or the file that SAEJAX_DEVICES names):

    my-card: {memory: 48e9, bandwidth: 900e9, bfloat16: 180e12, float32: 45e12, link: 32e9}

`saejax calibrate` writes its measurements into the same file, under the name `here`.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from saejax.core.config import nearest
from saejax.core.errors import ConfigError
from saejax.core.files import read_bounded, write_bytes
from saejax.core.host import available_memory
from saejax.core.settings import Settings, setting

VARIABLE = "SAEJAX_DEVICES"
HERE = "here"
_LARGEST_FILE = 1 << 20
_GB, _TFLOPS = 1e9, 1e12

# What programs reach of a data sheet's peak where nothing was measured here: of matrix products, and of the memory's
# bandwidth. The links reach their share in large sums. Steps of small coders reach less, which the time of a single
# operation (`launch`) accounts for.
EFFICIENCY = {"products": 0.5, "bandwidth": 0.7, "links": 0.7}


@dataclasses.dataclass(frozen=True)
class PlanSettings(Settings):
    """The devices that an experiment is planned for, and what it may take there."""

    device: str = setting(
        "",
        "a100-40gb, a100-80gb, h100, h200, b200, l40s, rtx6000, rtx6000-ada, rtx4090, tpu-v4, tpu-v5e, "
        "tpu-v5p, tpu-v6e, cpu, here (after `saejax calibrate`), or one of yours. Empty: here, else cpu.",
    )
    devices: tuple[int, ...] = setting((1, 8), "Numbers of devices to plan for.", low=1, high=1024)
    deadline: str = setting("", "The time that all stages may take, as 12h, 90min or 2d.")
    price: float = setting(0.0, "What one device costs for an hour, in any currency.", low=0, high=1e9)


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device. Figures are of one device, without sparsity.

    Attributes:
        memory: bytes.
        bandwidth: bytes of its memory that it reads and writes a second.
        bfloat16, float32: floating-point operations a second in matrix products; float32 as GPUs and TPUs compute it
            for full precision, not TF32.
        link: bytes a second between one device and the others of its machine, in one direction.
        launch: seconds that each operation of a program costs besides its work.
        host: bytes a second from the host into the device.
        source: where the figures are from.
        measured: what `saejax calibrate` found, by name; empty for a data sheet.
    """

    name: str
    memory: float
    bandwidth: float
    bfloat16: float
    float32: float
    link: float
    launch: float = 5e-6
    host: float = 20 * _GB
    source: str = "yours"
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in ("memory", "bandwidth", "bfloat16", "float32", "link", "host"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ConfigError(f"The device {self.name!r} has {field}={value!r}; it must be a positive number.")

    def peak(self, dtype: str) -> float:
        """Floating-point operations a second of products in a dtype."""
        return self.bfloat16 if dtype == "bfloat16" else self.float32


# Links: NVLink's one direction (half of the makers' figure for both), PCIe 4 x16 where there is none, a TPU's ICI in
# all directions together. RTX 6000 is the Turing card of 24 GB that report 000 used; "rtx6000-ada" the one of 48 GB.
# Columns: GB of memory, GB/s of it, TFLOP/s of bfloat16 and of float32, GB/s of a link.
_SHEETS = (
    ("a100-40gb", 40, 1555, 312, 19.5, 300, "NVIDIA A100 data sheet"),
    ("a100-80gb", 80, 2039, 312, 19.5, 300, "NVIDIA A100 data sheet"),
    ("h100", 80, 3350, 989, 67, 450, "NVIDIA H100 SXM data sheet"),
    ("h200", 141, 4800, 989, 67, 450, "NVIDIA H200 SXM data sheet"),
    ("b200", 180, 7700, 2250, 75, 900, "NVIDIA DGX B200 data sheet, one of eight"),
    ("l40s", 48, 864, 362, 91.6, 32, "NVIDIA L40S data sheet"),
    ("rtx6000", 24, 672, 130, 16.3, 50, "NVIDIA Quadro RTX 6000 data sheet; its fast products are float16"),
    ("rtx6000-ada", 48, 960, 364, 91.1, 32, "NVIDIA RTX 6000 Ada data sheet"),
    ("rtx4090", 24, 1008, 165, 82.6, 32, "NVIDIA Ada white paper, GeForce RTX 4090"),
    ("tpu-v4", 32, 1228, 275, 45.8, 300, "Google Cloud TPU v4; float32 as six passes of bfloat16"),
    ("tpu-v5e", 16, 819, 197, 32.8, 200, "Google Cloud TPU v5e; float32 as six passes of bfloat16"),
    ("tpu-v5p", 95, 2765, 459, 76.5, 600, "Google Cloud TPU v5p; float32 as six passes of bfloat16"),
    ("tpu-v6e", 32, 1640, 918, 153.0, 448, "Google Cloud TPU v6e; float32 as six passes of bfloat16"),
)
# Other names of the same; without a size, the one that most machines have.
_ALIASES = {"a100": "a100-80gb", "h100-80gb": "h100", "h100-sxm": "h100", "rtx-6000": "rtx6000", "4090": "rtx4090"}


def devices() -> dict[str, Device]:
    """All by name: data sheets, `cpu`, and the lines of the user's file, which go first.

    Raises:
        ConfigError: the file cannot be read, or a line of it says something else.
    """
    sheets = {
        name: Device(name, memory * _GB, bandwidth * _GB, bf16 * _TFLOPS, f32 * _TFLOPS, link * _GB, source=source)
        for name, memory, bandwidth, bf16, f32, link, source in _SHEETS
    }
    return sheets | {"cpu": this_cpu()} | _users_devices()


def device(name: str) -> Device:
    """The device of that name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    known = devices()
    wanted = _ALIASES.get(name.lower(), name.lower())
    if wanted == HERE and HERE not in known:
        raise ConfigError("There is no device 'here' yet: run `saejax calibrate` first, which measures this machine.")
    if wanted not in known:
        raise ConfigError(
            f"Unknown device {name!r}.{nearest(name.lower(), [*known, *_ALIASES], listed=True)} A "
            f"line in {own_file()} adds one: {name}: {{memory: 48e9, bandwidth: 900e9, bfloat16: 180e12, float32: "
            "45e12, link: 32e9}"
        )
    return known[wanted]


def this_cpu() -> Device:
    """This machine's processor, by its cores: a guess that `saejax calibrate` replaces."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = available_memory() or 8 * _GB
    # 32 operations a cycle (two AVX2 units) at 3 GHz, and 10 GB/s a core; XLA multiplies bfloat16 as float32.
    flops = 96e9 * cores
    return Device("cpu", memory, 10 * _GB * cores, flops, flops, 10 * _GB, 2e-6, 10 * _GB, f"{cores} cores, guessed")


def own_file() -> Path:
    """The file with the user's devices."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "saejax" / "devices.yaml"


def _lines() -> dict[str, Any]:
    path = own_file()
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(read_bounded(path, _LARGEST_FILE))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML ({' '.join(str(error).split())[:200]}). Mend or remove it.") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(line, dict) for line in content.values()):
        raise ConfigError(f"{path} must hold lines such as: my-card: {{memory: 48e9, bandwidth: 900e9, ...}}.")
    return {str(name).lower(): line for name, line in content.items()}


def _users_devices() -> dict[str, Device]:
    fields = {field.name: field for field in dataclasses.fields(Device) if field.name != "name"}
    needed = [name for name, field in fields.items() if field.default is field.default_factory is dataclasses.MISSING]
    users = {}
    for name, line in _lines().items():
        for key in line:
            if key not in fields:
                raise ConfigError(f"{own_file()}: {name} has the unknown key {key!r}.{nearest(str(key), fields)}")
        if missing := [key for key in needed if key not in line]:
            raise ConfigError(f"{own_file()}: {name} lacks {', '.join(missing)}.")
        users[name] = Device(name, **{key: _number(value) for key, value in line.items()})
    return users


def _number(value: Any) -> Any:
    """YAML reads 48e9 as a word."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return {str(key): _number(item) for key, item in value.items()} if isinstance(value, dict) else value


def keep(measured: Device) -> Path:
    """Write a device into the user's file, in place of the one of its name; the file's path."""
    line = {key: value for key, value in dataclasses.asdict(measured).items() if key != "name"}
    path = own_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, yaml.safe_dump(_lines() | {measured.name: line}, sort_keys=False).encode())
    return path
