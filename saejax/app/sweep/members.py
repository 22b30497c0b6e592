"""From a sweep's grid to its members, each a whole experiment, and to the programs that train them. No arrays here."""

import ast
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from saejax.app import console
from saejax.app.experiment import Experiment, deciding, to_run_json, with_settings
from saejax.app.sweep.config import SweepConfig
from saejax.app.workspace import Workspace
from saejax.coders import SPARSITIES, CoderConfig
from saejax.core.config import differences, to_json
from saejax.core.errors import ConfigError, SaejaxError
from saejax.core.settings import settings_of, shared
from saejax.fit.trainable import Group, Member
from saejax.runs import Sweep
from saejax.training.optim import OPTIMIZERS


def sparsity_weights() -> tuple[str, ...]:
    """The keys of `coder` that `sparsity_scales` multiplies."""
    return tuple(key for key, known in settings_of(CoderConfig).items() if known.sparsity_weight)


def sparsity_of(e: Experiment) -> float | None:
    """Latents a token: k, or the target L0 of a coder that is drawn to one; None where a penalty decides."""
    key = _sparsity_key(e.coder)
    return getattr(e.coder, key) if key else None


def of_each(work: Workspace, stage: Callable[[Workspace], int]) -> int:
    """Exit code of a stage after training; of a sweep the largest of its members', 1 for one that cannot have it."""
    if not work.experiment.swept:
        return stage(work)
    codes = [0]
    for member in members(work.experiment):
        console.say(f"{member.name}:")
        try:
            codes.append(stage(work.of(member.experiment)))
        except SaejaxError as error:
            console.say(f"error: {error}")
            codes.append(1)
    return max(codes)


def members(e: Experiment) -> tuple[Member[Experiment], ...]:
    """The grid of `e.sweep`, in the order points, presets, widths, ks, reads, lrs, sparsity scales, seeds.

    Raises:
        ConfigError: an empty grid, a point that cannot be read or sets what all must share, doubled names or points, a
            key that is set twice, an axis that does nothing to a coder.
    """
    by_name: dict[str, Member[Experiment]] = {}
    same: dict[str, str] = {}
    varied = [[(axis, value) for value in values] for axis in _AXES if (values := _values(e.sweep, axis))]
    if not varied and not e.sweep.points:
        raise ConfigError(
            "The sweep is empty. Give it something to vary, such as --config.sweep.seeds=0,1,2 or "
            "--config.sweep.lrs=1e-4,3e-4."
        )
    for point, settings in _points(e):
        for chosen in itertools.product(*varied):
            member = _member(e, point, settings, chosen)
            if member.name in by_name:
                raise ConfigError(
                    f"Two members of the sweep are called {member.name!r}. Give each point a name of its own, and each "
                    "value of an axis once."
                )
            content = json.dumps(to_json(dataclasses.replace(member.experiment, name="same")), sort_keys=True)
            if content in same:
                raise ConfigError(
                    f"{same[content]!r} and {member.name!r} of the sweep are the same run. Remove one of them."
                )
            by_name[member.name], same[content] = member, member.name
    return tuple(by_name.values())


def groups(members: Sequence[Member[Experiment]]) -> tuple[Group[Experiment], ...]:
    """The members by program, in the order in which they come."""
    by_program: dict[str, list[Member[Experiment]]] = {}
    for member in members:
        e = member.unscaled
        # A program is told these from outside.
        lr = e.train.lr if OPTIMIZERS[e.train.optimizer].averages else 1.0
        common = dataclasses.replace(e, name="member", coder_seed=None, train=dataclasses.replace(e.train, lr=lr))
        by_program.setdefault(json.dumps(to_json(common), sort_keys=True), []).append(member)
    return tuple(Group(of_one[0].unscaled, tuple(of_one)) for of_one in by_program.values())


def decided(plan: Sequence[Member[Experiment]]) -> dict[str, Any]:
    """All that decides the numbers of a sweep, and the order of its members."""
    return {member.name: deciding(to_run_json(member.experiment)) for member in plan}


# --- one member ----------------------------------------------------------------------------------------------


def _member(
    e: Experiment, point: str, settings: Mapping[str, Any], chosen: Sequence[tuple[str, Any]]
) -> Member[Experiment]:
    name = "-".join([*([point] if point else []), *(_AXES[axis][0](value) for axis, value in chosen)])
    if name == Sweep.groups:
        raise ConfigError(f"A member of the sweep is called {name!r}, which is a folder of the sweep; rename it.")
    settings, unnamed = dict(settings), with_settings(e, settings)
    for axis, value in chosen:
        added = _AXES[axis][1](unnamed, value)
        if doubled := added.keys() & settings.keys():
            raise ConfigError(f"{doubled.pop()} is set by the point {point!r} and by sweep.{axis}; remove one of them.")
        settings |= added
        unnamed = with_settings(e, settings)
    if changed := differences(shared(Experiment, to_json(e)), shared(Experiment, to_json(unnamed))):
        raise ConfigError(
            f"The member {name!r} changes {'; '.join(changed)}. All members of a sweep are given the same batches "
            "at the same steps; set it for the whole sweep, or make it a sweep of its own."
        )
    unscaled = e.within(unnamed, name, sweep=SweepConfig())
    scale = dict(chosen).get("sparsity_scales", 1.0)
    return Member(name, _scaled(unscaled, scale, name), unscaled, scale)


def _scaled(e: Experiment, scale: float, name: str) -> Experiment:
    """`e` with its sparsity weights multiplied by `scale`."""
    if scale == 1.0:
        return e
    resolved = e.coder.resolved()
    weights = {key: getattr(resolved, key) * scale for key in sparsity_weights() if getattr(resolved, key)}
    if not weights:
        raise ConfigError(
            f"sweep.sparsity_scales does nothing to {name!r}: {e.coder.preset} has no sparsity weight. "
            "Vary sweep.ks instead."
        )
    return dataclasses.replace(e, coder=dataclasses.replace(e.coder, **weights))


# --- the axes ------------------------------------------------------------------------------------------------


def _values(sweep: SweepConfig, axis: str) -> Sequence[Any]:
    values = getattr(sweep, axis)
    if axis not in ("presets", "reads"):
        return values
    return [word.strip() for value in values for word in value.split(",")]  # on the command line topk,jumprelu is one


def _sets(key: str) -> Callable[[Experiment, Any], dict[str, Any]]:
    return lambda e, value: {key: value}


def _sparsity_key(coder: Any) -> str:
    """The key that chooses how many latents a token has; empty where only a penalty does."""
    resolved = coder.resolved()
    if "k" in SPARSITIES[resolved.sparsity].provides:
        return "k"
    return "target_l0" if resolved.target_l0_coefficient else ""


def _sets_k(e: Experiment, k: int) -> dict[str, Any]:
    key = _sparsity_key(e.coder)
    if not key:
        raise ConfigError(
            f"sweep.ks does nothing to {e.coder.preset}: it has neither k nor a target L0. "
            "Vary sweep.sparsity_scales instead."
        )
    return {f"coder.{key}": k}


# {axis of the grid: (what a value is in a name, the settings it stands for)}
_AXES: dict[str, tuple[Callable[[Any], str], Callable[[Experiment, Any], dict[str, Any]]]] = {
    "presets": (str, _sets("coder.preset")),
    # d_sae, where the experiment sets it, is the stronger key.
    "expansions": ("x{}".format, lambda e, value: {"coder.expansion": value, "coder.d_sae": 0}),
    "d_saes": ("d{}".format, _sets("coder.d_sae")),
    "ks": ("k{}".format, _sets_k),
    "reads": (str, lambda e, value: {"reads": (value,)}),
    "lrs": ("lr{}".format, _sets("train.lr")),
    # Told to the program, and in the member's own experiment a factor of its coefficients.
    "sparsity_scales": ("sparsity{}".format, lambda e, value: {}),
    "seeds": ("seed{}".format, _sets("coder_seed")),
}


# --- the points ----------------------------------------------------------------------------------------------


def _points(e: Experiment) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, settings) of each point; one without name and settings where there are none."""
    if not e.sweep.points:
        yield "", {}
    for text in e.sweep.points:
        name, colon, rest = (part.strip() for part in text.partition(":"))
        if not name or not colon:
            raise ConfigError(
                f"sweep.points holds {text!r}; write a point as 'name: key=value,key=value', for example "
                "'wide: coder.expansion=16,train.lr=1e-4'."
            )
        settings: dict[str, Any] = {}
        for part in _outside_brackets(rest):
            key, equals, value = (word.strip() for word in part.partition("="))
            if not key or not equals or not value:
                raise ConfigError(
                    f"The point {name!r} of the sweep holds {part.strip()!r}; write key=value, as coder.k=64."
                )
            settings[key] = _value(value)
        if "coder.expansion" in settings:
            settings.setdefault("coder.d_sae", 0)
        try:
            with_settings(e, settings)
        except ConfigError as error:
            raise ConfigError(f"The point {name!r} of the sweep: {error}") from None
        yield name, settings


def _outside_brackets(text: str) -> Iterator[str]:
    """The parts of `text` between commas, leaving those within brackets."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            yield part
            part = ""
        else:
            part += letter
    if part.strip():
        yield part


def _value(text: str) -> Any:
    """A number, a truth value, a word, or (these, between, brackets)."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        bracketed = text[0] + text[-1] in ("()", "[]")
        return tuple(_value(part.strip()) for part in _outside_brackets(text[1:-1])) if bracketed else text
