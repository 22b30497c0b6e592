"""Changes of a run's settings for a failed gate, before its training is tried again.

No change makes a training longer or a coder wider: what a run costs is the user's to decide.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from saejax.coders import SPARSITIES, CoderConfig
from saejax.coders.parts import TERMS
from saejax.core.settings import settings_of


@dataclasses.dataclass(frozen=True)
class Change:
    """Each of `keys` that the run has, times `factor`, and not beyond `low` and `high`.

    Attributes:
        keys: "coder.k", "train.lr": they change together. What does nothing to a coder stays as it is.
        start: the value that a key gets which is 0 so far; None leaves it at 0.
    """

    keys: tuple[str, ...]
    factor: float
    low: float = 0.0
    high: float = math.inf
    start: float | None = None

    def of(self, coder: CoderConfig, values: Mapping[str, Any]) -> dict[str, float]:
        """{key: its new value}, of those that change; `values` has all keys, `coder` its preset's values."""
        changed = {}
        for key in self.keys:
            now = values[key]
            new = self.start if not now else min(max(now * self.factor, self.low), self.high)
            if new is None or not _used(coder, key):
                continue
            new = round(new) if isinstance(now, int) else float(f"{new:.6g}")
            # One that is beyond its bound already must not move the other way.
            if (new > now) == (self.factor > 1 or not now) and new != now and (new > 0 or not isinstance(now, int)):
                changed[key] = new
        return changed


def _used(coder: CoderConfig, key: str) -> bool:
    """True where a key does something: keys of sparsities and loss terms do where the coder has that part."""
    room, _, name = key.partition(".")
    if room != "coder":
        return True
    if any(name in settings_of(kind.settings) for kind in SPARSITIES.values()):
        return name in settings_of(SPARSITIES[coder.sparsity].settings)
    for term in TERMS.values():
        if name in settings_of(term.settings):
            return name == term.key() or bool(getattr(coder, term.key()))
    return name != "expansion" or not coder.d_sae


# Weights of penalties; a coder that is drawn to a number of latents changes the number.
_WEIGHTS = tuple(
    f"coder.{term.key()}"
    for term in TERMS.values()
    if term.is_sparsity_weight() and term.key() != "target_l0_coefficient"
)
_COUNTS = ("coder.k", "coder.target_l0")

DENSER = (Change(_COUNTS, 1.5), Change(_WEIGHTS, 0.5))
SPARSER = (Change(_COUNTS, 0.5, low=1), Change(_WEIGHTS, 2.0))
SLOWER = Change(("train.lr",), 0.5, low=1e-6)
FASTER = Change(("train.lr",), 2.0, high=1e-2)
LONGER_WARMUP = Change(("train.warmup_fraction",), 2.0, high=0.5, start=0.05)
NARROWER = Change(("coder.expansion", "coder.d_sae"), 0.5, low=1)
DECORRELATED = Change(("coder.decorrelation_coefficient",), 2.0, high=100.0, start=1.0)
