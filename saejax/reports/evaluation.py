"""eval.json as the page draws it, and the result of its gates in words."""

from collections.abc import Mapping, Sequence
from typing import Any

from saejax.runs.shape import Maybe, fault, histogram, is_number

_FIGURES = ("fve", "loss_recovered", "l0")


def failed_of(gates: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the gates by which an evaluation does not end well."""
    return [str(gate.get("name")) for gate in gates if not gate.get("ends_well", gate.get("passed"))]


def counted(gates: Sequence[Mapping[str, Any]]) -> str:
    """The result in words: "6 of 6", "5 of 6, 1 not measured", or "fails r2"."""
    if failed := failed_of(gates):
        return f"fails {', '.join(failed)}"
    passed = sum(bool(gate.get("passed")) for gate in gates)
    return f"{passed} of {len(gates)}" + (f", {len(gates) - passed} not measured" if passed < len(gates) else "")


def _interval(value: Any) -> str:
    fits = value is None or (isinstance(value, list) and len(value) == 2 and all(map(is_number, value)))
    return "" if fits else "is not [low, high]"


def _breakdown(part: Any) -> str:
    """A value of each figure for each group."""
    values = {"groups": [str], "tokens": [float], "documents": [float]}
    values |= {key: Maybe([Maybe(float)], null=False) for key in _FIGURES}
    values |= {f"{key}_interval": [_interval] for key in _FIGURES if isinstance(part, dict) and key in part}
    lists = [] if fault(part, values) else [part[key] for key in values if key in part]
    fits = lists and lists[0] and len({len(one) for one in lists}) == 1
    return "" if fits else "does not have a value for each group"


_GATES = Maybe(
    [{"name": str, "value": Maybe(float), "bar": Maybe(float), "comparison": str, "passed": object}], null=False
)
_NUMBERS = {...: Maybe(float)}
# eval.json of a run or of a dictionary.
EVALUATION = {
    **dict.fromkeys(("step", "d_in", "d_sae", "k"), Maybe(float)),
    "metrics": Maybe(_NUMBERS, null=False),
    "gates": _GATES,
    "warnings": _GATES,
    "skipped_gates": Maybe(list),
    "density": Maybe((histogram("log10_edges"), {"dead": Maybe(float), "n_tokens": Maybe(float)})),
    **dict.fromkeys(
        ("cosine", "coactivation"),
        Maybe((histogram("edges"), {key: Maybe(float) for key in ("tokens", "latents", "rare")})),
    ),
    "intervals": Maybe({...: _interval}),
    "documents": Maybe({"count": Maybe(float), "resamples": Maybe(float), "note": Maybe(str)}),
    "breakdown": Maybe({...: _breakdown}),
}
