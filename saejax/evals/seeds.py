"""Figures over seeds, and which setting of several to take.

    mean      of the coders that differ in their seed alone
    spread    their standard deviation, with n - 1
    interval  mean +- t spread / sqrt(n), of 95 %: t is Student's, with n - 1 degrees of freedom

A bootstrap of three values would be too narrow. The interval is about other seeds, not about other text.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saejax.core.bootstrap import LEVEL


@dataclasses.dataclass(frozen=True)
class Trained:
    """A coder with its figures.

    Attributes:
        like: equal for coders that differ in their seed alone.
        seed: of its training; of coders that are alike in it too, which are copies, the first counts.
        place: the hook points; FVE is compared within one place.
        figures: {name: value}, with "l0" and "fve"; None where its training failed.
    """

    name: str
    like: str
    seed: Any
    place: str
    figures: Mapping[str, float | None]


def over_seeds(coders: Sequence[Trained]) -> list[dict[str, Any]]:
    """A dict for each setting: {"setting", "place", "members", "failed", and of each figure its `summary`}."""
    by_setting: dict[str, dict[Any, Trained]] = {}
    for coder in coders:
        by_setting.setdefault(coder.like, {}).setdefault(coder.seed, coder)
    settings = []
    for alike in (list(of_setting.values()) for of_setting in by_setting.values()):
        finished = [coder for coder in alike if coder.figures["fve"] is not None]
        settings.append(
            {
                "setting": _label([coder.name for coder in alike]),
                "place": alike[0].place,
                "members": [coder.name for coder in alike],
                "failed": len(alike) - len(finished),
                **{name: summary([coder.figures[name] for coder in finished]) for name in alike[0].figures},
            }
        )
    return settings


def summary(values: Sequence[Any]) -> dict[str, Any]:
    """{"mean", "spread", "interval": [low, high]} of the finite values of [n]; None what takes more of them."""
    value_N = np.asarray(values, np.float64)
    value_N = value_N[np.isfinite(value_N)]
    if len(value_N) < 2:
        return {"mean": float(value_N[0]) if len(value_N) else None, "spread": None, "interval": None}
    from scipy.special import stdtrit

    mean, spread = float(value_N.mean()), float(value_N.std(ddof=1))
    half = float(stdtrit(len(value_N) - 1, (1 + LEVEL) / 2)) * spread / len(value_N) ** 0.5
    return {"mean": mean, "spread": spread, "interval": [mean - half, mean + half]}


def choices(settings: Sequence[Mapping[str, Any]], most_l0: float | None = None) -> list[str]:
    """A line for each place, which names the setting to take and says why.

    The rule: of the settings whose coders all finished, with a mean L0 of at most `most_l0`, the one with the largest
    mean FVE. Where means of others lie in its interval over seeds, the smallest L0 of them all.
    """
    by_place: dict[str, list[Mapping[str, Any]]] = {}
    for setting in settings:
        by_place.setdefault(setting["place"], []).append(setting)
    lines = [_choice(alike, most_l0) for alike in by_place.values()]
    if len(by_place) == 1:
        return lines
    return [f"At {place}: {line[0].lower()}{line[1:]}" for place, line in zip(by_place, lines, strict=True)]


def _choice(settings: Sequence[Mapping[str, Any]], most_l0: float | None) -> str:
    bound = "" if most_l0 is None else f" at an L0 of at most {most_l0:g}"
    fit = [s for s in settings if not s["failed"] and (most_l0 is None or s["l0"]["mean"] <= most_l0)]
    if not fit:
        return f"Nothing to choose: no setting finished with all its seeds{bound}."
    best = max(fit, key=lambda s: s["fve"]["mean"])
    low = best["fve"]["interval"][0] if best["fve"]["interval"] else best["fve"]["mean"]
    chosen = min((s for s in fit if s["fve"]["mean"] >= low), key=lambda s: (s["l0"]["mean"], -s["fve"]["mean"]))
    why = f"the largest FVE{bound}"
    if chosen is not best:
        why = (
            f"{best['setting']} has {why}, {_figures(best)}, and {chosen['setting']} lies in its interval with a "
            "smaller L0"
        )
    note = "" if best["fve"]["interval"] else "; it has one seed, so a small difference may be chance"
    return f"Choose {chosen['setting']} ({_figures(chosen)}): {why}{note}."


def _figures(setting: Mapping[str, Any]) -> str:
    fve, l0 = setting["fve"], setting["l0"]["mean"]
    interval = " [{:.4f}, {:.4f}]".format(*fve["interval"]) if fve["interval"] else ""
    return f"FVE {fve['mean']:.4f}{interval}, L0 {l0:.1f}"


def _label(names: Sequence[str]) -> str:
    """The name of a setting: what is common to the names of its coders, which end with their seeds."""
    stems = {re.sub(r"[-_.]?(seed|s)?[-_.]?\d+$", "", name) for name in names}
    if len(names) == 1 or len(stems) > 1:
        return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return stems.pop() or "all seeds"
