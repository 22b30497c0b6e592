"""Seconds that work takes: by a data sheet (roofline), or by what was measured on the machine at hand.

    roofline     seconds = F / (e_F peak) + M / (e_M bandwidth) + C / (e_L link) + n launch
                 F operations, M bytes moved, C bytes sent, n operations of the program; e from `devices.EFFICIENCY`
    measured     seconds = sum_i c_i w_i, times the ratio by which the nearest measured work differed from that;
                 w the amounts of work, c >= 0 by least squares of the relative error

Nearness is that of the amounts' logarithms: work of twice the size is as near everywhere.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from saejax.core.errors import ConfigError
from saejax.plans.devices import EFFICIENCY, Device
from saejax.plans.programs import Footprint

# A neighbour at this distance counts half as much as one at no distance: about a quarter more work.
_NEAR = 0.25


@dataclasses.dataclass(frozen=True)
class Law:
    """Seconds from amounts of work.

    Attributes:
        coefficients: seconds of one unit of each amount.
        points: (amounts, measured / predicted by the coefficients) of what was measured.
    """

    coefficients: tuple[float, ...]
    points: tuple[tuple[tuple[float, ...], float], ...]

    def seconds(self, amounts: Sequence[float]) -> float:
        """Of work of these amounts."""
        plain = float(np.dot(self.coefficients, amounts))
        here = _log_amounts(amounts)
        near = np.array([1 / (_NEAR**2 + float(((_log_amounts(at) - here) ** 2).sum())) for at, _ in self.points])
        ratios = np.log([ratio for _, ratio in self.points])
        # Far from all that was measured the law stands alone.
        share = float(near.max() * _NEAR**2) ** 0.5
        return plain * math.exp(share * float((near * ratios).sum() / near.sum()))

    def to_json(self) -> dict[str, Any]:
        """As it stands in the user's file of devices."""
        points = [[[float(f"{a:.6g}") for a in at], float(f"{ratio:.5g}")] for at, ratio in self.points]
        return {"coefficients": [float(f"{c:.6g}") for c in self.coefficients], "points": points}

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Law":
        """Inverse of `to_json`.

        Raises:
            ConfigError: it is none.
        """
        try:
            points = tuple((tuple(float(a) for a in at), float(ratio)) for at, ratio in value["points"])
            law = cls(tuple(float(c) for c in value["coefficients"]), points)
            sound = all(len(at) == len(law.coefficients) and ratio > 0 for at, ratio in points) and points
        except (TypeError, ValueError, KeyError):
            sound = None
        if not sound:
            raise ConfigError(f"{where} is no measurement of saejax. Run `saejax calibrate` again.")
        return law


def fitted(measured: Sequence[tuple[Sequence[float], float]]) -> Law:
    """The law of measured (amounts, seconds)."""
    from scipy.optimize import nnls  # it takes as long to import as a plan's table to print

    amounts = np.array([at for at, _ in measured], float)
    seconds = np.array([s for _, s in measured], float)
    largest = np.maximum(amounts.max(0), 1e-300)
    coefficients = nnls(amounts / largest / seconds[:, None], np.ones(len(seconds)))[0] / largest
    plain = np.maximum(amounts @ coefficients, 1e-12)
    points = tuple((tuple(map(float, at)), float(s / p)) for at, s, p in zip(amounts, seconds, plain, strict=True))
    return Law(tuple(map(float, coefficients)), points)


def law_of(device: Device, name: str) -> Law | None:
    """Measurements of a kind of work on a device; None for a data sheet."""
    value = device.measured.get(name)
    return None if value is None else Law.from_json(value, f"{device.name}: measured.{name}")


def roofline(device: Device, work: Footprint, peak: float) -> float:
    """Seconds of a program on a device, by its data sheet."""
    products = work.flops / (EFFICIENCY["products"] * peak)
    memory = work.moved / (EFFICIENCY["bandwidth"] * device.bandwidth)
    links = work.sent / (EFFICIENCY["links"] * device.link) + work.collectives * 2 * device.launch
    return products + memory + links + work.operations * device.launch


def training_peak(device: Device, dtype: str) -> float:
    """Operations a second of a train step's products: one of three in `matmul_dtype`, two of three gradients.

    `auto` is bfloat16 but on a CPU; gradients are TF32 on an NVIDIA card and three passes of bfloat16 on a TPU, which
    both are about half of the bfloat16 rate at best.
    """
    if dtype == "float32" or device.bfloat16 <= device.float32:
        return device.float32
    return 3 / (1 / device.bfloat16 + 2 / max(device.float32, device.bfloat16 / 2))


def _log_amounts(amounts: Sequence[float]) -> np.ndarray:
    return np.log(np.maximum(np.asarray(amounts, float), 1e-9))
