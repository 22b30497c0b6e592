"""Memory, CPU and waits of a training in its rows of metrics, and warnings when something goes wrong slowly.

host/memory_bytes    what the process holds                 host/cpu     share of its CPUs that the process uses
device/memory_bytes  in use on the fullest device           device/peak_memory_bytes  the most so far
device/utilisation   share of the time in which a kernel ran (NVIDIA; by the extras cuda, cuda13); mean over devices
loop/...             shares of the time since the row before: data, step, metrics, validation, checkpoint, other
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from saejax.core.host import processors, resident_memory
from saejax.training.program import Program
from saejax.training.watch import Phases, Watch, device_memory

# The phases of the loop by their name in the metrics.
_LOOP = {
    "data": ("data",),
    "step": ("start", "device"),
    "metrics": ("metrics",),
    "validation": ("validation",),
    "checkpoint": ("checkpoint",),
    "other": ("", "profile"),
}

# The training waits for data when it does so for more than this share of this many seconds.
_WAITS, _WINDOW = 0.3, 30.0


class Monitor(Watch):
    """Samples memory and utilisation once a row of metrics. It reads nothing of the training: numbers stay the same.

    Args:
        devices: those of this process that train.
        tell: takes a line for the user.
        stage: what the lines begin with.
        data: what to do when the training waits for data, as a sentence.
    """

    def __init__(
        self, devices: Sequence[jax.Device], tell: Callable[[str], None], stage: str = "train", data: str = ""
    ):
        self._devices, self._tell, self._stage = devices, tell, stage
        self._utilisation = utilisation_of(devices)
        self._waiting = Waiting(data)
        self._growing = {"host": Growth("host memory"), "device": Growth("device memory")}

    @contextlib.contextmanager
    def over(self, programs: Sequence[Program], first: int, total: int, phases: Phases) -> Iterator[None]:
        self._total, self._phases, self._seen = total, phases, dict[str, float]()
        self._last, self._cpu = time.perf_counter(), time.process_time()
        yield

    def row(self, step: int) -> Mapping[str, float]:
        now, cpu = time.perf_counter(), time.process_time()
        passed = max(now - self._last, 1e-9)
        row = {"host/cpu": (cpu - self._cpu) / passed / processors()}
        self._last, self._cpu = now, cpu
        by_phase = self._phases.seconds()
        seconds = {name: sum(by_phase.get(part, 0.0) for part in parts) for name, parts in _LOOP.items()}
        since = {name: value - self._seen.get(name, 0.0) for name, value in seconds.items()}
        self._seen, total = seconds, max(sum(since.values()), 1e-9)
        loop = {name: value / total for name, value in since.items()}
        row |= {f"loop/{name}": share for name, share in loop.items()}
        if host := resident_memory():
            row["host/memory_bytes"] = host
        if memory := device_memory(self._devices):
            row["device/memory_bytes"], row["device/peak_memory_bytes"] = memory
        if self._utilisation and (busy := self._utilisation()) is not None:
            row["device/utilisation"] = busy
        warnings = [self._waiting.after(passed, loop["data"])]
        for name, growth in self._growing.items():
            if value := row.get(f"{name}/memory_bytes"):
                warnings.append(growth.after(step, now, value, self._total))
        for warning in filter(None, warnings):
            self._tell(f"{self._stage}: warning: {warning}")
        return row


@dataclasses.dataclass
class Waiting:
    """Says once that the training waits for data: for more than a share of the last seconds."""

    remedy: str
    rows: collections.deque[tuple[float, float]] = dataclasses.field(default_factory=collections.deque)
    total: float = 0.0
    waited: float = 0.0
    said: bool = False

    def after(self, seconds: float, share: float) -> str:
        """After a row of so many seconds, of which `share` were waited; the warning, or empty."""
        if self.said:
            return ""
        self.rows.append((seconds, share * seconds))
        self.total += seconds
        self.waited += share * seconds
        while self.total - self.rows[0][0] >= _WINDOW:
            gone, waited = self.rows.popleft()
            self.total -= gone
            self.waited -= waited
        if self.total < _WINDOW or self.waited < _WAITS * self.total:
            return ""
        self.said = True
        share = self.waited / self.total
        return f"it waited for data in {share:.0%} of the last {self.total:.0f} seconds. {self.remedy}".strip()


@dataclasses.dataclass
class Growth:
    """Says once that memory keeps growing: in each quarter of the second half of a session, and not ever slower.

    Attributes:
        points: (step, seconds, bytes): at most `most`; then every other one goes, and half as many come.
    """

    what: str
    most: int = 64
    least_seconds: float = 600.0
    least_bytes: float = 100e6
    least_share: float = 0.05
    points: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    every: int = 1
    seen: int = 0
    said: bool = False

    def after(self, step: int, seconds: float, value: float, total: int) -> str:
        """After a sample at a step of `total`; the warning, or empty."""
        self.seen += 1
        if self.said or self.seen % self.every:
            return ""
        self.points.append((step, seconds, value))
        if len(self.points) > self.most:
            self.points, self.every = self.points[::2], 2 * self.every
        if len(self.points) < 32 or seconds - self.points[0][1] < self.least_seconds:
            return ""
        late = self.points[len(self.points) // 2 :]  # what comes before is the warm-up
        wide = len(late) // 4
        levels = [statistics.median(value for _, _, value in late[i * wide : (i + 1) * wide]) for i in range(4)]
        rises = [after - before for before, after in itertools.pairwise(levels)]
        grown = levels[-1] - levels[0]
        steady = min(rises) > 0 and rises[-1] >= 0.8 * max(rises)
        if not steady or grown < max(self.least_bytes, self.least_share * levels[0]):
            return ""
        self.said = True
        pace = grown / max(1, late[3 * wide + wide // 2][0] - late[wide // 2][0])
        more = pace * max(0, total - step) / 1e6
        return (
            f"{self.what} keeps growing: {levels[0] / 1e6:,.0f} MB at step {late[0][0]:,}, {value / 1e6:,.0f} MB at "
            f"step {step:,}, about {more:,.0f} MB more until the end at this pace. Should it not fit, stop "
            "(Ctrl-C saves all) and run the same command again: a new process starts small. The report draws it."
        )


def utilisation_of(devices: Sequence[jax.Device]) -> Callable[[], float | None] | None:
    """A function that says in which share of the last moments a kernel ran, mean over NVIDIA devices.

    None where they are others, or pynvml is not installed or does not find them.
    """
    if not devices or devices[0].platform not in ("gpu", "cuda"):
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [_handle(pynvml, device) for device in devices]
    except (pynvml.NVMLError, IndexError, ValueError):
        return None

    def sample() -> float | None:
        try:
            return statistics.fmean(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles)
        except pynvml.NVMLError:  # a card that does not say
            return None

    return sample


def _handle(pynvml: Any, device: jax.Device) -> Any:
    """NVML numbers all cards of the machine; JAX those that CUDA_VISIBLE_DEVICES leaves."""
    number = device.local_hardware_id
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    card = str(number) if visible is None else visible.split(",")[number].strip()
    return pynvml.nvmlDeviceGetHandleByIndex(int(card)) if card.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(card)
