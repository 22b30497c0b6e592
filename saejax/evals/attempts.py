"""Attempts at one run: their changes and gates, the best of them, and the next changes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from saejax.coders import CoderConfig
from saejax.core.errors import DataError
from saejax.core.files import write_json
from saejax.evals.gates import CHANGES, Gate
from saejax.runs.folder import FIRST, Run


@dataclasses.dataclass(frozen=True)
class Changed:
    """A setting that an attempt changes, and the gates that ask for it."""

    key: str
    before: float
    after: float
    gates: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key} {self.before:g} -> {self.after:g} ({', '.join(self.gates)})"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One training of the run.

    Attributes:
        name: "attempt-0" for the run itself, then "attempt-1" and so on, which are folders in the run's.
        begins_from: the attempt whose settings it changes; empty for the run itself.
        gates: None while it is not evaluated.
        metrics: those of eval.json.
    """

    name: str
    begins_from: str = ""
    changes: tuple[Changed, ...] = ()
    gates: tuple[Gate, ...] | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)

    @property
    def judged(self) -> list[Gate]:
        """The gates that a setting can help."""
        return [gate for gate in self.gates or () if gate.name in CHANGES]

    @property
    def failed(self) -> list[Gate]:
        """Judged gates that ask for a change: what could not be measured asks for none."""
        return [gate for gate in self.judged if not gate.passed and gate.miss < math.inf]

    @property
    def rank(self) -> tuple[float, float, float]:
        """Larger is better: gates passed (and a hundredth for each that was measured), then the smallest worst miss,
        then FVE.
        """
        fve, measured = self.metrics.get("fve"), [gate for gate in self.judged if gate.miss < math.inf]
        passed = sum(gate.passed for gate in self.judged) + len(measured) / 100
        worst = max((gate.miss for gate in measured), default=0.0)
        return (passed, -worst, fve if fve is not None and math.isfinite(fve) else -math.inf)

    def to_json(self) -> dict[str, Any]:
        gates = None if self.gates is None else [gate.to_json() for gate in self.gates]
        return dataclasses.asdict(self) | {"gates": gates, "metrics": dict(self.metrics)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Attempt":
        """Raises DataError where it is not what `to_json` wrote."""
        try:
            changes = tuple(Changed(**change | {"gates": tuple(change["gates"])}) for change in value["changes"])
            gates = None if value["gates"] is None else tuple(map(Gate.from_json, value["gates"]))
            return cls(str(value["name"]), str(value["begins_from"]), changes, gates, dict(value["metrics"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"an attempt is not understood ({error!r})") from None


@dataclasses.dataclass(frozen=True)
class Attempts:
    """The content of a run's attempts.json.

    Attributes:
        attempts: in order; the last may be under way.
        kept: the name of the best so far.
        why: it is, in words.
    """

    attempts: tuple[Attempt, ...]
    kept: str = FIRST
    why: str = ""

    @classmethod
    def read(cls, run: Run) -> "Attempts | None":
        """Those of a run; None where it was not tried again. Raises DataError: the file is damaged."""
        if (content := run.read_attempts()) is None:
            return None
        try:
            return cls(tuple(map(Attempt.from_json, content["attempts"])), content["kept"], content["why"])
        except DataError as error:
            raise DataError(
                f"{run.attempts} is damaged: {error}; delete it, and run `saejax pipeline` again."
            ) from None

    def to_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "why": self.why, "attempts": [attempt.to_json() for attempt in self.attempts]}

    def write(self, run: Run) -> None:
        write_json(run.attempts, self.to_json())


def best(attempts: Sequence[Attempt]) -> Attempt:
    """The best of those that are evaluated; of equals the earlier one."""
    return max((attempt for attempt in attempts if attempt.gates is not None), key=lambda attempt: attempt.rank)


def next_changes(
    base: Attempt,
    attempts: Sequence[Attempt],
    coder: CoderConfig,
    values: Mapping[str, Any],
    possible: Callable[[Mapping[str, float]], bool],
) -> tuple[Changed, ...]:
    """Changes for an attempt from `base`: for each failed gate the first of its row's that can be made.

    Each key changes once, for the gate that comes first. What was tried from the same settings, and was not better, is
    not tried again.

    Args:
        coder, values: of `base`: with its preset's values; {key: value} of all keys that changes name.
        possible: says of values whether a run can have them.
    """
    tried = {(c.key, c.after) for attempt in attempts if attempt.begins_from == base.name for c in attempt.changes}
    chosen: dict[str, Changed] = {}
    for gate in base.failed:
        for change in CHANGES[gate.name]:
            new = change.of(coder, values)
            if not new or tried & set(new.items()):
                continue
            if all(key in chosen and chosen[key].after == value for key, value in new.items()):
                for key in new:
                    chosen[key] = dataclasses.replace(chosen[key], gates=(*chosen[key].gates, gate.name))
                break
            if not new.keys() & chosen.keys() and possible({c.key: c.after for c in chosen.values()} | new):
                chosen |= {key: Changed(key, values[key], value, (gate.name,)) for key, value in new.items()}
                break
    return tuple(chosen.values())
